#!/bin/sh
# Runs Python of aarch64 on an x86-64 machine with Debian or Ubuntu, by qemu-user, with this checkout's package:
#
#   tools/aarch64/python.sh FOLDER -m ktransformers.cli chat
#
# It wants the packages g++-aarch64-linux-gnu, qemu-user, cmake and ninja-build, and .venv. The first time FOLDER gets the
# system's Python for arm64 and wheels of all that is imported (1.5 GB); nothing else is written. QEMU_CPU chooses a
# processor (`qemu-aarch64 -cpu help`), for example one without dot products: cortex-a72.
set -eu
cd "$(dirname "$0")/../.."
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
root=$folder/sysroot host=$PWD/.venv/bin/python

# Debian's packages, unpacked; apt's state is its own.
if [ ! -d "$root" ]; then
    apt=$folder/apt
    mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial" "$root.new"
    touch "$apt/status"
    apt_get() {
        apt-get -q -o Dir::State="$apt/state" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" \
            -o APT::Architecture=arm64 -o APT::Architectures=arm64 "$@" >&2
    }
    apt_get update
    apt_get install -y --no-install-recommends --download-only python3 libpython3-dev libgomp1 libstdc++6
    for package in "$apt"/cache/archives/*.deb; do dpkg -x "$package" "$root.new"; done
    mv "$root.new" "$root"
fi
minor=$(ls "$root/usr/include" | sed -n 's/^python3\.\([0-9]*\)$/\1/p')

# torch: the last one on the public index that needs no CUDA. The package asks for 2.11 and runs with it.
if [ ! -d "$folder/site" ]; then
    platforms=$(for glibc in 17 26 27 28 31 34; do echo "--platform manylinux_2_${glibc}_aarch64"; done)
    # shellcheck disable=SC2086  # several words
    install() {
        "$host" -m pip install -q --target "$folder/site.new" --no-compile --only-binary=:all: --python-version "3.$minor" \
            --implementation cp --abi "cp3$minor" --abi abi3 --abi none --platform manylinux2014_aarch64 \
            $platforms "$@" >&2
    }
    sed -n '/^dependencies = \[/,/^\]/s/^  "\([^"]*\)".*/\1/p' pyproject.toml | grep -v '^torch' >"$folder/wanted.txt"
    install -r "$folder/wanted.txt" filelock networkx fsspec sympy pytest pytest-timeout hypothesis
    install --no-deps torch==2.10.0
    mv "$folder/site.new" "$folder/site"
fi

suffix=cpython-3$minor-aarch64-linux-gnu
{
    cmake -S . -B "$folder/build" -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
        -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS="-isystem $root/usr/include" \
        -DPython_EXECUTABLE="$host" -DPython_INCLUDE_DIR="$root/usr/include/python3.$minor" -DNB_SUFFIX=".$suffix.so"
    cmake --build "$folder/build"
} >&2
rm -rf "$folder/package"
mkdir "$folder/package"
cp -r ktransformers "$folder/package"
rm -f "$folder"/package/ktransformers/*.so
cp "$folder/build/_native.$suffix.so" "$folder/package/ktransformers"

exec env PYTHONSAFEPATH=1 PYTHONHOME="$root/usr" PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$folder/package:$folder/site" \
    qemu-aarch64 -L "$root" -E LD_LIBRARY_PATH="$root/usr/lib/aarch64-linux-gnu" "$root/usr/bin/python3.$minor" "$@"

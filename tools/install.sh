#!/bin/sh
# Installs ktransformers into a virtual environment; `make chat` and `make test` call it.
#
#   tools/install.sh VENV          what running it takes
#   tools/install.sh VENV dev      that, and what the tests take
#   tools/install.sh --check       only look whether this machine has what an install needs
#
# From the environment, all optional:
#   PYTHON       the interpreter; by default the first that pyproject.toml allows of python3, python3.14, python3.13, ...
#   TORCH        cpu or cuda: which build of torch; by default cuda where there is an NVIDIA GPU
#   TORCH_INDEX  the package index with torch's builds for the CPU
#   CONSTRAINTS  a constraints file for pip; its torch and triton are those of the build for the CPU, and with TORCH=cuda
#                the pair that is installed, or the newest, is taken instead
#
# Whatever is missing is one line with the command that mends it, before anything is downloaded. The kernels are compiled
# while packages are downloaded and unpacked: the one takes processors, the other mostly the network. All output goes to
# stderr, so that `make -s chat` leaves stdout to the answers.
set -eu
exec 1>&2
cd "$(dirname "$0")/.."
: "${TORCH:=}" "${TORCH_INDEX:=https://download.pytorch.org/whl/cpu}" "${CONSTRAINTS:=}"

fail() {
    echo "error: $1"
    exit 1
}

# MANAGER installs NAMES of Debian, Fedora, openSUSE or Arch: the first of them that this machine has.
system_install() {
    if command -v apt-get >/dev/null; then
        echo "sudo apt-get install -y $1"
    elif command -v dnf >/dev/null; then
        echo "sudo dnf install -y $2"
    elif command -v zypper >/dev/null; then
        echo "sudo zypper install -y $3"
    elif command -v pacman >/dev/null; then
        echo "sudo pacman -S --needed $4"
    else
        echo "your system's package manager for: $1"
    fi
}

# requires-python in pyproject.toml is `>=3.LOWEST,<3.BEYOND`.
LOWEST=$(sed -n 's/^requires-python = ">=3\.\([0-9]*\),<3\.[0-9]*"$/\1/p' pyproject.toml)
BEYOND=$(sed -n 's/^requires-python = ">=3\.[0-9]*,<3\.\([0-9]*\)"$/\1/p' pyproject.toml)
NEWEST=$((BEYOND - 1))

is_suitable() {
    "$1" -c "import sys; sys.exit(not (3, $LOWEST) <= sys.version_info[:2] < (3, $BEYOND))" </dev/null 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_suitable "$PYTHON" && return
        found=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' </dev/null 2>/dev/null) || found="not a Python"
        fail "Python 3.$LOWEST to 3.$NEWEST is needed, PYTHON=$PYTHON is $found; leave PYTHON away or name another one"
    fi
    minor=$NEWEST
    for PYTHON in python3 $(while [ "$minor" -ge "$LOWEST" ]; do echo "python3.$minor"; minor=$((minor - 1)); done); do
        is_suitable "$PYTHON" && return
    done
    # What the distribution has by default may be too old; its package lists, which are on disk, tell whether it has more.
    minor=$NEWEST
    while [ "$minor" -ge "$LOWEST" ] && ! apt-cache show "python3.$minor" >/dev/null 2>&1; do minor=$((minor - 1)); done
    if [ "$minor" -ge "$LOWEST" ]; then
        mend="sudo apt-get install -y python3.$minor python3.$minor-venv python3.$minor-dev"
    elif command -v dnf >/dev/null; then
        mend="sudo dnf install -y python3.12 python3.12-devel"
    elif command -v zypper >/dev/null; then
        mend="sudo zypper install -y python312 python312-devel"
    else
        mend="curl -LsSf https://astral.sh/uv/install.sh | sh; ~/.local/bin/uv python install 3.13"
    fi
    fail "Python 3.$LOWEST to 3.$NEWEST is needed and there is none here; run: $mend"
}

find_tools() {
    deb="" rpm="" suse="" arch="" missing=""
    if ! command -v "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
        missing="a C++ compiler" deb="g++" rpm="gcc-c++" suse="gcc-c++" arch="gcc"
    fi
    version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' </dev/null)
    if ! "$PYTHON" -c 'import ensurepip, venv' </dev/null 2>/dev/null; then
        missing="$missing${missing:+ and }Python's venv module"
        deb="$deb python$version-venv" rpm="$rpm python$version" suse="$suse python${version#3.}" arch="$arch python"
    fi
    if ! "$PYTHON" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' </dev/null 2>/dev/null; then
        missing="$missing${missing:+ and }Python's header files"
        deb="$deb python$version-dev" rpm="$rpm python$version-devel" suse="$suse python3-devel" arch="$arch python"
    fi
    if [ -n "$missing" ]; then
        fail "$missing missing; run: $(system_install "${deb# }" "${rpm# }" "${suse# }" "${arch# }")"
    fi
}

# Sizes: torch 2.15 with its CUDA packages, torch 2.13 for the CPU; both with everything else that is installed.
choose_torch() {
    reason="as TORCH=$TORCH says"
    if [ -z "$TORCH" ] && [ "$(uname -s)" != Linux ]; then
        TORCH=cuda reason="there is one build for this system" # the index has no other there
    elif [ -z "$TORCH" ] && { [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null; }; then
        TORCH=cuda reason="an NVIDIA GPU was found; TORCH=cpu takes 1.2 GB instead"
    elif [ -z "$TORCH" ]; then
        TORCH=cpu reason="no NVIDIA GPU was found; TORCH=cuda takes the build for one, 5.6 GB on disk"
    fi
    case $TORCH in
        cpu) sizes="0.3 GB to download, 1.2 GB on disk" needed=1300000 ;;
        cuda) sizes="3 GB to download, 5.6 GB on disk" needed=5900000 ;;
        *) fail "TORCH=$TORCH is not known; it is cpu or cuda" ;;
    esac
}

check_space() {
    free=$(df -Pk "$(dirname "$VENV")" | awk 'NR == 2 { print $4 }')
    if [ "$free" -lt "$needed" ]; then
        fail "$VENV takes $sizes, and $((free / 1024)) MB are free there; run: make chat VENV=/a/larger/disk/.venv"
    fi
}

pip_() {
    "$VENV/bin/python" -m pip --disable-pip-version-check "$@" </dev/null
}

# A chat needs a tenth of the modules that are installed, and Python compiles to bytecode what it imports: pip, which would
# compile all of them, leaves that. Tests take warnings of that compiler for errors.
pip_install() {
    set -- ${CONSTRAINTS:+-c "$CONSTRAINTS"} "$@"
    if [ -z "$EXTRA" ] && [ -z "${PYTHONDONTWRITEBYTECODE:-}" ]; then set -- --no-compile "$@"; fi
    pip_ install "$@"
}

# torch for CUDA asks for one very version of triton, so the two pins, which are tested without a GPU, would be at odds;
# and nobody should download 3 GB again to run the tests.
leave_torch_free() {
    if [ "$TORCH" = cuda ] && [ -n "$CONSTRAINTS" ]; then
        sed '/^torch==/d;/^triton==/d' "$CONSTRAINTS" >"$VENV/constraints.txt"
        CONSTRAINTS="$VENV/constraints.txt"
    fi
}

# With no place to take packages from, pip succeeds if what is wanted is there already.
has_torch() {
    PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS="" pip_install -q --no-index --no-deps "$1" 2>/dev/null
}

# Builds for the CPU are not on the public index under a name of their own. Where pip as it is configured has one (a
# company's mirror, a folder of wheels), that one is taken; elsewhere torch's own index has them. One that is there and
# is as wanted stays; one that is not is replaced from the same places, never by the default index's build for CUDA.
install_torch() {
    wanted=$(sed -n 's/^ *"\(torch[<>=!~].*\)",$/\1/p' pyproject.toml)
    bars="-q"
    [ -t 2 ] && bars="--progress-bar=on"
    has_torch "$wanted" && return
    if [ "$TORCH" = cuda ]; then
        pip_install "$bars" "$wanted"
        return
    fi
    offered=$(pip_ index versions torch 2>/dev/null | tr ' ,' '\n\n' | grep '^[0-9.]*+cpu$' | head -n 1) || true
    if [ -n "$offered" ] && pip_install "$bars" "torch==$offered" "$wanted"; then
        return
    fi
    pip_install "$bars" --retries 1 --index-url "$TORCH_INDEX" "$wanted" ||
        fail "torch for the CPU could not be had from $TORCH_INDEX; name another index with TORCH_INDEX=URL, or run: make chat TORCH=cuda"
}

# Upstream's distribution `ktransformers`, and this one under an earlier name, have the same folder of modules.
remove_namesake() {
    if "$VENV/bin/python" -c 'import importlib.metadata as m; m.version("ktransformers")' </dev/null 2>/dev/null; then
        echo "removing the distribution \`ktransformers\` from $VENV: its modules have the same names"
        pip_ uninstall -q -y ktransformers
    fi
}

# Compiles in the background, in a session of its own: Ctrl-C and a failure elsewhere then end the compilers, too
# (stop_compiling), of which the shell knows none. A process started with & has SIGINT ignored, which pip, cmake and
# ninja would inherit; they get it back, and clean up behind themselves.
OWN_SESSION='import os, signal, sys
os.setsid()
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])'
COMPILING=""

# Tests take every tier that their processor can run, and those of emulated instructions, which take as long again.
start_compiling() {
    COMPILED="$VENV/compile.log"
    set -- install -q --no-deps
    # The long names: pip 23.0, which Debian 12 has, knows no others.
    [ -z "$EXTRA" ] || set -- "$@" --config-settings cmake.define.KTRANSFORMERS_TIERS=all \
        --config-settings cmake.define.KTRANSFORMERS_EMULATED=ON
    "$VENV/bin/python" -c "$OWN_SESSION" "$VENV/bin/python" -m pip --disable-pip-version-check "$@" -e . \
        </dev/null >"$COMPILED" 2>&1 &
    COMPILING=$!
}

# A process that is just being started can miss the signal: it comes again, and then one that nobody misses.
stop_compiling() {
    if [ -n "$COMPILING" ]; then
        group="-$COMPILING"
        kill -s INT -- "$group" 2>/dev/null || kill -TERM "$COMPILING" 2>/dev/null || true
        (
            for name in INT KILL; do
                sleep 3
                kill -s "$name" -- "$group"
            done
        ) </dev/null >/dev/null 2>&1 &
        again=$!
        wait "$COMPILING" 2>/dev/null || true
        kill "$again" 2>/dev/null || true
        kill -s KILL -- "$group" 2>/dev/null || true
        COMPILING=""
    fi
}

# Waits, and shows what the compilers said where they failed.
finish_compiling() {
    code=0
    wait "$COMPILING" || code=$?
    COMPILING=""
    if [ "$code" -ne 0 ]; then
        cat "$COMPILED"
        fail "the C++ kernels could not be compiled (above, and in $COMPILED)"
    fi
    rm -f "$COMPILED"
}

# The packages that pyproject.toml names, and no project: it is being compiled.
write_requirements() {
    "$VENV/bin/python" -c 'import sys, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = [one for name in sys.argv[1:] for one in project["optional-dependencies"][name]]
print("\n".join(project["dependencies"] + extras))' $1 </dev/null >"$VENV/requirements.txt"
}

install_program() {
    choose_torch
    [ -d "$VENV" ] || check_space
    echo "installing into $VENV (once): $sizes"
    # A venv whose creation was interrupted has a python and no pip.
    "$VENV/bin/python" -m pip --version </dev/null >/dev/null 2>&1 || "$PYTHON" -m venv "$VENV" </dev/null
    leave_torch_free
    remove_namesake
    trap stop_compiling EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    echo "1/3 compiling the C++ kernels (one to three minutes${EXTRA:+; for tests two to six}), while packages are downloaded"
    start_compiling
    echo "2/3 torch for ${TORCH}: $reason"
    install_torch
    echo "3/3 the other packages${EXTRA:+, those of the tests (0.4 GB, 1.2 GB on disk)}"
    write_requirements "$EXTRA"
    pip_install -q -r "$VENV/requirements.txt"
    finish_compiling
}

VENV=${1:-.venv}
EXTRA=${2:-}
if [ "$VENV" = --check ] || ! [ -x "$VENV/bin/python" ]; then
    find_python
fi
: "${PYTHON:=$VENV/bin/python}"
find_tools
if [ "$VENV" = --check ]; then
    choose_torch
    echo "$PYTHON can install ktransformers; torch for $TORCH, $reason: $sizes"
    exit
fi
install_program

#!/bin/sh
# Builds the extension with sanitizers of GCC, beside the ordinary one, and runs tests of the kernels with it.
#
#   tools/sanitize/run.sh PYTHON address    AddressSanitizer and UBSan: all tests of the kernels
#   tools/sanitize/run.sh PYTHON thread     ThreadSanitizer: the worker pool and what runs on it
#
# What follows goes to pytest instead of those tests. The first build takes some minutes. A finding ends the tests.
set -eu
cd "$(dirname "$0")/../.."
python=$1 kind=$2
shift 2
at=$PWD/build/sanitize-$kind

library() {
    file=$("${CXX:-c++}" -print-file-name="$1")
    [ -e "$file" ] || { echo "error: ${CXX:-c++} has no $1; install it, or name a GCC with CXX=" >&2; exit 1; }
    echo "$file"
}

isolation=""
if command -v cmake >/dev/null; then isolation=--no-build-isolation; fi # else pip brings one, and all is compiled again
"$python" -m pip --disable-pip-version-check install -q $isolation --no-deps --upgrade --target "$at/site" \
    -C build-dir="$at/cmake" -C cmake.define.KTRANSFORMERS_SANITIZE="$kind" -C cmake.define.KTRANSFORMERS_EMULATED=ON \
    -C cmake.define.KTRANSFORMERS_TIERS=all .

KTRANSFORMERS_NATIVE=$(ls "$at"/site/ktransformers/_native*.so)
export KTRANSFORMERS_NATIVE PYTHONPATH=tools/sanitize
export OMP_NUM_THREADS=1 # torch's own threads are not compiled with sanitizers
export UBSAN_OPTIONS=print_stacktrace=1
pytest="-m pytest -q -x -p no:cacheprovider -p no:faulthandler"
case $kind in
    address)
        # CPython and torch leave memory to the end of the process.
        export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 PYTHONMALLOC=malloc
        [ $# -gt 0 ] || set -- tests/kernels --ignore tests/kernels/triton
        preload="$(library libasan.so) $(library libubsan.so) $(library libstdc++.so)"
        LD_PRELOAD=$preload exec "$python" $pytest "$@"
        ;;
    thread)
        # A child of fork() without its parent's threads is more than ThreadSanitizer knows.
        fork="::test_fork_and_exit_in_a_fresh_process[fork"
        [ $# -gt 0 ] || set -- tests/kernels/cpu/test_pool.py tests/kernels/cpu/test_profile.py tests/kernels/transfer/test_async_cpu_experts.py tests/kernels/cpu/test_moe.py \
            --deselect "tests/kernels/cpu/test_pool.py$fork" --deselect "tests/kernels/transfer/test_async_cpu_experts.py$fork"
        export TSAN_OPTIONS=halt_on_error=1
        # Its memory map does not bear random addresses of more than 28 bits.
        preload="$(library libtsan.so) $(library libstdc++.so)"
        LD_PRELOAD=$preload exec setarch -R "$python" $pytest "$@"
        ;;
esac

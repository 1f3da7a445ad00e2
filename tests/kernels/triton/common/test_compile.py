"""The kernels compile for a GPU: the interpreter accepts more than the compiler does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ktransformers.kernels.triton.common import runtime

if runtime.triton is None:
    pytest.skip("triton is not installed", allow_module_level=True)


PRODUCTS = ("_gemv_kernel", "_tile_kernel", "_gate_up_gemv", "_down_gemv", "_gate_up_tile", "_down_tile")
RECURRENT = ("conv_kernel", "rows_kernel", "prepare_kernel", "chunks_kernel", "gates_kernel", "selective_kernel")
ROUTERS = ("_product_kernel", "_router_kernel", "'SOFTMAX'", "'SIGMOID'")
STREAMS = ("_norm_kernel", "_silu_kernel", "_collapse_kernel")
HOT = ("_split_kernel", "_sum_onto_kernel")
GATED = ("_rope_kernel", "_gate_heads_kernel")
CHOICES = ("_score_kernel", "_pool_kernel", "_expand_kernel", "_greatest_kernel", "_best_kernel", "_candidates_kernel")
ATTENTION = ("decode_kernel", "prefill_kernel", "_materialized_kernel", "_widen_kernel")


def run_script(name: str, *arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of tests/support with Triton's compiler, which the interpreter replaces in this process."""
    root = Path(__file__).parents[4]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # fusing s * q - m is wanted; the variable keeps versions quiet that ask for a choice
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path, "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", f"tests.support.triton_kernels.{name}", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arguments", "kernels"),
    [
        pytest.param(
            ["--sm", "90", "--few"],
            (*PRODUCTS, *HOT, *ATTENTION, *RECURRENT, *GATED, *CHOICES, *ROUTERS, *STREAMS),
            id="sm90",
        ),
        pytest.param(["--sm", "90"], (*PRODUCTS, *ATTENTION), id="sm90-more", marks=pytest.mark.exhaustive),
        pytest.param(["--sm", "89", "--attention"], ATTENTION, id="sm89", marks=pytest.mark.exhaustive),
        pytest.param(["--sm", "90", "--routers"], ROUTERS, id="sm90-routers", marks=pytest.mark.exhaustive),
        pytest.param(["--sm", "90", "--recurrent"], RECURRENT, id="sm90-recurrent", marks=pytest.mark.exhaustive),
        pytest.param(["--sm", "89", "--recurrent"], RECURRENT, id="sm89-recurrent", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_compile_and_fit(arguments, kernels, tmp_path):
    """For an H100; and attention for a GPU of a workstation, which has less than half of its shared memory."""
    done = run_script("compile_launches", *arguments, cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in kernels:
        assert kernel in done.stdout


def test_what_is_rehearsed_is_compiled_once(tmp_path):
    """Into Triton's folder, from which the next process reads it; what nobody rehearsed is named in the log."""
    for expected in ("rehearsed 6 compiled 3", "rehearsed 6 from disk 3"):
        done = run_script("rehearse_launches", cache=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert expected in done.stdout
        (line,) = [line for line in done.stdout.splitlines() if "while serving" in line]
        assert "_rms_norm_kernel" in line
        assert "WIDTH=32" in line
        kind = "compiled" if "compiled" in expected else "read from the disk"
        assert f"a kernel was {kind} while serving" in line


@pytest.mark.parametrize(
    "arguments", [pytest.param([], id="few"), pytest.param(["--all"], id="all", marks=pytest.mark.exhaustive)]
)
def test_types_of_every_kind_pass_the_front_end(arguments, tmp_path):
    """Of weights in groups too, whose sizes no table has: the compiler visits branches that the interpreter skips."""
    done = run_script("front_end", *arguments, cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no error" in done.stdout

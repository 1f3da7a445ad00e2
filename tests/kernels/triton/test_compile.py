"""The kernels compile for a GPU: the interpreter accepts more than the compiler does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ktransformers.kernels.triton import runtime

if runtime.triton is None:
    pytest.skip("triton is not installed", allow_module_level=True)


PRODUCTS = ("_vector_kernel", "_tile_kernel", "_gate_up_vector", "_down_vector", "_gate_up_tile", "_down_tile")
ATTENTION = ("decode_kernel", "prefill_kernel", "_expanded_kernel")


@pytest.mark.parametrize(
    ("arguments", "kernels"),
    [(["--sm", "90"], (*PRODUCTS, *ATTENTION)), (["--sm", "89", "--attention"], ATTENTION)],
    ids=["sm90", "sm89"],
)
def test_kernels_compile_and_fit(arguments, kernels, tmp_path):
    """For an H100; and attention for a GPU of a workstation, which has less than half of its shared memory."""
    root = Path(__file__).parents[3]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # fusing s * q - m is wanted; the variable keeps versions quiet that ask for a choice
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path, "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, Path(__file__).with_name("compile_launches.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in kernels:
        assert kernel in done.stdout

"""Masks made of vectors and scalars, by which kernels leave out what a whole program does."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.triton.common import runtime

if runtime.triton is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from ktransformers.kernels.triton.common.runtime import jit, tl

WIDTH = 16


@jit(do_not_specialize=["width", "most"])
def _masked_kernel(x_ptr, out_ptr, width, most, least, BLOCK: tl.constexpr):
    """Copies columns below width where width is not above most and the first value not below least."""
    columns = tl.arange(0, BLOCK)
    is_wanted = (columns < width) & (width <= most) & (tl.load(x_ptr) >= least)
    values = tl.load(x_ptr + columns, mask=is_wanted, other=-1.0)
    tl.store(out_ptr + columns, values, mask=(columns < width) | (width > most))


@pytest.mark.parametrize("width", [1, 7, WIDTH])
@pytest.mark.parametrize(("most", "least"), [(WIDTH, 0.0), (0, 0.0), (WIDTH, 2.0)])
def test_scalars_in_masks(width, most, least, device):
    x = torch.arange(1, WIDTH + 1, dtype=torch.float32, device=device)
    out = torch.zeros_like(x)
    _masked_kernel[(1,)](x, out, width, most, least, BLOCK=WIDTH)
    is_read = width <= most and float(x[0]) >= least
    wanted = [(i + 1.0 if is_read else -1.0) if i < width or width > most else 0.0 for i in range(WIDTH)]
    assert out.tolist() == wanted

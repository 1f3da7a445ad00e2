"""Activations of the GEMV loops: 16-bit floats, four in an int64, the same for all lanes that multiply a group."""

from __future__ import annotations

from ktransformers.kernels.triton.common.bits import half_bits
from ktransformers.kernels.triton.common.runtime import jit, tl

__all__ = ["group_inputs", "pair"]


@jit
def pair(word, HALF: tl.constexpr):
    """Return the two 16-bit floats of an int32, fp32 each. HALF: fp16, else bf16."""
    if HALF:
        return half_bits(word), half_bits(word >> 16)
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@jit
def group_inputs(x, group, inside, EVEN: tl.constexpr):
    """Load the 32 activations of each group, as 8 int64 [KS, 1] of four. x: 16-bit floats at a multiple of 8 bytes."""
    at = x.to(tl.pointer_type(tl.int64)) + group * 8
    mask = None if EVEN else inside
    other = None if EVEN else 0
    return (
        tl.load(at, mask=mask, other=other), tl.load(at + 1, mask=mask, other=other),
        tl.load(at + 2, mask=mask, other=other), tl.load(at + 3, mask=mask, other=other),
        tl.load(at + 4, mask=mask, other=other), tl.load(at + 5, mask=mask, other=other),
        tl.load(at + 6, mask=mask, other=other), tl.load(at + 7, mask=mask, other=other),
    )  # fmt: skip

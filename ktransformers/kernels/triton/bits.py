"""What the readers of every layout share: the types' numbers and a few bit operations inside kernels."""

from __future__ import annotations

from ktransformers.kernels.quant import QuantType
from ktransformers.kernels.triton.runtime import constant, jit, tl

__all__ = ["F8_E4M3", "F8_E4M3_TYPE", "ONE", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "half_bits", "shifted"]

#: The bits of 1.0 in fp32: argument `one` of the kernels.
ONE = 0x3F800000

# ggml's numbers of the types: constants of the kernels (Triton reads a global only as a constexpr).
Q4_0 = constant(int(QuantType.Q4_0))
Q8_0 = constant(int(QuantType.Q8_0))
Q4_K = constant(int(QuantType.Q4_K))
Q5_K = constant(int(QuantType.Q5_K))
Q6_K = constant(int(QuantType.Q6_K))
#: FP8 e4m3 with one fp32 scale for 128 x 128 weights (fp8.py): not a type of ggml, so a number of ours.
F8_E4M3_TYPE = 1000
F8_E4M3 = constant(F8_E4M3_TYPE)


@jit
def shifted(x, amount: tl.constexpr):
    """x << amount, or x >> -amount."""
    if amount >= 0:
        return x << amount
    return x >> (-amount)


@jit
def half_bits(x):
    """The low 16 bits of an int32 as fp16, widened."""
    return (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)

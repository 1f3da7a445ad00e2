"""Shared by the readers of every layout: the types' numbers and a few bit operations inside kernels."""

from __future__ import annotations

from ktransformers.kernels.triton.common.runtime import constant, jit, tl
from ktransformers.kernels.types import OwnType, QuantType

__all__ = [
    "BF16",
    "F8_E4M3",
    "F8_E4M3_TYPE",
    "F16",
    "MXFP4",
    "ONE",
    "Q4_0",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q8_0",
    "e2m1",
    "e2m1_small",
    "e4m3",
    "e8m0",
    "half_bits",
    "shifted",
]

#: The bits of 1.0 in fp32: argument `one` of the kernels.
ONE = 0x3F800000

# ggml's numbers of the types: constants of the kernels (Triton reads a global only as a constexpr).
Q4_0 = constant(int(QuantType.Q4_0))
Q8_0 = constant(int(QuantType.Q8_0))
Q4_K = constant(int(QuantType.Q4_K))
Q5_K = constant(int(QuantType.Q5_K))
Q6_K = constant(int(QuantType.Q6_K))
MXFP4 = constant(int(QuantType.MXFP4))
F16 = constant(int(QuantType.F16))
BF16 = constant(int(QuantType.BF16))
#: FP8 e4m3 with one fp32 scale for 128 x 128 weights (Fp8Matrix): not a type of ggml, so a number of ours.
F8_E4M3_TYPE = int(OwnType.F8_E4M3)
F8_E4M3 = constant(F8_E4M3_TYPE)


@jit
def shifted(x, amount: tl.constexpr):
    """Return x << amount, or x >> -amount."""
    if amount >= 0:
        return x << amount
    return x >> (-amount)


@jit
def half_bits(x):
    """Return the low 16 bits of an int32 as fp16, widened."""
    return (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


# Numbers of few bits: those bits, moved to the place of fp32's (where an arithmetic shift copies the sign), are the
# number times a power of two, subnormals included.


@jit
def e4m3(word, at: tl.constexpr):
    """Return the FP8 number in bits at .. at + 7 of an int32."""
    bits = (shifted(word, 24 - at) >> 4) & -2014314496  # 0x87F00000: the number times 2^-120
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@jit
def e2m1_small(word, at: tl.constexpr):
    """Return 2^-126 times the FP4 number in bits at .. at + 3 of an int32."""
    return ((shifted(word, 28 - at) >> 6) & -2118123520).to(tl.float32, bitcast=True)  # 0x81C00000


@jit
def e2m1(word, at: tl.constexpr):
    """Return twice the FP4 number in bits at .. at + 3 of an int32."""
    return e2m1_small(word, at) * 1.7014118346046923e38  # 2^127


@jit
def e8m0(exponent):
    """Return 2^(exponent - 128) for an int32 in 0 .. 255: half of what OCP's MX formats call the scale, as ggml
    has it.
    """
    return tl.where(exponent < 2, (exponent + 1) << 21, (exponent - 1) << 23).to(tl.float32, bitcast=True)

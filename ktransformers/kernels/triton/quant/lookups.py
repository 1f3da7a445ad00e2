"""Codes of IQ1, IQ2 and IQ3 looked up in shared memory, for the GEMV loops of these types.

A table lies in registers, spread over the threads, and each step of a loop brings it to shared memory anew: one or two
stores a thread. There 32 lanes that read where they please meet in three or four turns of the banks, in the L1 cache
in 13, and loads from memory may get a layout of their own, which costs a way through shared memory too. Knows
cpu_packed_grid.py.
"""

from __future__ import annotations

from ktransformers.kernels.triton.common.byte_ops import permute_bytes
from ktransformers.kernels.triton.common.runtime import jit, static, tl
from ktransformers.kernels.triton.quant.cpu_packed_grid import IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, byte_of
from ktransformers.kernels.types import QuantType

__all__ = ["code_count", "has_codes_of_four", "looked_up"]

_OF_FOUR = frozenset(map(int, (QuantType.IQ3_XXS, QuantType.IQ3_S)))
_CODES = {
    int(QuantType.IQ2_XXS): 256,
    int(QuantType.IQ2_XS): 512,
    int(QuantType.IQ2_S): 1024,
    int(QuantType.IQ3_XXS): 256,
    int(QuantType.IQ3_S): 512,
    int(QuantType.IQ1_S): 2048,
    int(QuantType.IQ1_M): 2048,
}


@static
def code_count(type_number):
    """Return the entries of a type's table: how many codes it has."""
    return _CODES[type_number]


@static
def has_codes_of_four(type_number):
    """Whether a code stands for 4 columns, so that a part of 32 has 8 of them; else for 8."""
    return type_number in _OF_FOUR


@jit
def joined(a, b, c, d):
    """Join four [P, BN] to [P, BN, 2, 2]."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@jit
def parted(x):
    """Split what `joined` made into its four [P, BN]."""
    low, high = tl.split(x)
    a, c = tl.split(low)
    b, d = tl.split(high)
    return a, b, c, d


@jit
def four_looked_up(table, a, b, c, d):
    """Look four indices up in `table`, [P, BN] each."""
    at = tl.reshape(joined(a, b, c, d), (a.shape[0] * a.shape[1] * 4,))
    return parted(tl.reshape(tl.gather(table, at, 0), (a.shape[0], a.shape[1], 2, 2)))


@jit
def high_bits(words, h: tl.constexpr, TYPE: tl.constexpr):
    """Return what codes 4 h .. 4 h + 3 of parts have above their lowest 8 bits, a byte each; of types that have
    such.
    """
    if TYPE == IQ2_XS:
        return (words[2] >> 7) & 0x01010101
    if TYPE == IQ3_S:
        return (words[3] >> h) & 0x01010101
    if TYPE == IQ2_S:
        return words[3] & 0x03030303
    return words[3] & 0x07070707


@jit
def four_codes(words, h: tl.constexpr, TYPE: tl.constexpr):
    """Return codes 4 h .. 4 h + 3 of parts."""
    low = words[h]
    if TYPE == IQ2_XXS or TYPE == IQ3_XXS:
        return byte_of(low, 0), byte_of(low, 1), byte_of(low, 2), byte_of(low, 3)
    high = high_bits(words, h, TYPE)
    ab, cd = permute_bytes(low, high, 0x5140), permute_bytes(low, high, 0x7362)
    return ab & 0xFFFF, ab >> 16, cd & 0xFFFF, cd >> 16


@jit
def looked_up(table, words, TYPE: tl.constexpr):
    """Look the codes of parts [P, BN] up in `table` [code_count]: a tuple of 4, or of 8, in the codes' order.

    words: of `part_words`. All codes are looked up at once, because each time the threads wait for one another.
    """
    a, b, c, d = four_codes(words, 0, TYPE)
    if has_codes_of_four(TYPE):
        P: tl.constexpr = words[0].shape[0]
        BN: tl.constexpr = words[0].shape[1]
        e, f, g, h = four_codes(words, 1, TYPE)
        at = tl.reshape(tl.join(joined(a, b, c, d), joined(e, f, g, h)), (P * BN * 8,))
        first, second = tl.split(tl.reshape(tl.gather(table, at, 0), (P, BN, 2, 2, 2)))
        a, b, c, d = parted(first)
        e, f, g, h = parted(second)
        found = (a, b, c, d, e, f, g, h)
    else:
        found = four_looked_up(table, a, b, c, d)
    return found

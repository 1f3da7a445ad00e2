"""Tables in which kernels look codes up: one tensor per device, made when it is first asked for.

Every kernel that reads weights takes its address beside `one`; readers of types without tables never touch it. The
first call of a kernel compiles it, outside of a graph's capture, and makes the tensor then. What is in it:

    IQ2_XXS, IQ2_XS, IQ2_S   int64 [256], [512], [1024]   columns 0-3 in the lower half, 4-7 in the upper, 6 bits each
    IQ3_XXS, IQ3_S           int32 [256], [512]           4 columns of 6 bits
    IQ1_S and IQ1_M          int16 [2048]                 8 columns of 2 bits, each plus one

The first column is always the lowest. Behind these, for block_int16_gemv.py, int32 for each code: of IQ2 and IQ1 byte r
has the rank of column r among the values of the type in its lower nibble, and that of column r + 4 in its upper one; of
IQ3 byte r is the value of column r. At the end the values by rank, a byte each, in words of four, each word 8 times: of
IQ2 and of IQ1 those with one sign (or delta) and those with the other, the 16 of IQ4, and twice the 16 of FP4.
Knows the content; cpu_packed_grid.py, linear/grid.py and linear/block_int16_gemv.py read it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ktransformers.kernels.cpu import grid_values
from ktransformers.kernels.triton.common.runtime import constant
from ktransformers.kernels.types import QuantType

__all__ = [
    "AT_IQ1",
    "AT_IQ2_S",
    "AT_IQ2_XS",
    "AT_IQ2_XXS",
    "AT_IQ3_S",
    "AT_IQ3_XXS",
    "BYTES_IQ3_S",
    "BYTES_IQ3_XXS",
    "RANKS_IQ1",
    "RANKS_IQ2_S",
    "RANKS_IQ2_XS",
    "RANKS_IQ2_XXS",
    "VALUES_FP4",
    "VALUES_IQ1",
    "VALUES_IQ2",
    "VALUES_IQ4",
    "tables",
]

# Numbers of 32 bits before each table.
AT_IQ2_XXS = constant(0)
AT_IQ2_XS = constant(512)
AT_IQ2_S = constant(1536)
AT_IQ3_XXS = constant(3584)
AT_IQ3_S = constant(3840)
AT_IQ1 = constant(4352)
RANKS_IQ2_XXS = constant(5376)
RANKS_IQ2_XS = constant(5632)
RANKS_IQ2_S = constant(6144)
BYTES_IQ3_XXS = constant(7168)
BYTES_IQ3_S = constant(7424)
RANKS_IQ1 = constant(7936)
VALUES_IQ2 = constant(9984)
VALUES_IQ1 = constant(10000)
VALUES_IQ4 = constant(10016)
VALUES_FP4 = constant(10048)
_FOURS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_VALUES = (
    *(8, 25, 43, 0, -8, -25, -43, 0),
    *(-7, 1, 9, 0, -9, -1, 7, 0),
    *_FOURS,
    *(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
)
_TWOS = (QuantType.IQ2_XXS, QuantType.IQ2_XS, QuantType.IQ2_S)
_ORDER = (*_TWOS, QuantType.IQ3_XXS, QuantType.IQ3_S, QuantType.IQ1_S)


def _packed(qtype: QuantType) -> bytes:
    values = grid_values(qtype).astype(np.int64)
    if qtype is QuantType.IQ1_S:
        return ((values // 8 + 1) << (2 * np.arange(8))).sum(axis=1).astype(np.uint16).tobytes()
    column = np.arange(values.shape[1])
    packed = (values << (6 * column + 8 * (column // 4))).sum(axis=1)  # the upper half begins at bit 32
    return packed.astype(np.int64 if qtype in _TWOS else np.int32).tobytes()


def _looked_up(qtype: QuantType) -> bytes:
    """For each code ranks, or of IQ3 values."""
    values = grid_values(qtype).astype(np.int64)
    found = values if values.shape[1] == 4 else np.searchsorted(np.unique(values), values)
    column = np.arange(values.shape[1])
    return (found << (8 * (column % 4) + 4 * (column // 4))).sum(axis=1).astype(np.int32).tobytes()


@cache
def tables(device: torch.device) -> Tensor:
    """Return the tables of all types on a device, int32, contiguous, at the offsets that their readers know."""
    values = np.repeat(np.array(_VALUES, np.int8).view(np.int32), 8)
    parts = [*map(_packed, _ORDER), *map(_looked_up, _ORDER), values.tobytes()]
    content = b"".join(parts)
    return torch.frombuffer(bytearray(content), dtype=torch.int32).to(device)

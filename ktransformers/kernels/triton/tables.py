"""What kernels look codes up in: one tensor per device, made when it is first asked for.

Every kernel that reads weights takes its address beside `one`; readers of types without tables never touch it. The
first call of a kernel compiles it, outside of a graph's capture, and makes the tensor then. What is in it:

    IQ2_XXS, IQ2_XS, IQ2_S   int64 [256], [512], [1024]   columns 0-3 in the lower half, 4-7 in the upper, 6 bits each
    IQ3_XXS, IQ3_S           int32 [256], [512]           4 columns of 6 bits
    IQ1_S and IQ1_M          int16 [2048]                 8 columns of 2 bits, each plus one

The first column is always the lowest. Knows the content; tiles_grid.py reads it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ktransformers.kernels.cpu import grid_values
from ktransformers.kernels.triton.runtime import constant
from ktransformers.kernels.types import QuantType

__all__ = ["AT_IQ1", "AT_IQ2_S", "AT_IQ2_XS", "AT_IQ2_XXS", "AT_IQ3_S", "AT_IQ3_XXS", "tables"]

# Numbers of 32 bits before each table.
AT_IQ2_XXS = constant(0)
AT_IQ2_XS = constant(512)
AT_IQ2_S = constant(1536)
AT_IQ3_XXS = constant(3584)
AT_IQ3_S = constant(3840)
AT_IQ1 = constant(4352)
_TWOS = (QuantType.IQ2_XXS, QuantType.IQ2_XS, QuantType.IQ2_S)
_ORDER = (*_TWOS, QuantType.IQ3_XXS, QuantType.IQ3_S, QuantType.IQ1_S)


def _packed(qtype: QuantType) -> bytes:
    values = grid_values(qtype).astype(np.int64)
    if qtype is QuantType.IQ1_S:
        return ((values // 8 + 1) << (2 * np.arange(8))).sum(axis=1).astype(np.uint16).tobytes()
    column = np.arange(values.shape[1])
    packed = (values << (6 * column + 8 * (column // 4))).sum(axis=1)  # the upper half begins at bit 32
    return packed.astype(np.int64 if qtype in _TWOS else np.int32).tobytes()


@cache
def tables(device: torch.device) -> Tensor:
    """int32, contiguous, on the device: the tables of all types, at the offsets that their readers know."""
    content = b"".join(_packed(qtype) for qtype in _ORDER)
    return torch.frombuffer(bytearray(content), dtype=torch.int32).to(device)

"""Tables that kernels look codes up in, in a GPU's memory: made once for each device.

Bytes of the one tensor, by type:

    IQ2_XXS, IQ2_XS, IQ2_S   int64 [256], [512], [1024]   columns 0-3 in the lower half, 4-7 in the upper, 6 bits each
    IQ3_XXS, IQ3_S           int32 [256], [512]           4 columns of 6 bits
    IQ1_S and IQ1_M          int16 [2048]                 8 columns of 2 bits, each plus one

The first column is always the lowest. Knows the content; tiles_grid.py reads it.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from ktransformers.kernels.cpu import grid_values
from ktransformers.kernels.triton.runtime import constant
from ktransformers.kernels.types import QuantType

__all__ = ["AT_IQ1", "AT_IQ2_S", "AT_IQ2_XS", "AT_IQ2_XXS", "AT_IQ3_S", "AT_IQ3_XXS", "tables"]

# Bytes before each type's table.
AT_IQ2_XXS = constant(0)
AT_IQ2_XS = constant(2048)
AT_IQ2_S = constant(6144)
AT_IQ3_XXS = constant(14336)
AT_IQ3_S = constant(15360)
AT_IQ1 = constant(17408)
_ORDER = (
    QuantType.IQ2_XXS,
    QuantType.IQ2_XS,
    QuantType.IQ2_S,
    QuantType.IQ3_XXS,
    QuantType.IQ3_S,
    QuantType.IQ1_S,
)


def _packed(qtype: QuantType) -> bytes:
    values = grid_values(qtype).astype(np.int64)
    bits = 2 if qtype is QuantType.IQ1_S else 6
    if qtype is QuantType.IQ1_S:
        values = values // 8 + 1
    shifts = bits * np.arange(values.shape[1])
    if qtype in (QuantType.IQ2_XXS, QuantType.IQ2_XS, QuantType.IQ2_S):
        shifts[4:] += 8  # the upper half begins at bit 32
    packed = (values << shifts).sum(axis=1)
    width = {2: np.int16, 6: np.int32 if values.shape[1] == 4 else np.int64}[bits]
    return packed.astype(width).tobytes()


@functools.cache
def tables(device: torch.device) -> Tensor:
    """uint8, on `device`: the same tensor each time, so that captured graphs may keep its address."""
    content = b"".join(_packed(qtype) for qtype in _ORDER)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)

"""Hands over the tables that codes of IQ1, IQ2 and IQ3 stand for, from the gguf package to csrc/runtime/grids.h."""

from __future__ import annotations

from functools import cache

import numpy as np
from gguf import quants

from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import QuantType

__all__ = ["hand_over_grids"]

# What the extension wants a table's values multiplied with: values of IQ1 are -1, 0, 1 and 1/8 more or less.
_GRIDS = {
    QuantType.IQ2_XXS: (quants.IQ2_XXS, 1),
    QuantType.IQ2_XS: (quants.IQ2_XS, 1),
    QuantType.IQ2_S: (quants.IQ2_S, 1),
    QuantType.IQ3_XXS: (quants.IQ3_XXS, 1),
    QuantType.IQ3_S: (quants.IQ3_S, 1),
    QuantType.IQ1_S: (quants.IQ1_S, 8),
}


@cache
def hand_over_grids() -> None:
    """Gives the extension its tables; to be called before it computes with such a type. Later calls do nothing."""
    for qtype, (format_class, factor) in _GRIDS.items():
        format_class.init_grid()
        values = np.asarray(format_class.grid, dtype=np.float32) * np.float32(factor)
        extension.set_grid(int(qtype), values.astype(np.int8).tobytes())

"""The tables of the gguf package in which codes of IQ1, IQ2 and IQ3 are looked up; passes them to
csrc/runtime/grids.h.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
from gguf import quants

from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import QuantType

__all__ = ["grid_values", "register_grids"]

# What a table's values are multiplied with: those of IQ1 are -1, 0, 1 and 1/8 more or less.
_GRIDS = {
    QuantType.IQ2_XXS: (quants.IQ2_XXS, 1),
    QuantType.IQ2_XS: (quants.IQ2_XS, 1),
    QuantType.IQ2_S: (quants.IQ2_S, 1),
    QuantType.IQ3_XXS: (quants.IQ3_XXS, 1),
    QuantType.IQ3_S: (quants.IQ3_S, 1),
    QuantType.IQ1_S: (quants.IQ1_S, 8),
}


def grid_values(qtype: QuantType) -> npt.NDArray[np.int8]:
    """Return what each code of a type stands for, int8 [codes, columns]; of IQ1 (both types have the table of IQ1_S) 8
    times that.

    Raises KeyError for a type without such a table.
    """
    format_class, factor = _GRIDS[qtype]
    format_class.init_grid()
    values = np.asarray(format_class.grid, dtype=np.float32) * np.float32(factor)
    return values.reshape(values.shape[-2:]).astype(np.int8)


@cache
def register_grids() -> None:
    """Pass the grids to the extension; to be called before it computes with a type that has one. Later calls do
    nothing.
    """
    for qtype in _GRIDS:
        extension.set_grid(int(qtype), grid_values(qtype).tobytes())

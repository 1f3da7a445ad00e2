"""The table of weight types, as the native extension has it (csrc/runtime/formats.h): sizes, and which kernels compute.

Everything that is a set of types or a size of theirs in Python is derived from this table. Weights in groups have types
of their own (`GroupType`), whose numbers say in bits what they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from ktransformers.kernels.extension import extension

__all__ = ["FORMATS", "ActForm", "Format", "Kernels"]


class ActForm(IntEnum):
    """Form of the activations for a weight type: FLOAT, or int8 with a scale per 32 (Q32) or 256 (Q256) values."""

    FLOAT = 0
    Q32 = 1
    Q256 = 2


class Kernels(IntEnum):
    """Files of csrc/kernels that compute with a type. PLAIN: numbers in rows. GRID: codes that are looked up,
    TRELLIS: codes that are seeds of values."""

    PLAIN = 0
    PACKED = 1
    LOW = 2
    GRID = 3
    FP8 = 4
    TRELLIS = 5


@dataclass(frozen=True)
class Format:
    """Record of one weight type.

    number: ggml's, or one outside of its range. block, nbytes: elements and bytes of a block in rows. form: what
    `cpu.linear` does to activations. A packed tile of 16 rows is `head_bytes` for every `head_cols` columns, padded to
    64 bytes, then `packed_bytes` for every block; 0: the type is not packed. halves: bytes from a block's start at
    which it has fp16 numbers. row_head: bytes in front of a row's blocks, a scale of the whole row: fp32 if 4, fp16 if
    2; 0 of most types.
    """

    number: int
    name: str
    block: int
    nbytes: int
    form: ActForm
    kernels: Kernels
    head_cols: int
    head_bytes: int
    packed_bytes: int
    halves: tuple[int, ...]
    row_head: int

    @property
    def is_packed(self) -> bool:
        """Whether `cpu.pack` packs the type for int8 activations, which every instruction set multiplies with."""
        return self.kernels in (Kernels.PACKED, Kernels.LOW, Kernels.GRID, Kernels.TRELLIS)


def _formats() -> dict[int, Format]:
    records = {}
    for number, name, block, nbytes, form, kernels, head_cols, head, packed, halves, row_head in extension.formats():
        sizes = (head_cols, head, packed)
        records[number] = Format(number, name, block, nbytes, ActForm(form), Kernels(kernels), *sizes, halves, row_head)
    return records


#: Records by number.
FORMATS: dict[int, Format] = _formats()

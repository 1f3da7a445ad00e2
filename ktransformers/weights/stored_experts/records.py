"""The record of one expert: gate, up and down as the CPU's kernels take them, one behind the other.

Each part begins at a multiple of PART_ALIGN bytes, which is what streams of kernels want; the record takes whole
RECORD_ALIGNs, in which files are read past the system's cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ktransformers.kernels.cpu import packed_nbytes
from ktransformers.kernels.cpu.base import CpuLayout
from ktransformers.kernels.cpu.expert_store import RecordLayout, RecordPart
from ktransformers.kernels.types import OwnType, WeightType, row_bytes

__all__ = ["PART_ALIGN", "RECORD_ALIGN", "RecordMatrix", "as_packed", "parts_of", "record_layout", "rounded_up"]

PART_ALIGN = 64
RECORD_ALIGN = 4096


class RecordMatrix(NamedTuple):
    """Type, shape and memory layout of one matrix."""

    qtype: WeightType
    rows: int
    cols: int
    layout: CpuLayout

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in this layout. Raises ValueError for rows that cannot be of the type."""
        if self.layout is not CpuLayout.ROWS:
            return packed_nbytes(self.qtype, self.rows, self.cols)
        if isinstance(self.qtype, OwnType):
            raise ValueError(f"{self.qtype.name} has no rows of blocks")
        return self.rows * row_bytes(self.qtype, self.cols)


def rounded_up(nbytes: int, unit: int) -> int:
    """Return the least multiple of `unit` that is not less than nbytes."""
    return -(-nbytes // unit) * unit


def record_layout(gate: RecordMatrix | None, up: RecordMatrix, down: RecordMatrix) -> RecordLayout:
    """Return where the matrices of an expert lie in its record. Raises ValueError as `RecordMatrix.nbytes`."""
    at, parts = 0, list[RecordPart | None]()
    for matrix in (gate, up, down):
        if matrix is None:
            parts.append(None)
            continue
        at = rounded_up(at, PART_ALIGN)
        parts.append(RecordPart(*matrix, at, matrix.nbytes))
        at += matrix.nbytes
    made_up, made_down = parts[1], parts[2]
    assert made_up is not None
    assert made_down is not None
    return RecordLayout(parts[0], made_up, made_down, rounded_up(at, RECORD_ALIGN))


def parts_of(record: RecordLayout) -> dict[str, RecordPart]:
    """Return the parts that there are, by "gate", "up", "down"."""
    found = {"gate": record.gate, "up": record.up, "down": record.down}
    return {name: part for name, part in found.items() if part is not None}


def as_packed(record: RecordLayout) -> RecordLayout:
    """Return the record as a file has it: in which products its tiles are multiplied is not said there."""

    def plain(part: RecordPart) -> RecordPart:
        return replace(part, layout=CpuLayout.TILES) if part.layout is CpuLayout.TILES_BF16 else part

    gate = None if record.gate is None else plain(record.gate)
    return RecordLayout(gate, plain(record.up), plain(record.down), record.nbytes)

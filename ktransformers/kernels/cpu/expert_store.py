"""Experts in records: where the matrices of one expert lie in memory, and where a file has them."""

from __future__ import annotations

from dataclasses import dataclass

from ktransformers.kernels.cpu.base import CpuLayout
from ktransformers.kernels.types import WeightType

__all__ = ["Extent", "RecordLayout", "RecordPart"]


@dataclass(frozen=True)
class Extent:
    """Bytes of a file that hold a record, or one matrix of a record. path_index: of the file among the store's."""

    path_index: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class RecordPart:
    """One matrix [rows, cols] in a record, from byte `offset` on."""

    qtype: WeightType
    rows: int
    cols: int
    layout: CpuLayout
    offset: int
    nbytes: int


@dataclass(frozen=True)
class RecordLayout:
    """Layout of one expert's record, the same for all experts of a layer. gate: None without a gate."""

    gate: RecordPart | None
    up: RecordPart
    down: RecordPart
    nbytes: int

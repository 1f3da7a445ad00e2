"""Experts in files, with memory for as many of them as fit (csrc/ops/store). A MoeKernel computes with them.

Knows records, files and bytes; not models, formats of files, or how much memory there is.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ktransformers.errors import CapacityError, FormatError, WeightError
from ktransformers.kernels.cpu.base import CpuLayout, WorkerPool
from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import WeightType

__all__ = ["DISK_BLOCK", "ExpertStore", "Extent", "ReadError", "RecordLayout", "RecordPart", "StoreStats"]

logger = logging.getLogger(__name__)

# As in csrc/ops/store/expert_store.cpp.
_WAVE_NBYTES, _LEAST_WAVE, _MOST_WAVE, _GUEST_SHARE = 32 << 20, 4, 16, 8

DISK_BLOCK: int = extension.DISK_BLOCK
"""Bytes of which a record, and where it begins in a packed file, are multiples."""

ReadError: type[RuntimeError] = extension.ReadError
"""Raised by a kernel whose experts cannot be read now. The message names the file; the next call tries again."""


@dataclass(frozen=True)
class Extent:
    """Bytes of a file that hold a record, or one matrix of a record. path_index: of the file among the store's."""

    path_index: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class RecordPart:
    """Type, shape [rows, cols] and place of a matrix in a record. offset: in bytes, a multiple of 64."""

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

    @property
    def parts(self) -> tuple[RecordPart, ...]:
        """The matrices that there are, in the order of a record's extents."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)


@dataclass(frozen=True)
class StoreStats:
    """Counts since a store was opened.

    hits: experts of calls that were in memory when they were asked for, each once a call (a call of thousands of rows
    is several). misses: the others.
    waited_seconds: of calls, for reads. num_slots, slot_nbytes: of the memory for records. num_filled: records read by
    `fill`.
    """

    hits: int
    misses: int
    bytes_read: int
    waited_seconds: float
    read_errors: int
    num_slots: int
    num_records: int
    num_filled: int
    slot_nbytes: int

    @property
    def hit_rate(self) -> float:
        """Share of experts that were in memory, 0 before the first call."""
        return self.hits / max(self.hits + self.misses, 1)


def least_store_nbytes(records: Mapping[int, int], top_k: int) -> int:
    """Return the smallest budget that `ExpertStore.open` takes. records: {bytes of a record: how many have that size}.

    Of each size the experts of a token have slots, and those that prompts read meanwhile: csrc/ops/store.
    """
    least = 0
    for nbytes, count in records.items():
        wave = min(max(_WAVE_NBYTES // nbytes, _LEAST_WAVE), _MOST_WAVE)
        guests = max(2, min(2 * wave, count // _GUEST_SHARE))
        least += nbytes * min(count, top_k + guests)
    return least


class ExpertStore:
    """Slots in memory for the experts of several layers, read from files as they are needed.

    files: of all extents. They stay open: one that is deleted goes on serving; one that changes makes calls fail. Reads
    pass by the system's cache where the file system can. pool: of the kernels, whose instruction set packs.
    budget_nbytes: of slots, all of it at most. io_threads: so many reads at once; they take no time of a core but where
    they pack.
    Use: `add_layer` for each layer, `open`, then kernels with `store`. Raises WeightError for a file that cannot be
    opened, and ValueError for less than one thread.
    """

    def __init__(self, files: Sequence[Path], pool: WorkerPool, budget_nbytes: int, io_threads: int = 8) -> None:
        self.files, self.budget_nbytes = tuple(files), budget_nbytes
        try:
            self.handle = extension.ExpertStore([str(path) for path in files], pool.handle, io_threads)
        except ValueError:
            raise
        except RuntimeError as error:
            raise WeightError(str(error)) from error
        self._layers: dict[int, RecordLayout] = {}
        self._counts: list[int] = []
        self._finalizer = weakref.finalize(self, self.handle.close)
        for index, path in enumerate(self.files):
            if not self.handle.is_direct(index):
                logger.warning(
                    "%s: its file system has no O_DIRECT, so experts are read through the system's cache", path
                )

    def add_layer(self, layer: int, layout: RecordLayout, extents: Sequence[Sequence[Extent]]) -> int:
        """Add the experts of a layer, before `open`, in the order in which layers are called.

        layer: its number in the model, another one each time. extents: of each expert, one of the record as it lies in
        memory, at a multiple of DISK_BLOCK; or one of each matrix in block layout, in the order of `layout.parts`,
        which is packed when it is read. Returns the number that MoeKernel takes. Raises FormatError for extents that do
        not fit the layout or the files, and ValueError for a layer that is there already.
        """
        if layer in self._layers:
            raise ValueError(f"the store has layer {layer} already")
        parts = [(int(p.qtype), p.rows, p.cols, int(p.layout), p.offset) for p in layout.parts]
        places = [[(e.path_index, e.offset, e.nbytes) for e in of_expert] for of_expert in extents]
        try:
            number = self.handle.add_layer(parts, layout.nbytes, places)
        except ValueError as error:
            raise FormatError(f"the experts of layer {layer} cannot be read from their files: {error}") from error
        self._layers[layer] = layout
        self._counts.append(len(extents))
        return number

    def layout(self, number: int) -> RecordLayout:
        """Return the layout of records of a layer, by its number here."""
        return list(self._layers.values())[number]

    def num_experts(self, number: int) -> int:
        """Return the number of experts of a layer, by its number here."""
        return self._counts[number]

    def open(self, top_k: int = 1) -> None:
        """Make the slots, for at least the top_k experts of a token and those that are read meanwhile.

        Raises CapacityError when the budget is smaller, or the system has no such memory.
        """
        try:
            self.handle.open(self.budget_nbytes, top_k)
        except (extension.StoreTooSmall, MemoryError) as error:
            raise CapacityError(str(error) or f"there is no memory of {self.budget_nbytes} bytes") from error

    def probe(self, is_on: bool) -> None:
        """Let calls use eight records for all, those of the first layer whose records are alike, from now on or no
        longer.

        Calls then read next to nothing, are no picks and count nowhere, and compute something else: for steps that are
        compared with each other, or whose results nobody wants. Slots that such calls filled are empty afterwards.
        Waits for calls that are under way.
        """
        self.handle.probe(is_on)

    def fill(self, scores: Mapping[int, Tensor] | None = None, wait: bool = False) -> None:
        """Read records to slots that are empty, whenever no call has read for 20 ms: those of the highest scores, and
        of equal ones as many of each layer.

        scores: as `scores` returned them at another time. wait: return when it is over, otherwise at once. A read that
        fails ends it, and is counted. Raises ValueError for scores of other experts.
        """
        known: list[float] = []
        if scores is not None:
            for layer, count in zip(self._layers, self._counts, strict=True):
                row = scores.get(layer, torch.zeros(count, dtype=torch.float64))
                if row.shape != (count,) or not bool(torch.isfinite(row).all()) or bool((row < 0).any()):
                    raise ValueError(f"scores of layer {layer} must be {count} numbers, none negative")
                known += row.tolist()
        self.handle.fill(known, wait)

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes of all slots, from `open` to `close`."""
        return self.handle.memory()

    def max_held(self, number: int) -> int:
        """Return how many records of a layer, by its number here, may be held at once, with others of their size."""
        return self.handle.max_held(number)

    def hold(self, number: int, expert: int) -> int | None:
        """Hold the record of an expert where it is, for somebody who copies it, until `release`.

        number: of its layer here. Returns its address; None where it is not in memory, or too many are held. Waits for
        nothing, and is no pick of the expert.
        """
        return self.handle.hold(number, expert) or None

    def read(self, number: int, experts: Sequence[int]) -> list[int]:
        """Read the records of some experts of a layer to memory, where they are not there, and hold all of them.

        experts: different ones. Returns their addresses, when they are there. Raises ReadError, and ValueError for more
        than may be held.
        """
        return self.handle.read(number, experts)

    def release(self, number: int, expert: int, is_kept: bool = True) -> None:
        """Let go of a record of `hold` or `read`, once for each of them. is_kept: whether it stays in memory, until
        others are worth more. Raises ValueError for one that is not held.
        """
        self.handle.release(number, expert, is_kept)

    def scores(self) -> dict[int, Tensor]:
        """Return fp64 [E] of each layer: picks of its experts, those of the last few thousand steps most."""
        rows = torch.split(torch.tensor(self.handle.scores(), dtype=torch.float64), self._counts)
        return dict(zip(self._layers, rows, strict=True))

    def stats(self) -> StoreStats:
        """Return the counts so far. Any thread may ask, also after `close`."""
        hits, misses, nbytes, waited_ns, errors, slots, records, filled, slot_nbytes = self.handle.stats()
        return StoreStats(hits, misses, nbytes, waited_ns / 1e9, errors, slots, records, filled, slot_nbytes)

    def close(self) -> None:
        """End the threads, close the files and give the memory back, once calls that compute are over. Calls that wait
        for reads, and later ones, raise RuntimeError. Closing twice does nothing.
        """
        self._finalizer()

"""What of a model stays in its files while it runs, experts and tables of n-grams, and the stores that read it.

    planned    find: where the experts of each layer are; headers alone are read
    loaded     begin, add: the layers that are placed so; add_table; open: slots in RAM; probed: checks of layers
    runs       kernels read by the stores; fill: what is used most, or was before
    over       close

Knows no operators; a layer is the name of its experts' module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.errors import UnsupportedError
from ktransformers.kernels.cpu import RowStore, WorkerPool
from ktransformers.kernels.cpu.expert_store import ExpertStore, Extent, RecordLayout
from ktransformers.kernels.types import RawTensor
from ktransformers.profiling.stored_counts import NOTHING_STORED, StoredCounts, sum_stored
from ktransformers.system.file_kinds import size_of
from ktransformers.weights.source import MappedExperts
from ktransformers.weights.stored_experts.mapped import extent_of, mapped_extents
from ktransformers.weights.stored_experts.reading import StoredExperts

__all__ = ["ExpertFiles", "ExpertRecords", "packed_key", "probed"]

logger = logging.getLogger(__name__)

Scores = Mapping[int, npt.NDArray[np.float64]]

_SAVED_EVERY = 4096  # steps
_UNKNOWN = 1e-3  # picks of an expert of which nothing is known: more than those need that are on a GPU


def packed_key(key: str, mtp_index: int = -1) -> str:
    """Return what a packed file calls the experts `key` of a model, or of its layer `mtp_index` for multi-token
    prediction."""
    return key if mtp_index < 0 else f"mtp.{mtp_index}.{key}"


def probed(files: ExpertFiles | None, *, is_on: bool = True) -> AbstractContextManager[None]:
    """Return `ExpertFiles.probed`; nothing to be done where no experts are in files."""
    return nullcontext() if files is None else files.probed(is_on=is_on)


@dataclass(frozen=True, slots=True)
class ExpertRecords:
    """The experts of a layer as files have them. extents: of each expert, one for all of it or one for each matrix;
    none where a shape stands for files.
    """

    layout: RecordLayout
    num_experts: int
    extents: Sequence[Sequence[Extent]]

    @property
    def nbytes(self) -> int:
        """Bytes of all experts in slots."""
        return self.layout.nbytes * self.num_experts


@dataclass(slots=True, eq=False)
class ExpertFiles:
    """The files of one model's experts, and its store from `begin` on. files: those of the model; none of a shape that
    stands for files. packed: the file that `ktransformers pack` wrote, which is read in their place; None without one.

    owner: those of the model whose own layer for multi-token prediction this is, in whose store its experts are; None:
    they have one of their own. number: of the first layer in the store, behind the model's own. index: of that layer,
    -1 for the model's own.
    """

    files: Sequence[Path]
    packed: StoredExperts | None = None
    owner: ExpertFiles | None = None
    number: int = 0
    index: int = -1
    _numbers: dict[int, int] = field(default_factory=dict, init=False)
    _store: ExpertStore | None = field(default=None, init=False)
    _found: dict[tuple[str, RecordLayout], ExpertRecords] = field(default_factory=dict, init=False)
    _tables: list[RowStore] = field(default_factory=list, init=False)
    _taken: tuple[StoredCounts, StoredCounts] = field(default=(NOTHING_STORED, NOTHING_STORED), init=False)
    _num_taken: int = field(default=0, init=False)
    _save: Callable[[Scores], None] | None = field(default=None, init=False)
    _counted_elsewhere: frozenset[int] = field(default=frozenset(), init=False)
    _is_probed: bool = field(default=False, init=False)

    def of_mtp_layer(self, num_layers: int) -> ExpertFiles:
        """Return the files of the first layer for multi-token prediction behind these of so many layers."""
        return ExpertFiles(self.files, self.packed, self.owner or self, self.number + num_layers, self.index + 1)

    @property
    def paths(self) -> Sequence[Path]:
        """The files that are read."""
        return self.files if self.packed is None else self.packed.files

    @property
    def store(self) -> ExpertStore:
        """The store of the layers that were added. Raises RuntimeError before `begin`."""
        if self.owner is not None:
            return self.owner.store
        if self._store is None:
            raise RuntimeError("experts in files are read once the model is being loaded")
        return self._store

    def find(
        self, key: str, layout: RecordLayout, num_experts: int, mapped: Callable[[], MappedExperts]
    ) -> ExpertRecords:
        """Return the records of a layer's experts, whose layout in memory is given. mapped: asked for the tensors where
        the model's own files are read.

        Raises UnsupportedError for experts that have to be converted while loading, ConfigError for a packed file of
        other types; both say what to do.
        """
        found = self._found.get((key, layout))
        if found is None:
            extents = self._extents(key, layout, mapped) if self.paths else ()
            found = self._found[key, layout] = ExpertRecords(layout, num_experts, extents)
        return found

    def _extents(
        self, key: str, layout: RecordLayout, mapped: Callable[[], MappedExperts]
    ) -> Sequence[Sequence[Extent]]:
        if self.packed is None:
            return mapped_extents(mapped(), self.files)
        packed = self.packed.layer(packed_key(key, self.index), layout)
        if packed is None:
            raise UnsupportedError(
                f"{self.packed.path} lacks the experts of {packed_key(key, self.index)}; pack the model again: "
                "ktransformers pack MODEL --force"
            )
        return packed[1]

    def begin(self, pool: WorkerPool, budget_nbytes: int) -> None:
        """Make a store of so many bytes for the layers that are added next. Raises WeightError for a file that is
        gone."""
        assert self.paths, "a shape is planned and not loaded"
        self._store = ExpertStore(self.paths, pool, budget_nbytes)

    def add(self, number: int, records: ExpertRecords) -> tuple[ExpertStore, int]:
        """Add a layer, of this number in the model; return what its kernel is made with. Once for each: again it is
        what was returned then."""
        if number not in self._numbers:
            self._numbers[number] = self.store.add_layer(self.number + number, records.layout, records.extents)
        return self.store, self._numbers[number]

    def open(self, top_k: int) -> None:
        """Make the slots, once all layers are added. top_k: experts that a token takes of a layer. Raises CapacityError
        for a budget that is too small.
        """
        self.store.open(top_k)

    @contextmanager
    def probed(self, *, is_on: bool = True) -> Iterator[None]:
        """Steps inside compute with a few experts for all, which are read at once. For those of loading that compare
        layers with each other, or whose results nobody wants. is_on: False inside of another one, for steps that need
        every expert. Afterwards it is as before, and slots are empty.
        """
        if self.owner is not None:
            with self.owner.probed(is_on=is_on):
                yield
            return
        before, self._is_probed = self._is_probed, is_on
        self.store.probe(is_on)
        try:
            yield
        finally:
            self._is_probed = before
            self.store.probe(before)

    def add_table(self, parts: Sequence[RawTensor], pool: WorkerPool) -> RowStore:
        """Return what reads the rows of a table, whose parts are views of the model's mapped files, one behind the
        other, of one type and width. Raises WeightError for a file that is gone.
        """
        if self.owner is not None:
            return self.owner.add_table(parts, pool)
        index = {path: number for number, path in enumerate(self.files)}
        extents = [extent_of(part, index) for part in parts]
        self._tables.append(RowStore(self.files, extents, parts[0].qtype, parts[0].cols, pool))
        return self._tables[-1]

    def fill(
        self,
        learned: Scores,
        save: Callable[[Scores], None],
        elsewhere: Mapping[int, npt.NDArray[np.bool_]] | None = None,
    ) -> None:
        """Begin to read experts to slots that are empty, while nothing else is read: those first that were used most.

        learned: scores at earlier starts by the layer's number in the model, fp64 [E]; of other layers they are left
        out. save: called with the scores of all layers now and then, and at the end. elsewhere: of layers whose picks
        somebody else counts and saves, bool [E]: the experts that are on a GPU at first, and come last.
        """
        known, counted_elsewhere = dict[int, torch.Tensor](), elsewhere or {}
        for layer, ours in self.store.scores().items():
            found = learned.get(layer)
            scores = torch.from_numpy(found) if found is not None and found.shape == tuple(ours.shape) else ours * 0.0
            is_there = torch.from_numpy(counted_elsewhere.get(layer, np.zeros(len(ours), np.bool_)))
            known[layer] = torch.where(is_there, 0.0, scores + (_UNKNOWN if counted_elsewhere else 0.0))
        self.store.fill(known)
        self._save, self._counted_elsewhere = save, frozenset(counted_elsewhere)

    def take(self) -> tuple[StoredCounts, StoredCounts]:
        """Return what is new since the last call, of experts, each of which counts once a call, and of rows of tables.
        Logs a line where reads did not succeed at once."""
        before, self._taken = self._taken, self._counted()
        self._num_taken += 1
        if self._num_taken % _SAVED_EVERY == 0:
            self._save_scores()
        self._report_retried()
        return sum_stored(self._taken[:1], before[0]), sum_stored(self._taken[1:], before[1])

    def _counted(self) -> tuple[StoredCounts, StoredCounts]:
        stats = self.store.stats()
        experts = stats.hits, stats.misses, stats.bytes_read, stats.waited_seconds, stats.read_errors
        return experts, sum_stored([table.counts() for table in self._tables])

    def _report_retried(self) -> None:
        for take in (self.store.handle.take_retried, *(table.handle.take_retried for table in self._tables)):
            count, why = take()
            if count:
                others = f", and {count - 1} others" if count > 1 else ""
                logger.warning("a read failed and was tried again%s: %s", others, why)

    def describe(self) -> str:
        """Describe in one line what was found in RAM, read and waited for since the start."""
        stats = self.store.stats()
        uses = stats.hits + stats.misses
        return (
            f"{100 * stats.hit_rate:.1f} % of {uses} uses found theirs in RAM ({size_of(stats.slot_nbytes)}), "
            f"{size_of(stats.bytes_read)} read, {stats.waited_seconds:.1f} s waited for them"
        )

    def _save_scores(self) -> None:
        if self._save is not None and any(self._taken[0][:2]):
            scores = {layer: one.numpy() for layer, one in self.store.scores().items()}
            self._save({layer: one for layer, one in scores.items() if layer not in self._counted_elsewhere})

    def close(self) -> None:
        """Let go of slots and files. No kernel may be called any more."""
        if self._store is not None:
            self._save_scores()
            self._save = None
            self._report_retried()
            for table in self._tables:
                table.close()
            self._store.close()

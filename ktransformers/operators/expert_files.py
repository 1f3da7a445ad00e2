"""The experts of a model that stay in its files while it runs, and the store that reads them.

    planned    find: where the experts of each layer are; headers alone are read
    loaded     begin, add: the layers that are placed so; open: slots in RAM
    runs       kernels read by the store; fill: what is used most, or was before
    over       close

Knows no operators; a layer is the name of its experts' module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.expert_store import ExpertStore, Extent, RecordLayout
from ktransformers.weights.source import MappedExperts
from ktransformers.weights.stored_experts.mapped import mapped_extents
from ktransformers.weights.stored_experts.reading import StoredExperts

__all__ = ["ExpertFiles", "ExpertRecords"]


@dataclass(frozen=True, slots=True)
class ExpertRecords:
    """The experts of a layer as files have them. extents: of each expert, one for all of it or one for each matrix."""

    layout: RecordLayout
    extents: Sequence[Sequence[Extent]]

    @property
    def nbytes(self) -> int:
        """Bytes of all experts in slots."""
        return self.layout.nbytes * len(self.extents)


@dataclass(slots=True, eq=False)
class ExpertFiles:
    """The files of one model's experts, and its store from `begin` on. files: those of the model. packed: the file
    that `ktransformers pack` wrote, which is read in their place; None without one.
    """

    files: Sequence[Path]
    packed: StoredExperts | None = None
    _store: ExpertStore | None = field(default=None, init=False)

    @property
    def paths(self) -> Sequence[Path]:
        """The files that are read."""
        return self.files if self.packed is None else self.packed.files

    @property
    def store(self) -> ExpertStore:
        """The store. Raises RuntimeError before `begin`."""
        if self._store is None:
            raise RuntimeError("experts in files are read once the model is being loaded")
        return self._store

    def find(self, key: str, layout: RecordLayout, mapped: Callable[[], MappedExperts]) -> ExpertRecords:
        """Return the records of a layer's experts, whose layout in memory is given. mapped: asked for the tensors where
        the model's own files are read.

        Raises UnsupportedError for experts that have to be converted while loading, ConfigError for a packed file of
        other types; both say what to do.
        """
        found = None if self.packed is None else self.packed.layer(key, layout)
        if found is not None:
            return ExpertRecords(*found)
        return ExpertRecords(layout, mapped_extents(mapped(), self.files))

    def begin(self, pool: WorkerPool, budget_nbytes: int) -> None:
        """Make a store of so many bytes for the layers that are added next."""
        self._store = ExpertStore(self.paths, pool, budget_nbytes)

"""The experts of a layer in the CPU's memory, as they can be copied to a GPU: all of them, or those of a store.

Knows bytes of experts and where they lie; not routing, biases or activations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from ktransformers.kernels.cpu import ExpertStore, MoeKernel
from ktransformers.kernels.cpu.base import CpuLayout
from ktransformers.kernels.triton.quant.repack import GpuLayout
from ktransformers.kernels.types import ExpertWeights, PackedTensor, RawTensor, WeightType
from ktransformers.operators.experts.resident import can_be_copied

__all__ = ["CopiedExperts", "HostExperts", "RecordExperts", "copied_experts"]

_REFUSED = "only experts with a gate, of a type that GPU kernels read, can be copied"


@dataclass(frozen=True, slots=True)
class _Projection:
    """addresses: of each expert's matrix; none where experts come and go."""

    qtype: WeightType
    rows: int
    cols: int
    layout: GpuLayout
    nbytes: int
    addresses: tuple[int, ...] = ()


class CopiedExperts(ABC):
    """The experts of one layer that are copied one by one. projections: gate, up, down.

    Addresses of an expert are those of its projections. They hold from `hold` or `read` to `release`.
    """

    projections: tuple[_Projection, ...]
    num_experts: int

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert."""
        return sum(part.nbytes for part in self.projections)

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that is equal for layers whose experts can use the same views of a buffer."""
        return tuple((part.qtype, part.rows, part.cols, part.layout) for part in self.projections)

    @property
    @abstractmethod
    def max_held(self) -> int:
        """How many experts `read` takes at once, while no others are held."""

    @abstractmethod
    def pieces(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of all memory that experts are copied from."""

    @abstractmethod
    def hold(self, expert: int) -> tuple[int, ...] | None:
        """Return the addresses of an expert; None where it is not in memory. Waits for nothing."""

    @abstractmethod
    def read(self, experts: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the addresses of some experts once they are in memory. Raises ReadError."""

    @abstractmethod
    def release(self, expert: int, *, is_kept: bool) -> None:
        """Let go of an expert, after each `hold` and `read`. is_kept: whether it is of use in the CPU's memory."""


class HostExperts(CopiedExperts):
    """All experts of one layer in the CPU's memory.

    weights: as the CPU's kernels take them. Raises ValueError for types that GPU kernels do not read, see
    `resident.can_be_copied`, and for experts without a gate.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        parts = (weights.gate, weights.up, weights.down)
        self._weights = weights  # keeps the memory
        self.projections = tuple(self._projection(part) for part in parts)
        self.num_experts = len(weights.up)

    @staticmethod
    def _projection(part: Sequence[object] | None) -> _Projection:
        tensors = [weight for weight in part or () if isinstance(weight, PackedTensor | RawTensor)]
        if part is None or len(tensors) != len(part) or not can_be_copied(tensors[0].qtype):
            raise ValueError(_REFUSED)
        first, addresses = tensors[0], tuple(weight.data.data_ptr() for weight in tensors)
        layout = GpuLayout.CPU_PACKED if isinstance(first, PackedTensor) else GpuLayout.ROWS
        rows, cols = first.shape
        return _Projection(first.qtype, rows, cols, layout, first.nbytes, addresses)

    @property
    @override
    def max_held(self) -> int:
        return self.num_experts

    @override
    def pieces(self) -> list[tuple[int, int]]:
        return [(address, part.nbytes) for part in self.projections for address in part.addresses]

    @override
    def hold(self, expert: int) -> tuple[int, ...]:
        return tuple(part.addresses[expert] for part in self.projections)

    @override
    def read(self, experts: Sequence[int]) -> list[tuple[int, ...]]:
        return [self.hold(expert) for expert in experts]

    @override
    def release(self, expert: int, *, is_kept: bool) -> None:
        pass


class RecordExperts(CopiedExperts):
    """The experts of one layer of an open store, of which some are in the CPU's memory at a time.

    number: of the layer in the store. Raises ValueError as HostExperts.
    """

    def __init__(self, store: ExpertStore, number: int) -> None:
        layout = store.layout(number)
        if layout.gate is None or not all(can_be_copied(part.qtype) for part in layout.parts):
            raise ValueError(_REFUSED)
        self.projections = tuple(
            _Projection(
                part.qtype,
                part.rows,
                part.cols,
                GpuLayout.ROWS if part.layout is CpuLayout.ROWS else GpuLayout.CPU_PACKED,
                part.nbytes,
            )
            for part in layout.parts
        )
        self._offsets = [part.offset for part in layout.parts]
        self._store, self._number, self.num_experts = store, number, store.num_experts(number)

    @property
    @override
    def max_held(self) -> int:
        return self._store.max_held(self._number)

    @override
    def pieces(self) -> list[tuple[int, int]]:
        return [self._store.memory]

    def _addresses(self, record: int) -> tuple[int, ...]:
        return tuple(record + offset for offset in self._offsets)

    @override
    def hold(self, expert: int) -> tuple[int, ...] | None:
        record = self._store.hold(self._number, expert)
        return None if record is None else self._addresses(record)

    @override
    def read(self, experts: Sequence[int]) -> list[tuple[int, ...]]:
        return [self._addresses(record) for record in self._store.read(self._number, experts)]

    @override
    def release(self, expert: int, *, is_kept: bool) -> None:
        self._store.release(self._number, expert, is_kept)


def copied_experts(kernel: MoeKernel) -> CopiedExperts:
    """Return a kernel's experts as they can be copied. Raises ValueError as HostExperts."""
    return HostExperts(kernel.weights) if kernel.store is None else RecordExperts(*kernel.store)

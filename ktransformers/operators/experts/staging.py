"""Buffers on a GPU through which experts that rest in the CPU's memory pass in groups.

A few buffers are used in turn: a group is copied into one while the GPU computes with those before it. A group's
matrices stand side by side, projection by projection, as they lie in the CPU's memory. Knows the bytes of experts
and the order of copies; not routing, biases or activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.errors import CapacityError
from ktransformers.kernels.transfer.copies import CopyQueue, Mark
from ktransformers.kernels.triton.experts.matrices import ExpertMatrices
from ktransformers.operators.experts.host_experts import HostExperts
from ktransformers.system.file_kinds import size_of

__all__ = ["Group", "HeldExperts", "Staging", "StagingSize"]

_ALIGNED = 256
_PARTS = 3  # gate, up, down


@dataclass(frozen=True, slots=True)
class StagingSize:
    """Size of the staging buffers: num_buffers of nbytes each."""

    num_buffers: int
    nbytes: int

    @classmethod
    def of(cls, expert_nbytes: int, num_experts: int, budget: int) -> StagingSize | None:
        """Return what suits experts of this size within `budget` bytes, or None when that is too little to be of use.

        Eight buffers of 64 MiB keep a copy engine busy for some 10 ms, longer than attention takes; not more than two
        layers.
        """
        most = min(_BUFFER_BYTES * _BUFFERS, budget)
        one = expert_nbytes + _PARTS * _ALIGNED
        wanted = min(max(_BUFFER_BYTES // one, 1), num_experts)
        for group in (wanted, max(wanted // 2, 1), max(wanted // 4, 1), 1):
            count = min(most // (group * one), _BUFFERS, max(-(-2 * num_experts // group), _FEWEST))
            if count >= _FEWEST:
                return cls(int(count), group * one)
        return None

    @property
    def total_nbytes(self) -> int:
        return self.num_buffers * self.nbytes


_BUFFERS, _FEWEST, _BUFFER_BYTES = 8, 3, 64 << 20


class HeldExperts(Protocol):
    """Experts of one layer that lie in slots of the GPU, from which a step computes them without a copy."""

    @property
    def matrices(self) -> tuple[ExpertMatrices, ExpertMatrices, ExpertMatrices]:
        """The matrices of all slots, of experts of the layer's kind."""
        ...

    def slots(self) -> npt.NDArray[np.int32]:
        """Return the slot of each expert, [E], negative for none, as the step that is launched next may read them.

        A step that reads them has to be launched before experts change places again.
        """
        ...


@dataclass(slots=True)
class _Buffer:
    """free: the mark of the compute stream after which it may be overwritten."""

    data: torch.Tensor
    free: Mark | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Experts of one layer in a staging buffer, expert i of them in slot i; `ready` is the mark of its copies."""

    experts: tuple[int, ...]
    matrices: tuple[ExpertMatrices, ExpertMatrices, ExpertMatrices]
    ready: Mark
    buffer: _Buffer


class Staging:
    """The staging buffers on one device. Raises CapacityError when they do not fit."""

    def __init__(self, size: StagingSize, device: torch.device, copies: CopyQueue) -> None:
        self.size, self.copies = size, copies
        try:
            data = [torch.empty(size.nbytes, dtype=torch.uint8, device=device) for _ in range(size.num_buffers)]
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{size_of(size.total_nbytes)} for experts on their way do not fit on {device}: place fewer modules "
                "there (--gpu_memory), or set prefill_device: cpu for experts"
            ) from error
        self._buffers = [_Buffer(one) for one in data]
        self._next = 0
        self._views: dict[object, tuple[ExpertMatrices, ExpertMatrices, ExpertMatrices]] = {}

    def capacity(self, experts: HostExperts) -> int:
        """Return how many experts of a layer one buffer holds. Raises ValueError when it holds none."""
        count = self.size.nbytes // (experts.expert_nbytes + _PARTS * _ALIGNED)
        if count < 1:
            raise ValueError(f"an expert of {experts.expert_nbytes} bytes does not fit into {self.size.nbytes}")
        return count

    def bring(self, source: HostExperts, experts: Sequence[int]) -> Group:
        """Enqueue the copies of some experts, in the order of their numbers, into the buffer whose turn it is.

        What was in that buffer before must have been used, that is, `done` called or given up.
        """
        number = self._next
        self._next = (number + 1) % self.size.num_buffers
        buffer = self._buffers[number]
        if buffer.free is not None:
            self.copies.wait(buffer.free)
        matrices = self._matrices(source, number)
        for part, target in zip(source.projections, matrices, strict=True):
            base, addresses, first = target.data.data_ptr(), part.addresses, 0
            for end in range(1, len(experts) + 1):  # neighbours in memory are one copy
                is_next = end < len(experts) and addresses[experts[end]] == addresses[experts[end - 1]] + part.nbytes
                if not is_next:
                    at = base + first * part.nbytes
                    self.copies.copy(at, addresses[experts[first]], (end - first) * part.nbytes)
                    first = end
        return Group(tuple(experts), matrices, self.copies.mark(), buffer)

    def done(self, group: Group) -> None:
        """Free the group's buffer once all that was launched so far, and reads it, is done."""
        group.buffer.free = self.copies.compute_mark()

    def matrices(self, source: HostExperts) -> list[tuple[ExpertMatrices, ExpertMatrices, ExpertMatrices]]:
        """Return the matrices of every buffer as `bring` returns them for such experts; their contents are
        undefined.
        """
        return [self._matrices(source, number) for number in range(self.size.num_buffers)]

    def _matrices(self, source: HostExperts, number: int) -> tuple[ExpertMatrices, ExpertMatrices, ExpertMatrices]:
        key = (source.kind, number)
        found = self._views.get(key)
        if found is None:
            count, at, made = self.capacity(source), 0, list[ExpertMatrices]()
            for part in source.projections:
                data = self._buffers[number].data[at : at + count * part.nbytes].view(count, part.nbytes)
                made.append(ExpertMatrices(data, part.qtype, part.rows, part.cols, part.layout))
                at += -(-count * part.nbytes // _ALIGNED) * _ALIGNED
            found = self._views[key] = (made[0], made[1], made[2])
        return found

"""Prefill of routed experts that rest in the CPU's memory, by the GPU and the CPU together.

A step with many rows touches every expert of a layer, and a copy to the GPU costs the same however many rows there are.
So experts with many rows are copied over PCIe, group by group, and computed there from the bytes as they lie in memory,
while the CPU computes the others where they are. Those that have a slot on the GPU (hot.py) are computed from it first:

    host      wait for the ids ── choice ─┬─ groups ...                      ─┬─ first groups of the next layer
    copies    ahead: A  B  of this layer's│ C  D ...                          │  A' B' ...
    GPU       attention, router, rows ────┤ slots  A  B  C  D ── sum ── wait for the CPU ── add, next layer
              to the CPU                  │
    CPU                                   └─ experts that stay ───────────────┘

The host waits once a layer, for the router; copies for the next layer are put before that, so that the copy engine
works on meanwhile: of the experts that had most rows in the layer's last step, which nearly always get some again.
How many, and what the CPU's part takes beside its products, is learned (split.py). All rows go to the CPU while the
host waits, so that it begins as soon as the choice is made. Its part is handed over in the stream's order
(kernels/transfer/async_cpu_experts.py): no thread of Python's, and hidden states and results cross in the type of the
stream's buffers and are converted by all cores. Knows nothing of models.

T tokens, K experts per token, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.errors import CapacityError
from ktransformers.kernels.cpu import MoeKernel
from ktransformers.kernels.transfer.async_cpu_experts import AsyncCpuExperts
from ktransformers.kernels.transfer.copies import CopyQueue
from ktransformers.kernels.transfer.cuda import StreamDriver
from ktransformers.kernels.triton.experts.align import moe_align
from ktransformers.kernels.triton.experts.matrices import ExpertMatrices, MoeEpilogue, MoeMatrices, RoutedRows
from ktransformers.kernels.triton.experts.moe import moe_blocks, moe_sum
from ktransformers.kernels.triton.experts.workspace import MoeWorkspace, block_rows
from ktransformers.operators.base import ExpertStats
from ktransformers.operators.device import Device
from ktransformers.operators.experts.host_experts import HostExperts
from ktransformers.operators.experts.split import (
    NEVER,
    AheadShare,
    CpuOverhead,
    PrefillRates,
    Split,
    choose_split,
)
from ktransformers.operators.experts.staging import Group, HeldExperts, Staging

__all__ = ["ExpertPrefill", "PrefillLayer", "PrefillShape", "PrefillTicket"]


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """Sizes that all layers of one ExpertPrefill share. num_held: experts of a layer with a slot there, as a mean.
    long_rows: most rows of a step with memory that is lent; 0: none is.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    max_rows: int
    num_held: int = 0
    long_rows: int = 0

    @property
    def most_rows(self) -> int:
        """Most rows of any step."""
        return max(self.max_rows, self.long_rows)

    def workspace_nbytes(self) -> int:
        """Return the bytes on the GPU between the products of a step: values of 2 bytes."""
        return self.max_rows * self.top_k * (self.hidden_size + self.intermediate_size) * 2


@dataclass(frozen=True, slots=True)
class PrefillTicket:
    """A forward of an ExpertPrefill that was issued. of_gpu: its part [T, H], None when it has none; has_cpu: whether
    the CPU has one.
    """

    of_gpu: torch.Tensor | None
    has_cpu: bool
    like: torch.Tensor


@dataclass(slots=True)
class _Layer:
    """number, layer: of the CPU's kernel in its stream, and in the model. epilogue: on the GPU.

    counts: rows of each expert in the last step. held: the layer's slots on the GPU.
    """

    host: HostExperts
    number: int
    layer: int
    epilogue: MoeEpilogue
    counts: npt.NDArray[np.int64] | None = None
    held: HeldExperts | None = None

    def slots(self) -> npt.NDArray[np.int32]:
        """[E]: where each expert is on the GPU already, negative for none."""
        return np.full(self.host.num_experts, -1, np.int32) if self.held is None else self.held.slots()


@dataclass(slots=True)
class _RowBlock:
    """Rows of a step whose products share a workspace. counts: of them, by expert. size: rows of a block of the sorted
    pairs; first: the next of these.
    """

    span: slice
    space: MoeWorkspace
    size: int
    counts: npt.NDArray[np.int64]
    first: int = 0


@dataclass(frozen=True, slots=True)
class _CpuCall:
    """A call that the CPU was given: its rows, the seconds expected, and the CPU's forwards and seconds before it."""

    rows: int
    expected: float
    forwards: int
    busy: float


class _Tables:
    """What the GPU needs to know of a choice: int32 [2, E + 1] on both sides.

    First the rank of each expert in the order in which the GPU computes them, E for one that the CPU keeps (and for id
    E); then the slot of each rank, -1 behind the last.
    """

    def __init__(self, num_experts: int, driver: StreamDriver, device: torch.device) -> None:
        self.num_experts = num_experts
        self._host = driver.pinned((2, num_experts + 1), torch.int32)
        self._device = torch.zeros(2, num_experts + 1, dtype=torch.int32, device=device)

    def fill(self, groups: Sequence[tuple[int, ...]], held: Sequence[int] = (), slots: Iterable[int] = ()) -> None:
        """groups: of experts that stand side by side; held: those before them, in slots of their own. Nothing may be
        under way that reads what was filled in before."""
        host = self._host.numpy()
        host[0], host[1] = self.num_experts, -1
        experts = [*held, *(expert for group in groups for expert in group)]
        host[0, experts] = np.arange(len(experts))
        host[1, : len(experts)] = [*slots, *(slot for group in groups for slot in range(len(group)))]
        self._device.copy_(self._host, non_blocking=True)

    @property
    def slots(self) -> torch.Tensor:
        return self._device[1, : self.num_experts]

    def ranks(self, ids: torch.Tensor) -> torch.Tensor:
        """int32 [T, K] -> int32 [T, K]"""
        return self._device[0].index_select(0, ids.flatten()).view(ids.shape)


class ExpertPrefill:
    """The routed experts of the layers that live on one GPU, for steps of many rows.

    One set of buffers serves all layers: calls are made on one stream, one layer after another.
    threshold: fewest rows of a step that it takes; least_rows: which it is at least, because smaller steps are decode
    steps, in which the host must not wait. Raises CapacityError when the workspace does not fit.
    """

    def __init__(
        self,
        device: Device,
        shape: PrefillShape,
        staging: Staging,
        cpu: AsyncCpuExperts,
        driver: StreamDriver,
        stats: ExpertStats | None = None,
        least_rows: int = 2,
    ) -> None:
        self.device, self.shape, self._staging, self._cpu = device, shape, staging, cpu
        self.least_rows = least_rows
        self.rates: PrefillRates | None = None
        self.threshold = NEVER
        self._driver, self._stats = driver, stats or ExpertStats()
        self._copies: CopyQueue = staging.copies
        self._layers: list[_Layer] = []
        self._ahead: tuple[int, list[Group]] = (-1, [])
        self._overhead, self._share = CpuOverhead(), AheadShare()
        self._cpu_call: _CpuCall | None = None
        self._ids = driver.pinned((shape.most_rows, shape.top_k), torch.int32)
        self._tables = _Tables(shape.num_experts, driver, device.torch_device)
        pairs, where = shape.max_rows * shape.top_k, device.torch_device
        try:
            self._inner = torch.empty(pairs * shape.intermediate_size, dtype=device.matmul_dtype, device=where)
            parts = torch.empty(pairs * shape.hidden_size, dtype=device.matmul_dtype, device=where)
            self._counter = torch.zeros(1, dtype=torch.int32, device=where)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"the workspace of {shape.workspace_nbytes()} bytes for prefill steps of {shape.max_rows} tokens does "
                f"not fit on {device.name}: lower --chunk_size, or set prefill_device: cpu for experts"
            ) from error
        self._parts = [parts]  # of max_rows rows each
        self.last_split: Split | None = None

    def lend(self, memory: Sequence[torch.Tensor]) -> None:
        """Take steps of more rows from now on: max_rows more for each of `memory`, which is for their results of
        experts, [max_rows * K * H] in the device's type for products. Nothing: of max_rows again.
        """
        self._parts[1:] = memory

    def add_layer(self, kernel: MoeKernel) -> int:
        """Add a layer; return the number under which `submit` knows it; layers are added in the order in which steps
        run them.
        """
        epilogue = MoeEpilogue.of(kernel.weights, kernel.activation, self.device.torch_device)
        self._layers.append(_Layer(HostExperts(kernel.weights), self._cpu.add_layer(kernel), kernel.layer, epilogue))
        return len(self._layers) - 1

    def hold(self, layer: int, held: HeldExperts) -> None:
        """Let a layer's experts that have a slot on the GPU be computed from there."""
        self._layers[layer].held = held

    def takes(self, num_rows: int) -> bool:
        """Whether a step of so many rows is run by streaming experts."""
        return self.threshold <= num_rows <= self.shape.max_rows * len(self._parts)

    def submit(
        self, layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> PrefillTicket:
        """Issue a layer's forward: [T, H], [T, K], [T, K] on the device. Waits for what was launched before it.

        Raises EngineError when the CPU's part of an earlier one failed, IndexError for ids out of range.
        """
        ids, weights = topk_ids.to(torch.int32).contiguous(), topk_weights.to(torch.float32).contiguous()
        self._cpu.stage(hidden, weights)
        counts = self._counts(ids)
        self._cpu.check()
        self._learn()
        groups = self._take_ahead(layer)
        split = self._choose(layer, counts, groups, len(ids))
        self.last_split = split
        if not split.there:
            groups = []
        is_for_cpu = self._begin_cpu(layer, split, counts, len(ids))
        of_gpu = None
        if split.on_gpu:
            of_gpu = self._compute(layer, RoutedRows(hidden, ids, weights), counts, split, groups)
        self._layers[layer].counts = counts
        self._copy_ahead(layer + 1, len(split.passing))
        return PrefillTicket(of_gpu, is_for_cpu, hidden)

    def _begin_cpu(self, layer: int, split: Split, counts: npt.NDArray[np.int64], rows: int) -> bool:
        """Hand the CPU the experts that stay; whether there are any. What the GPU computes is counted here."""
        there = np.zeros_like(counts)
        there[list(split.on_gpu)] = counts[list(split.on_gpu)]
        is_for_cpu = bool((counts != there).any()) or not split.on_gpu
        if split.on_gpu:  # the kernel counts the others, as a call if it is given any
            self._stats.add(self._layers[layer].layer, there.tolist(), calls=0 if is_for_cpu else 1)
        if not is_for_cpu:
            self._overhead.forget()
            return False
        kept = np.arange(self.shape.num_experts + 1, dtype=np.int32)
        kept[list(split.on_gpu)] = self.shape.num_experts
        assert self.rates is not None
        rate = self.rates.shared_cpu if split.passing else self.rates.cpu
        expected = float(rate.of(counts - there).sum())
        self._cpu_call = _CpuCall(rows, expected, self._cpu.num_forwards, self._cpu.busy_seconds)
        self._cpu.submit_staged(self._layers[layer].number, kept[self._ids[:rows].numpy()])
        return True

    def _learn(self) -> None:
        """What the CPU's last call took, if it was the last forward of all."""
        call, self._cpu_call = self._cpu_call, None
        if call is not None and self._cpu.num_forwards == call.forwards + 1:
            self._overhead.learn(call.rows, call.expected, self._cpu.busy_seconds - call.busy)

    def warm_up(self, layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor) -> None:
        """Make the launches of `submit` in a warm-up (kernels.triton.common.compiling), without experts on
        their way.
        """
        host, shape = self._layers[layer].host, self.shape
        rows = hidden.to(self.device.matmul_dtype).contiguous()
        ids = torch.zeros(topk_ids.shape, dtype=torch.int32, device=rows.device)
        ranks, weights = self._tables.ranks(ids), torch.zeros(ids.shape, device=rows.device)
        self._cpu.stage(hidden, weights)
        space, _ = self._workspace(ranks, self._parts[0])
        for matrices in self._staging.matrices(host):
            experts = MoeMatrices(*matrices, self._layers[layer].epilogue)
            moe_blocks(RoutedRows(rows, ids, weights), experts, space, (0, 1), shape.num_experts)
        moe_sum(ranks, torch.empty_like(hidden), space, shape.num_experts)

    def collect(self, ticket: PrefillTicket) -> torch.Tensor:
        """Return the result [T, H] of the last `submit`, in the type of its input. Its stream waits for the CPU."""
        like = ticket.like
        if not ticket.has_cpu:
            assert ticket.of_gpu is not None
            return ticket.of_gpu
        out = torch.empty(like.shape, dtype=self._cpu.shape.dtype, device=like.device)
        self._cpu.collect(out)
        self._cpu.check()
        return out.to(like.dtype) if ticket.of_gpu is None else ticket.of_gpu.add_(out)

    def check(self) -> None:
        """Raise EngineError for a failure on the CPU since the last check. See the step's end first."""
        self._cpu.check()

    def close(self) -> None:
        """Wait for the device and stop the CPU's thread."""
        self._cpu.close()

    def _counts(self, ids: torch.Tensor) -> npt.NDArray[np.int64]:
        """Rows of each expert, on the host: the one wait of a layer."""
        host = self._ids[: ids.shape[0]]
        host.copy_(ids, non_blocking=True)
        self._copies.synchronize(self._copies.compute_mark())
        counts = np.bincount(host.numpy().ravel(), minlength=self.shape.num_experts + 1)
        if len(counts) > self.shape.num_experts + 1:
            raise IndexError(f"an expert id is {len(counts) - 1}, but there are {self.shape.num_experts} experts")
        return counts[: self.shape.num_experts].astype(np.int64)

    def _take_ahead(self, layer: int) -> list[Group]:
        ahead, groups = self._ahead
        self._ahead = (-1, [])
        return groups if ahead == layer else []  # others are given up: their copies run, but nobody reads them

    def _choose(self, layer: int, counts: npt.NDArray[np.int64], groups: Sequence[Group], rows: int) -> Split:
        if self.rates is None:
            raise RuntimeError("submit before rates are known")
        there = [expert for group in groups for expert in group.experts]
        is_held = self._layers[layer].slots() >= 0
        is_held[there] = False  # of a layer whose experts have changed places since they were copied ahead
        coming = sum(len(group.experts) for group in groups if not self._copies.is_done(group.ready))
        if groups:
            self._share.learn(coming == 0)
        results = self._cpu.shape.row_nbytes * rows * self.rates.copy / self._layers[0].host.expert_nbytes
        overhead = self._overhead.seconds(rows) + results
        held = np.flatnonzero(is_held).tolist()
        return choose_split(counts, self.rates, there, coming * self.rates.copy, overhead, held)

    def _compute(
        self, layer: int, routed: RoutedRows, counts: npt.NDArray[np.int64], split: Split, groups: Sequence[Group]
    ) -> torch.Tensor:
        """Launch the GPU's part: copies as buffers become free, the first at once; products of what is held, then of
        what was copied, as it arrives. groups: of those that are there."""
        num_experts, known = self.shape.num_experts, self._layers[layer]
        waiting = _cut(split.copied, self._staging.capacity(known.host))
        arriving, left = deque(groups), deque(waiting)
        while left and len(arriving) < self._staging.size.num_buffers:
            arriving.append(self._staging.bring(known.host, left.popleft()))
        slots = known.slots()[list(split.held)]
        self._tables.fill([*(group.experts for group in groups), *waiting], split.held, slots)
        ranks = self._tables.ranks(routed.topk_ids)
        rows = replace(routed, x=routed.x.to(self.device.matmul_dtype).contiguous())
        blocks = self._row_blocks(ranks, counts)

        def multiply(experts: Sequence[int], matrices: tuple[ExpertMatrices, ExpertMatrices, ExpertMatrices]) -> None:
            for one in blocks:
                end = one.first + int((-(-one.counts[list(experts)] // one.size)).sum())
                there = MoeMatrices(*matrices, known.epilogue)
                moe_blocks(rows.of(one.span), there, one.space, (one.first, end), num_experts)
                one.first = end

        if known.held is not None:
            multiply(split.held, known.held.matrices)
        while arriving:
            group = arriving.popleft()
            self._copies.compute_waits(group.ready)
            multiply(group.experts, group.matrices)
            self._staging.done(group)
            if left:
                arriving.append(self._staging.bring(known.host, left.popleft()))
        out = torch.empty_like(routed.x, memory_format=torch.contiguous_format)
        for one in blocks:
            moe_sum(ranks[one.span], out[one.span], one.space, num_experts)
        return out

    def _row_blocks(self, ranks: torch.Tensor, counts: npt.NDArray[np.int64]) -> list[_RowBlock]:
        """The rows of a step, in as many blocks as it has memory for: the products of each have the bits that they have
        in a step of their own."""
        most, made = self.shape.max_rows, list[_RowBlock]()
        for number, first in enumerate(range(0, len(ranks), most)):
            span = slice(first, min(first + most, len(ranks)))
            if len(ranks) > most:
                found = np.bincount(self._ids[span].numpy().ravel(), minlength=self.shape.num_experts + 1)
                counts = found[: self.shape.num_experts].astype(np.int64)
            made.append(_RowBlock(span, *self._workspace(ranks[span], self._parts[number]), counts))
        return made

    def _workspace(self, ranks: torch.Tensor, parts: torch.Tensor) -> tuple[MoeWorkspace, int]:
        """Memory for so many rows, their pairs sorted by rank, and the rows of a block. Hidden values of experts are
        read by the launch behind the one that writes them, so that all share theirs."""
        pairs = ranks.numel()
        block = block_rows(pairs, self.shape.num_experts)
        space = MoeWorkspace(
            self._inner[: pairs * self.shape.intermediate_size].view(pairs, -1),
            parts[: pairs * self.shape.hidden_size].view(pairs, -1),
            self._counter,
            moe_align(ranks, self.shape.num_experts, block, self._tables.slots),
        )
        return space, block

    def group_size(self, layer: int) -> int:
        """Return the number of experts of a full group."""
        host = self._layers[layer].host
        return min(self._staging.capacity(host), host.num_experts)

    def copy_seconds(self, layer: int, num_groups: int, meanwhile: Callable[[Callable[[], bool]], None]) -> float:
        """Return the time that an expert's copy takes. meanwhile: called while num_groups groups are copied, with a
        function that says whether they are done.
        """
        host, count = self._layers[layer].host, self.group_size(layer)
        first = self._copies.mark()
        for number in range(num_groups):
            start = number * count % (host.num_experts - count + 1)
            last = self._staging.bring(host, range(start, start + count)).ready
        meanwhile(lambda: self._copies.is_done(last))
        self._copies.synchronize(last)
        return self._copies.seconds_between(first, last) / (num_groups * count)

    def gpu_seconds(self, layer: int, repeats: int = 3) -> float:
        """Return the GPU's time for one (token, expert) pair of a step of many rows; the first run of all compiles."""
        shape, host, count = self.shape, self._layers[layer].host, self.group_size(layer)
        epilogue = self._layers[layer].epilogue
        group = self._staging.bring(host, range(count))
        tokens = min(shape.max_rows, 64 * shape.num_experts // shape.top_k)
        where = self.device.torch_device
        ids = (torch.arange(tokens * shape.top_k, dtype=torch.int32, device=where) % count).view(tokens, -1)
        rows = torch.zeros(tokens, shape.hidden_size, dtype=self.device.matmul_dtype, device=where)
        routed = RoutedRows(rows, ids, torch.ones(ids.shape, device=where))
        self._tables.fill([group.experts])
        self._copies.compute_waits(group.ready)
        best, counts = float("inf"), np.bincount(ids.cpu().numpy().ravel(), minlength=count)
        for _ in range(repeats):
            space, block = self._workspace(self._tables.ranks(ids), self._parts[0])
            span = (0, int((-(-counts // block)).sum()))
            begin = self._copies.compute_mark()
            moe_blocks(routed, MoeMatrices(*group.matrices, epilogue), space, span, shape.num_experts)
            end = self._copies.compute_mark()
            self._copies.synchronize(end)
            best = min(best, self._copies.seconds_between(begin, end))
        self._staging.done(group)
        return best / ids.numel()

    def _copy_ahead(self, layer: int, num_copied: int) -> None:
        """Put copies for the next layer: of experts that had most rows in its last step, and have no slot."""
        if layer >= len(self._layers):
            return
        known, host = self._layers[layer].counts, self._layers[layer].host
        capacity = self._staging.capacity(host)
        count = min(int(num_copied * self._share.value), (self._staging.size.num_buffers - 1) * capacity)
        is_wanted = self._layers[layer].slots() < 0
        if known is not None:
            is_wanted &= known > 0
        order = np.arange(host.num_experts) if known is None else np.argsort(-known, kind="stable")
        chosen = _cut(sorted(order[is_wanted[order]][:count].tolist()), capacity)
        self._ahead = (layer, [self._staging.bring(host, experts) for experts in chosen])


def _cut(experts: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(experts[at : at + size]) for at in range(0, len(experts), size)]


@dataclass(frozen=True, slots=True)
class PrefillLayer:
    """A layer of an ExpertPrefill, as its experts operator holds it."""

    prefill: ExpertPrefill
    number: int

    def takes(self, hidden: torch.Tensor) -> bool:
        """Whether a step of these rows [..., H] is run by streaming experts: many of them, on the layer's device."""
        is_here = hidden.device == self.prefill.device.torch_device
        return is_here and self.prefill.takes(hidden.numel() // hidden.shape[-1])

    def hold(self, held: HeldExperts) -> None:
        """Let the layer's experts that have a slot on the GPU be computed from there."""
        self.prefill.hold(self.number, held)

    def submit(self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> PrefillTicket:
        """Issue the layer's forward of a step that `takes` named, as ExpertPrefill.submit does. hidden: [..., H]."""
        rows = hidden.view(-1, hidden.shape[-1])
        return self.prefill.submit(self.number, rows.contiguous(), topk_ids, topk_weights)

    def warm_up(self, hidden: torch.Tensor, topk_ids: torch.Tensor) -> None:
        """Warm the layer up for such a step as ExpertPrefill.warm_up does. hidden: [T, H]."""
        self.prefill.warm_up(self.number, hidden, topk_ids)

    def collect(self, ticket: PrefillTicket, like: torch.Tensor) -> torch.Tensor:
        """Return the result of `submit` in the shape of `like`."""
        return self.prefill.collect(ticket).view(like.shape)

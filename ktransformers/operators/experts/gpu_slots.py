"""Routed experts of which some lie in slots of a GPU and change places while the model decodes.

    host      launch k ─ landed? ─ decide ─ map ─┬─ copies ...            launch k + 1 ─ landed? ...
    compute   step k ............................ map' ── mark              step k + 1 (reads map')
    copies                                              wait(mark) ── A B C ── ready

Slots and the map expert -> slot are fixed memory: a captured graph reads the map that is there when it is replayed. An
expert that has to go is taken from the map behind the step that was launched last; only behind that are its slot's new
bytes copied; only when the host has seen that they are there does the map name the newcomer, from the next step on. So
no step waits for a copy, and none reads a slot that is written. Which experts change places is the policy's
(cache/hot_experts.py), from what steps that are over picked.

Experts of a store (kernels/cpu/expert_store.py) are in RAM at times. One is uploaded only if it is there when the
policy asks, which is behind a step that the CPU computed it in; it is held there until its copy has landed. The store
is not asked any more for what has a slot, so that its RAM goes to others.

In a step experts that have a slot run on the GPU, the others on the CPU at the same time, in the order of the stream
(kernels/transfer/async_cpu_experts.py). A large step, whose host chooses what is copied to the GPU (streamed.py),
computes from the slots what the map names: it is launched between two changes of the map as every step is, so that the
host's last map is the one that it would read on the GPU, and uploads are put behind it. For long prompts the memory of
the last slots is lent to such steps (lending.py): between two steps, in the order of the compute stream as well.

A token's sum is the CPU's, in the router's order, and on it the GPU's parts in the router's order, rounded once. The
CPU's experts and the GPU's differ in rounding, so a result depends, within that, on which experts have a slot.

T tokens, K experts per token, E experts, S slots, L layers of a pool, H hidden, I intermediate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.cache.hot_experts import HotExperts, Upload
from ktransformers.errors import CapacityError
from ktransformers.kernels.cpu import MoeKernel
from ktransformers.kernels.transfer.copies import CopyQueue, Mark
from ktransformers.kernels.transfer.cuda import StreamDriver
from ktransformers.kernels.triton.experts.align import AlignedPairs, max_blocks, moe_align
from ktransformers.kernels.triton.experts.matrices import ExpertMatrices, MoeEpilogue, MoeMatrices, RoutedRows
from ktransformers.kernels.triton.experts.moe import moe_blocks
from ktransformers.kernels.triton.experts.router import Chosen, SlotSplit
from ktransformers.kernels.triton.experts.slot_map import split_pairs, sum_onto
from ktransformers.kernels.triton.experts.workspace import MoeWorkspace, block_rows
from ktransformers.operators.device import Device
from ktransformers.operators.experts.host_experts import copied_experts
from ktransformers.operators.experts.streamed import PrefillLayer
from ktransformers.operators.usage import ExpertUsage
from ktransformers.system.file_kinds import size_of

__all__ = ["HotLayer", "HotParts", "HotPool", "kind_of"]

_REFILLED = 64  # uploads that land together once lent slots are back


def kind_of(kernel: MoeKernel) -> object:
    """Return a key that is equal for layers whose experts can lie in the same slots, and whose GPU launches are
    alike.
    """
    return copied_experts(kernel).kind, kernel.num_experts


@dataclass(slots=True)
class _OnTheWay:
    """Uploads whose copies were put before `ready`."""

    uploads: list[Upload]
    ready: Mark


class HotPool:
    """Slots on one device for the experts of layers of one kind. Calls are made by the thread that runs steps.

    kernels: of the layers, in their order. max_rows: of a step that the policy learns from: larger ones touch nearly
    all experts. mapped: int32 [L, E], the host's copy of the map that the step launched next reads. Nothing has a slot
    before `begin`. Raises CapacityError when the slots do not fit on the device.
    """

    def __init__(
        self,
        device: Device,
        kernels: Sequence[MoeKernel],
        policy: HotExperts,
        copies: CopyQueue,
        driver: StreamDriver,
        max_rows: int,
    ) -> None:
        self.device, self.policy, self.max_rows = device, policy, max_rows
        self.hosts = [copied_experts(kernel) for kernel in kernels]
        self._copies, self._epilogues = copies, [self._epilogue(kernel) for kernel in kernels]
        where, shape = device.torch_device, (len(kernels), policy.num_experts)
        with torch.inference_mode(False):
            self.matrices = self._slots(policy.num_slots)
            self.slot_of = torch.full(shape, -1, dtype=torch.int32, device=where)
            self.picks = torch.zeros(shape, dtype=torch.int64, device=where)
            self._host_picks = driver.pinned(shape, torch.int64)
            # Two, in turns: the copy from the one before last is long over when it is written again.
            maps: list[tuple[torch.Tensor, Mark | None]] = [(driver.pinned(shape, torch.int32), None) for _ in range(2)]
        self._host_maps = deque(maps)
        self.mapped = np.full(shape, -1, np.int32)
        self._before = np.zeros(shape, np.int64)
        self._finished_rows = 0  # of the step whose picks are on the host, and not looked at
        self._on_the_way: deque[_OnTheWay] = deque()
        self._sources: dict[tuple[int, int], tuple[int, ...]] = {}  # of uploads that have not landed
        self._has_begun = False

    def _epilogue(self, kernel: MoeKernel) -> MoeEpilogue:
        return MoeEpilogue.of(kernel.weights, kernel.activation, self.device.torch_device)

    def _slots(self, num_slots: int) -> tuple[ExpertMatrices, ExpertMatrices, ExpertMatrices]:
        made = list[ExpertMatrices]()
        try:
            for part in self.hosts[0].projections:
                data = torch.empty(num_slots, part.nbytes, dtype=torch.uint8, device=self.device.torch_device)
                made.append(ExpertMatrices(data, part.qtype, part.rows, part.cols, part.layout))
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{size_of(num_slots * self.expert_nbytes)} for hot experts do not fit on {self.device.name}: ask for "
                "fewer (--hot_experts), or leave the GPU more room (--gpu_memory)"
            ) from error
        return made[0], made[1], made[2]

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert."""
        return self.hosts[0].expert_nbytes

    def begin(self, scores: npt.NDArray[np.float64] | None = None) -> None:
        """Fill the slots, and wait for it. scores: as learned before. Raises ValueError for other experts', ReadError
        for experts that cannot be read from their file.
        """
        uploads = self.policy.begin(scores)
        self.picks.zero_()  # of steps while loading
        for number, of_layer in groupby(uploads, lambda upload: upload.layer):
            host, lacking = self.hosts[number], list(of_layer)
            for at in range(0, len(lacking), host.max_held):
                some = lacking[at : at + host.max_held]
                experts = [upload.expert for upload in some]
                for expert, addresses in zip(experts, host.read(experts), strict=True):
                    self._sources[number, expert] = addresses
                self._put(some)
                ready = self._copies.mark()
                self._copies.compute_waits(ready)
                self._copies.synchronize(ready)
                self._land(some, is_kept=False)  # RAM is for others
        self._write_map()
        self._has_begun = True

    def launched(self) -> None:
        """Do what is due while a step runs: called when the step was launched."""
        if not self._has_begun:
            return
        learned = self._take_picks()
        self._host_picks.copy_(self.picks, non_blocking=True)
        self.policy.launch()
        has_changed = False
        while self._on_the_way and self._copies.is_done(self._on_the_way[0].ready):
            landed = self._on_the_way.popleft()
            self._copies.compute_waits(landed.ready)
            self._land(landed.uploads)
            has_changed = True
        uploads = list[Upload]()
        if learned is not None:
            self.policy.observe(learned)
            # No more copies than the last steps' could be made in time.
            uploads = [] if self._on_the_way else self.policy.decide(self._hold)
        if has_changed or uploads:
            self._write_map()
        if uploads:
            self._copies.wait(self._copies.compute_mark())
            self._put(uploads)
            self._on_the_way.append(_OnTheWay(uploads, self._copies.mark()))

    def finished(self, num_rows: int) -> None:
        """Note that a step is over. What it picked is looked at when the next one was launched: until then the GPU
        waits."""
        if self._has_begun:
            self._finished_rows = num_rows

    def _take_picks(self) -> npt.NDArray[np.int64] | None:
        """The picks of the step that is over, [L, E]; None for one that is not to be learned from."""
        rows, self._finished_rows = self._finished_rows, 0
        if not rows:
            return None
        picks = self._host_picks.numpy()
        learned = picks - self._before if rows <= self.max_rows else None
        self._before[:] = picks
        return learned

    def drain(self) -> None:
        """Wait for copies that are under way: their sources are about to go."""
        while self._on_the_way:
            landed = self._on_the_way.popleft()
            self._copies.synchronize(landed.ready)
            self._land(landed.uploads)

    def lend(self, count: int) -> tuple[torch.Tensor, ...]:
        """Clear the last `count` slots between two steps, and return their memory, uint8 of each projection: for what
        is launched on the compute stream from now on, until `take_back`. Waits for uploads that are under way.
        """
        self.drain()
        for move in self.policy.lend(count):
            for part in self.matrices:
                part.data[move.target].copy_(part.data[move.source])
        self._write_map()
        first = self.policy.num_slots - count
        return tuple(part.data[first:].view(-1) for part in self.matrices)

    def take_back(self) -> None:
        """Let the slots that were lent be filled again, behind what was launched so far, while steps go on."""
        uploads = self.policy.reclaim()
        self._copies.wait(self._copies.compute_mark())
        for at in range(0, len(uploads), _REFILLED):  # the first ones are of use while the last ones come
            batch = uploads[at : at + _REFILLED]
            if not all(self._hold(upload.layer, upload.expert) for upload in batch):
                raise RuntimeError(
                    "slots of experts in files are not lent: these may not be in RAM when they come back"
                )
            self._put(batch)
            self._on_the_way.append(_OnTheWay(batch, self._copies.mark()))

    @property
    def is_refilled(self) -> bool:
        """Whether no slot is lent and no upload under way."""
        return not self.policy.num_lent and not self._on_the_way

    def _hold(self, layer: int, expert: int) -> bool:
        """Whether an expert can be uploaded; it stays where it is until it has landed."""
        addresses = self.hosts[layer].hold(expert)
        if addresses is None:
            return False
        self._sources[layer, expert] = addresses
        return True

    def _put(self, uploads: Sequence[Upload]) -> None:
        for upload in uploads:
            sources = self._sources[upload.layer, upload.expert]
            for source, target in zip(sources, self.matrices, strict=True):
                nbytes = target.data.shape[1]
                self._copies.copy(target.data.data_ptr() + upload.slot * nbytes, source, nbytes)

    def _land(self, uploads: Sequence[Upload], *, is_kept: bool = True) -> None:
        self.policy.land(uploads)
        for upload in uploads:
            del self._sources[upload.layer, upload.expert]
            self.hosts[upload.layer].release(upload.expert, is_kept=is_kept)

    def _write_map(self) -> None:
        """In the order of the compute stream."""
        host, used = self._host_maps.popleft()
        if used is not None:
            self._copies.synchronize(used)
        self.mapped[:] = self.policy.slot_of
        host.numpy()[:] = self.mapped
        self.slot_of.copy_(host, non_blocking=True)
        self._host_maps.append((host, self._copies.compute_mark()))

    def layer(self, number: int, prefill: PrefillLayer | None) -> HotLayer:
        """Return the pool's layer with this number. prefill: streams its experts, from now on those without a slot."""
        made = HotLayer(self, number, self._epilogues[number], prefill)
        if prefill is not None:
            prefill.hold(made)
        return made


@dataclass(frozen=True, slots=True)
class HotParts:
    """Results of the experts that the GPU computes in a step. ids: int32 [T, K], -1 for pairs of the CPU. parts: [T *
    K, H].
    """

    ids: torch.Tensor
    parts: torch.Tensor
    num_experts: int

    def sum_onto(self, base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Add these parts to base [T, H], the CPU's part: [T, H] of the type of `like`."""
        out = torch.empty(base.shape, dtype=like.dtype, device=base.device)
        return sum_onto(base, self.parts, self.ids, self.num_experts, out)


@dataclass(frozen=True, slots=True)
class HotLayer:
    """A layer of a pool, as its experts operator holds it; HeldExperts for large steps.

    prefill: what streams its experts in those.
    """

    pool: HotPool
    number: int
    epilogue: MoeEpilogue
    prefill: PrefillLayer | None = None

    @property
    def matrices(self) -> tuple[ExpertMatrices, ExpertMatrices, ExpertMatrices]:
        """The matrices of all slots of the pool."""
        return self.pool.matrices

    def slots(self) -> npt.NDArray[np.int32]:
        """Return the slot of each expert, [E], negative for none, by the map that the step launched next reads."""
        slots: npt.NDArray[np.int32] = self.pool.mapped[self.number]
        return slots

    def chosen(self, layer: int, usage: ExpertUsage, slots: torch.Tensor, top_k: int) -> Chosen:
        """Return the memory of a router that divides its choice as `split` does, in its own launch: its ids are the
        GPU's, and those of the CPU are in `split.elsewhere`. Arguments as in `split`.
        """
        pool, number = self.pool, self.number
        elsewhere = torch.empty(len(slots), top_k, dtype=torch.int32, device=slots.device)
        split = SlotSplit(pool.slot_of[number], pool.picks[number], elsewhere)
        return replace(usage.chosen(layer, slots, top_k), split=split)

    def split(
        self, topk_ids: torch.Tensor, layer: int, usage: ExpertUsage, slots: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Divide a step's ids between the GPU and the CPU, int32 [T, K] each, see `split_pairs`. layer: its number in
        the model.

        usage: counts what has a slot. slots: of the step's rows in the cache; None: nothing is counted.
        """
        chosen = None if slots is None or layer < 0 else usage.chosen(layer, slots, topk_ids.shape[1])
        picks = self.pool.picks[self.number]
        memory = None if chosen is None else chosen.ids
        return split_pairs(topk_ids.contiguous(), self.pool.slot_of[self.number], chosen, picks, memory)

    def launch(self, hidden: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor) -> HotParts:
        """Compute the parts of experts that have a slot: hidden [T, H], ids of `split`, weights [T, K]."""
        pool, num_experts = self.pool, self.pool.policy.num_experts
        rows = hidden.to(pool.device.matmul_dtype).contiguous()
        weights, pairs = topk_weights.to(torch.float32).contiguous(), ids.numel()
        _, up, down = pool.matrices
        block = block_rows(pairs, num_experts)
        aligned = AlignedPairs.allocate(pairs, num_experts, block, rows.device)
        moe_align(ids, num_experts, block, pool.slot_of[self.number], aligned)
        space = MoeWorkspace(
            torch.empty(pairs, up.rows, dtype=rows.dtype, device=rows.device),
            torch.empty(pairs, down.rows, dtype=rows.dtype, device=rows.device),
            ids.new_empty(1),
            aligned,
        )
        span = (0, max_blocks(pairs, num_experts, block))
        experts = MoeMatrices(*pool.matrices, self.epilogue)
        moe_blocks(RoutedRows(rows, ids, weights), experts, space, span, num_experts)
        return HotParts(ids, space.parts, num_experts)

    def warm_up(
        self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: int, usage: ExpertUsage
    ) -> None:
        """Make the launches of a step in a warm-up (triton/common/compiling.py). hidden: [T, H]; others as in
        `split`.
        """
        slots = torch.zeros(len(topk_ids), dtype=torch.int64, device=hidden.device)
        ids, _ = self.split(topk_ids, layer, usage, slots)
        base = torch.empty(hidden.shape, dtype=self.pool.device.dtype, device=hidden.device)
        self.launch(hidden, ids, topk_weights).sum_onto(base, hidden)

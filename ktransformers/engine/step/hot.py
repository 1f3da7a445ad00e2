"""Sets up experts in slots of GPUs: pinned memory, pools, what was learned before, and what a report says of them.

What was learned is the policy's scores, in a file (engine/model/hot_file.py) that is written when the engine closes and
now and then. Knows plans, loaded operators and devices; not steps or routing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ktransformers.cache.hot_experts import MAX_UPLOADS, HotCosts, HotExperts
from ktransformers.engine.model.hot_file import HotFile
from ktransformers.engine.step.expert_streaming import PrefillTools
from ktransformers.errors import KernelError
from ktransformers.kernels.cpu import ExpertStore, MoeKernel
from ktransformers.kernels.transfer.copies import PinnedRanges
from ktransformers.operators.base import ExpertStats
from ktransformers.operators.device import Device, StepFollower
from ktransformers.operators.expert_files import ExpertFiles
from ktransformers.operators.experts.gpu_slots import HotLayer, HotPool, kind_of
from ktransformers.operators.experts.host_experts import copied_experts
from ktransformers.operators.experts.lending import NO_LONG_STEPS, Lending, LongSteps, choose_long_steps
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.experts.split import PrefillRates
from ktransformers.operators.experts.streamed import ExpertPrefill, PrefillLayer
from ktransformers.optimize.hot_slots import HotSlots
from ktransformers.optimize.plan import Plan
from ktransformers.profiling.stored_counts import NOTHING_STORED, StoredCounts, sum_stored
from ktransformers.system.file_kinds import size_of

__all__ = ["HotGpu", "HotService", "StepExperts", "open_hot"]

Floats = npt.NDArray[np.float64]

logger = logging.getLogger(__name__)

_LEAST_ROWS = 8  # of the largest step that the policy learns from
_COPY_SECONDS = 1e-3  # of PCIe that uploads may take of a step
_MOST_UPLOADS = 64
_LEAST_HINDRANCE = 0.1  # of a copy's time, for which it holds up others on their way over PCIe
_SAVED_EVERY = 4096  # steps


@dataclass(frozen=True, slots=True)
class _Pool:
    """layers: their numbers in the model; -1: none."""

    slots: HotPool
    layers: tuple[int, ...]

    def begin(self, learned: Mapping[int, Floats]) -> None:
        found = [learned.get(layer) for layer in self.layers]
        shape = self.slots.slot_of.shape
        known = [one for one in found if one is not None and one.shape == shape[1:]]
        # Layers of which nothing is known, beside others of which something is, have the mean of these.
        scores = np.full(shape, np.mean(known) if known else 0.0)
        for row, one in enumerate(found):
            if one is not None and one.shape == shape[1:]:
                scores[row] = one
        self.slots.begin(scores)

    def learned(self) -> dict[int, Floats]:
        if not self.slots.policy.totals.steps:
            return {}
        return {layer: each for layer, each in zip(self.layers, self.slots.policy.scores(), strict=True) if layer >= 0}


@dataclass(slots=True)
class HotGpu(StepFollower):
    """The pools of expert slots on one GPU. pinned: what nobody else has pinned."""

    pools: Sequence[_Pool]
    pinned: PinnedRanges
    _file: HotFile | None = None
    _num_steps: int = 0

    def begin(self, file: HotFile, learned: Mapping[int, Floats]) -> None:
        """Fill the slots, with what was learned before. file: keeps what is learned now."""
        self._file = file
        for pool in self.pools:
            pool.begin(learned)

    @override
    def launched(self) -> None:
        for pool in self.pools:
            pool.slots.launched()
        self._num_steps += 1
        if self._num_steps % _SAVED_EVERY == 0:
            self._save()

    @override
    def finished(self, num_rows: int) -> None:
        for pool in self.pools:
            pool.slots.finished(num_rows)

    @override
    def check(self) -> None:
        pass  # uploads cannot fail without the device

    @override
    def close(self) -> None:
        self._save()
        for pool in self.pools:
            pool.slots.drain()
        self.pinned.close()

    def _save(self) -> None:
        learned: dict[int, Floats] = {}
        for pool in self.pools:
            learned |= pool.learned()
        if self._file is not None and learned:
            self._file.add(learned)


@dataclass(frozen=True, slots=True)
class HotService:
    """The expert slots of all GPUs. layers: by experts module, for its runtime. lending: what lends slots to long
    steps, where there is one GPU.
    """

    layers: Mapping[str, HotLayer] = field(default_factory=dict)
    gpus: Sequence[HotGpu] = ()
    lending: list[Lending] = field(default_factory=list)
    _taken: list[int] = field(default_factory=lambda: [0, 0, 0, 0], repr=False)

    def begin(self, file: HotFile) -> None:
        """Fill the slots with experts. Until then no expert has one."""
        if not self.gpus:
            return
        learned = file.read()
        for gpu in self.gpus:
            gpu.begin(file, learned)
        slots = sum(pool.policy.num_slots for pool in self._pools())
        origin = f"as learned before ({file.path})" if learned else "any of them at first"
        logger.info("%d slots on GPUs are filled with experts, %s", slots, origin)

    @property
    def long_steps(self) -> LongSteps:
        """The steps that slots are lent to."""
        return self.lending[0].steps if self.lending else NO_LONG_STEPS

    def lend(self, is_long: bool) -> None:
        """Lend slots before a long step, or take them back before another one."""
        for one in self.lending:
            one.set(is_long)

    def refuse_long_steps(self, reason: str) -> None:
        """Let no slots be lent, with one line in the log where some would be."""
        if self.lending:
            logger.info("no slots are lent to long prompts: %s", reason)
            self.lending.clear()

    def _pools(self) -> list[HotPool]:
        return [pool.slots for gpu in self.gpus for pool in gpu.pools]

    def totals(self) -> tuple[int, int, int, int]:
        """Count since the start: experts that decode steps used, those that had a slot, uploads, bytes of these."""
        pools = self._pools()
        sums = [pool.policy.totals for pool in pools]
        nbytes = sum(each.uploads * pool.expert_nbytes for each, pool in zip(sums, pools, strict=True))
        return sum(t.reads for t in sums), sum(t.hits for t in sums), sum(t.uploads for t in sums), nbytes

    def describe(self) -> str | None:
        """Describe the use of the slots in one line; None without slots."""
        if not self.gpus:
            return None
        reads, hits, uploads, nbytes = self.totals()
        rate = 100 * hits / reads if reads else 0.0
        return f"{rate:.1f} % of {reads} reads of experts found theirs on a GPU, {uploads} uploads ({size_of(nbytes)})"

    def has_slot(self) -> dict[int, npt.NDArray[np.bool_]]:
        """Return whether each expert, [E], has a slot now, by the layer's number in the model."""
        pools = [pool for gpu in self.gpus for pool in gpu.pools]
        rows = [zip(pool.layers, pool.slots.policy.slot_of >= 0, strict=True) for pool in pools]
        return {layer: row for of_pool in rows for layer, row in of_pool if layer >= 0}

    def take(self) -> tuple[int, int, int, int]:
        """Return what is new in `totals` since the last call."""
        if not self.gpus:  # each step asks
            return 0, 0, 0, 0
        now = self.totals()
        before, self._taken[:] = tuple(self._taken), now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2], now[3] - before[3]


class StepExperts:
    """The routed experts of a loaded model, as results of steps report on them. hot: those in slots of GPUs. files:
    what others are read from, of the model and of what drafts for it; none where all are in memory."""

    def __init__(
        self, stats: ExpertStats | None = None, hot: HotService | None = None, files: Sequence[ExpertFiles] = ()
    ) -> None:
        self._stats, self.hot, self._files = stats or ExpertStats(), hot or HotService(), files
        self._counted = (0, 0, 0)
        self.take_counts()  # what ran while loading is of no request
        self.take_stored()

    def take_counts(self) -> tuple[tuple[int, int, int], bytes]:
        """Return StepResult.experts and expert_counts since the last call."""
        before, self._counted = self._counted, self._stats.totals()
        pairs, calls, distinct = (now - then for now, then in zip(self._counted, before, strict=True))
        return (pairs, calls, distinct), self._stats.take_counts()

    def take_stored(self) -> tuple[StoredCounts, StoredCounts]:
        """Return StepResult.stored and stored_rows since the last call."""
        if not self._files:  # each step asks
            return NOTHING_STORED, NOTHING_STORED
        taken = [one.take() for one in self._files]
        return sum_stored([experts for experts, _ in taken]), sum_stored([rows for _, rows in taken])


def _costs(rates: PrefillRates | None) -> HotCosts:
    """A copy takes memory bandwidth from the CPU: by as much as its experts are slower beside copies; and hidden states
    of the steps wait behind it."""
    if rates is None:
        return HotCosts()
    alone, shared = rates.cpu.seconds[0], rates.shared_cpu.seconds[0]
    return HotCosts(read=alone, upload=rates.copy * max(1.0 - alone / shared, _LEAST_HINDRANCE))


def _most_uploads(rates: PrefillRates | None, num_pools: int) -> int:
    most = MAX_UPLOADS if rates is None else int(_COPY_SECONDS / rates.copy)
    return max(min(most, _MOST_UPLOADS) // num_pools, 1)


def open_hot(
    plan: Plan,
    hots: Sequence[HotSlots],
    prefill: Mapping[str, PrefillLayer],
    tools_of: Callable[[Device], PrefillTools | None],
    max_batch_size: int,
) -> HotService:
    """Make the expert slots for the loaded experts of a plan; `Devices.close` ends it.

    prefill: what streams experts, by key: their memory is pinned. Where memory cannot be pinned, or there is no CUDA
    device, there are no slots, and one line says why. Raises CapacityError when they do not fit.
    """
    layers: dict[str, HotLayer] = {}
    gpus: list[HotGpu] = []
    lending: list[Lending] = []
    stores: set[ExpertStore] = set()
    for hot in hots:
        device = plan.devices[hot.device]
        tools = tools_of(device)
        kernels = _kernels(plan, hot)
        if tools is None or len(kernels) != len(hot.slots):
            logger.warning("no experts get slots on %s: it is no CUDA device", device.name)
            continue
        grouped: dict[object, list[str]] = {}
        for key, kernel in kernels.items():
            grouped.setdefault(kind_of(kernel), []).append(key)
        rates = next((one.prefill.rates for key, one in prefill.items() if key in kernels), None)
        pools: list[_Pool] = []
        try:
            _pin_stores(plan, tools, kernels.values(), stores)
            apart = [kernel for key, kernel in kernels.items() if key not in prefill and kernel.store is None]
            pinned = _pinned(tools, apart)
        except KernelError as error:
            advice = "--hot_experts off puts whole layers there"
            logger.warning(
                "no experts get slots on %s: their memory cannot be pinned (%s); %s", device.name, error, advice
            )
            continue
        for keys in grouped.values():
            of_pool, slots = [kernels[key] for key in keys], sum(hot.slots[key] for key in keys)
            uploads = _most_uploads(rates, len(grouped))
            policy = HotExperts(len(keys), hot.num_experts, slots, uploads, costs=_costs(rates))
            rows = max(max_batch_size, _LEAST_ROWS)
            made = HotPool(device, of_pool, policy, tools.copies, tools.driver, rows)
            pools.append(_Pool(made, tuple(kernel.layer for kernel in of_pool)))
            layers |= {key: made.layer(number, prefill.get(key)) for number, key in enumerate(keys)}
        streamed = next((one.prefill for key, one in prefill.items() if key in kernels), None)
        lending += [] if streamed is None else _lending([pool.slots for pool in pools], streamed)
        gpu = HotGpu(pools, pinned)
        device.followers.append(gpu)
        gpus.append(gpu)
    return HotService(layers, gpus, lending)


def _lending(pools: Sequence[HotPool], prefill: ExpertPrefill) -> list[Lending]:
    """What lends slots of the largest pool to long steps; nothing where that never pays."""
    shape, rates = prefill.shape, prefill.rates
    if not shape.long_rows or rates is None:
        return []
    pool = max(pools, key=lambda one: one.policy.num_slots)
    policy, parts = pool.policy, [part.nbytes for part in pool.hosts[0].projections]
    itemsize = prefill.device.matmul_dtype.itemsize
    steps = choose_long_steps(shape, rates, policy.num_layers, policy.num_slots, parts, itemsize)
    if not steps.rows:
        logger.info("no slots are lent to long prompts: steps longer than %d tokens would not pay", shape.max_rows)
        return []
    logger.info(
        "from %d tokens of prompts on, %d of %d slots are lent to steps of up to %d tokens",
        steps.least_tokens,
        steps.num_slots,
        policy.num_slots,
        steps.rows,
    )
    return [Lending(pool, prefill, steps)]


def _kernels(plan: Plan, hot: HotSlots) -> dict[str, MoeKernel]:
    found: dict[str, MoeKernel] = {}
    for key in hot.slots:
        operator = plan.operators[key]
        if isinstance(operator, KTransformersExperts) and operator.kernel is not None:
            found[key] = operator.kernel
    return found


def _pin_stores(plan: Plan, tools: PrefillTools, kernels: Iterable[MoeKernel], stores: set[ExpertStore]) -> None:
    """Pin the memory of open stores that is not in `stores`, for all GPUs, until these are closed. Raises
    KernelError."""
    for store in {kernel.store[0] for kernel in kernels if kernel.store is not None} - stores:
        plan.devices.close_behind(PinnedRanges(tools.driver, [store.memory], [store]).close)
        stores.add(store)


def _pinned(tools: PrefillTools, kernels: Sequence[MoeKernel]) -> PinnedRanges:
    hosts = [copied_experts(kernel) for kernel in kernels]
    return PinnedRanges(tools.driver, {piece for host in hosts for piece in host.pieces()}, hosts)

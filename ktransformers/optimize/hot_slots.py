"""Plans how many experts of each layer on the CPU get a slot on the layer's GPU, and what that takes of its memory.

A layer's experts qualify when they can be streamed there (optimize/streaming): their bytes are copied as they lie in
the CPU's memory. A number is as many slots for each layer, beside which whole layers may fill the rest. `auto` divides
what a plan leaves between slots and whole layers.

With even routing slots serve as many reads as whole layers of the same bytes do, and with any other routing more. What
they cost is that each layer with slots is handed over to the CPU, which one on the GPU is not. So where layers may go
there whole, as many do as keep a step of one sequence with even routing from getting more than 2 % longer than with
whole layers alone: most of the room where few layers are left to the CPU or experts are small, so that hand-overs are
much of a step; none where reading experts takes far longer. Where it was learned at earlier starts how often experts
are picked, as many layers go whole as make a step shortest by that. Slots need the experts in RAM as well, so that more
layers go whole where RAM is short. Pure: reads headers only.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ktransformers.config import hot_slots
from ktransformers.models.facts import ModelFacts
from ktransformers.optimize.plan import Plan, format_bytes
from ktransformers.optimize.streaming import StreamedLayer, streamed_layers
from ktransformers.weights.source import WeightSource

__all__ = [
    "HOT_EXPERTS",
    "HotSlots",
    "LearnedPicks",
    "plan_hot_slots",
    "whole_layers",
    "whole_layers_beside_slots",
    "with_hot_slots",
]

logger = logging.getLogger(__name__)

HOT_EXPERTS = "hot experts"
"""What the plan's table calls the memory of slots."""

_MAP_BYTES = 20  # of an expert: where its slot is, how often it was picked

_MOST_LOSS = 0.02  # of a step of one sequence, with even routing
# Seconds of a replayed step. _HAND_OVER, of a layer's experts to the CPU beside reading them (27 us there, and what the
# GPU does before and behind), and _OUTSIDE, of a step outside of layers, were measured on an H100 with 16 Xeon cores.
# The others are estimates: experts on the GPU beside reading them, what else a layer takes, and bytes a second of an
# ordinary server's memory, of GPUs from the A100 on, and of a disk.
_HAND_OVER, _OUTSIDE = 48e-6, 0.5e-3
_RESIDENT, _LAYER = 12e-6, 50e-6
_RAM, _VRAM, _DISK = 100e9, 1.5e12, 3e9


@dataclass(frozen=True, slots=True)
class HotSlots:
    """Expert slots of the layers whose layer device is one GPU.

    slots: by experts module, in the order of layers: the layer's part of what it shares with others. expert_nbytes: of
    one expert of each; other_nbytes: what a layer has there beside, biases and maps. is_filling: whether nobody has
    asked for a number of slots.
    """

    device: str
    num_experts: int
    slots: Mapping[str, int]
    expert_nbytes: Mapping[str, int]
    other_nbytes: Mapping[str, int] = field(default_factory=dict)
    is_filling: bool = False

    @property
    def slots_nbytes(self) -> int:
        """Bytes of the experts in slots."""
        return sum(count * self.expert_nbytes[key] for key, count in self.slots.items())

    @property
    def nbytes(self) -> int:
        """Bytes on the GPU of the slots, biases and maps."""
        return self.slots_nbytes + sum(self.other_nbytes.get(key, 0) for key in self.slots)

    def __str__(self) -> str:
        least, most = min(self.slots.values()), max(self.slots.values())
        shown = f"{least}" if least == most else f"{least} to {most}"
        return (
            f"{shown} of the {self.num_experts} experts of each of {len(self.slots)} layers have a slot on "
            f"{self.device}, those that are used most of all layers: {format_bytes(self.nbytes)} in all"
        )


@dataclass(frozen=True, slots=True)
class LearnedPicks:
    """Counts of the picks of each expert, at earlier starts. shares: of all picks of a layer, the mean layer's: how
    many the most picked experts have, [E + 1], by their number."""

    shares: npt.NDArray[np.float64]

    @classmethod
    def of(cls, scores: Iterable[npt.NDArray[np.float64]]) -> LearnedPicks | None:
        """Return the counts of these layers, [E] of each; None where nothing was learned."""
        known = [one / one.sum() for one in scores if one.sum() > 0]
        if not known or len({len(one) for one in known}) > 1:
            return None
        # The slots of all layers are one pool: the most picked experts of all of them have them.
        best = np.sort(np.concatenate(known))[::-1].reshape(len(known[0]), len(known)).sum(1)
        return cls(np.concatenate(([0.0], np.cumsum(best) / len(known))))

    def hits(self, share: float) -> float:
        """Return the share of picks that slots for `share` of all experts serve."""
        return float(np.interp(share * (len(self.shares) - 1), np.arange(len(self.shares)), self.shares))


def whole_layers(
    fitting: int, num_layers: int, read_nbytes: int, learned: LearnedPicks | None = None, rate: float = _RAM
) -> int:
    """Return how many of the layers that fit on a GPU go there whole, while slots get the rest of their room: so many
    that with even routing a step of one sequence takes at most 2 % longer than if all did, or by what was learned as
    make it shortest.

    fitting: layers whose experts fit there, of num_layers. read_nbytes: of the experts that a token reads in a layer,
    at `rate` bytes a second.
    """
    if fitting >= num_layers:
        return fitting
    on_gpu, on_cpu = _RESIDENT + read_nbytes / _VRAM, _HAND_OVER + read_nbytes / rate
    if learned is not None:

        def seconds(whole: int) -> float:
            served = learned.hits((fitting - whole) / (num_layers - whole))
            return whole * on_gpu + (num_layers - whole) * (_HAND_OVER + (1.0 - served) * read_nbytes / rate)

        return min(range(fitting, -1, -1), key=seconds)
    step = _OUTSIDE + num_layers * _LAYER + fitting * on_gpu + (num_layers - fitting) * on_cpu
    # A layer with slots has the reads that its slots serve on the GPU beside those on the CPU.
    longer = _HAND_OVER - on_gpu
    return 0 if longer <= 0 else max(fitting - int(_MOST_LOSS * step / longer), 0)


def whole_layers_beside_slots(
    plan: Plan, source: WeightSource, facts: ModelFacts, whole: Mapping[str, str], learned: LearnedPicks | None = None
) -> dict[str, int]:
    """Return how many layers' experts go to each GPU whole where slots get the rest.

    whole: those that could, {experts module: device}. GPUs whose layers' experts cannot have slots are left out.
    """
    missing = plan.total_bytes.get("cpu", 0) - plan.capacity.get("cpu", 0)
    on_cpu = {entry.key: entry.nbytes.get("cpu", 0) for entry in plan.entries}
    found: dict[str, int] = {}
    for device, layers in streamed_layers(plan, source).items():
        fitting = list(whole.values()).count(device)
        read = (facts.top_k() or 1) * max(one.nbytes for one in layers)
        count = whole_layers(fitting, len(layers), read, learned, _DISK if plan.stored_experts else _RAM)
        smallest = min(on_cpu[one.key] for one in layers)
        count = max(count, min(fitting, -(-missing // max(smallest, 1))))
        missing -= count * smallest
        found[device] = count
    return found


def plan_hot_slots(
    plan: Plan,
    source: WeightSource,
    facts: ModelFacts,
    asked: str,
    moved: Collection[str] = (),
    left: Mapping[str, int] | None = None,
) -> tuple[HotSlots, ...]:
    """Plan slots beside what `plan` holds on each GPU. asked: "auto", "off" or a number, where a rule does not say.

    moved: experts modules that go there whole; left: bytes of each GPU that are free then. Automatic slots are given
    up, with one line, where there are fewer than a token's experts.
    """
    made = list[HotSlots]()
    for device, candidates in streamed_layers(plan, source).items():
        found = [one for one in candidates if one.key not in moved]
        wanted = {one.key: one.operator.hot_experts or asked for one in found}
        kept = [one for one in found if wanted[one.key] != "off"]
        if not kept:
            continue
        num_experts = kept[0].operator.num_experts
        if any(one.operator.num_experts != num_experts for one in kept):
            logger.info("no experts get slots on %s: layers have different numbers of experts", device)
            continue
        other = {one.key: one.bias_nbytes + _MAP_BYTES * num_experts for one in kept}
        fixed = {one.key: min(hot_slots(wanted[one.key]) or 0, num_experts) for one in kept}
        room = plan.capacity.get(device, 0) - plan.total_bytes.get(device, 0) if left is None else left[device]
        room -= sum(other.values()) + sum(fixed[one.key] * one.nbytes for one in kept)
        free = [one for one in kept if wanted[one.key] == "auto"]
        automatic = _divided(room, free, num_experts)
        if free and min(automatic.values()) < (facts.top_k() or 1):
            logger.info(
                "hot experts get no slots on %s: there is room for %d of each layer, and a token takes %d",
                device,
                min(automatic.values()),
                facts.top_k() or 1,
            )
            automatic = {}
        slots = {one.key: fixed[one.key] or automatic.get(one.key, 0) for one in kept}
        slots = {key: count for key, count in slots.items() if count}
        if slots:
            sizes = {one.key: one.nbytes for one in kept}
            made.append(HotSlots(device, num_experts, slots, sizes, other, is_filling=not any(fixed.values())))
    return tuple(made)


def _divided(nbytes: int, layers: Sequence[StreamedLayer], num_experts: int) -> dict[str, int]:
    """As many slots for each layer as fit, and one more for the first ones from what is left."""
    each = min(max(nbytes, 0) // max(sum(one.nbytes for one in layers), 1), num_experts)
    left = nbytes - each * sum(one.nbytes for one in layers)
    found: dict[str, int] = {}
    for one in layers:
        is_one_more = each < num_experts and one.nbytes <= left
        found[one.key] = each + is_one_more
        left -= one.nbytes * is_one_more
    return found


def with_hot_slots(plan: Plan, hots: tuple[HotSlots, ...]) -> tuple[Plan, tuple[HotSlots, ...]]:
    """Return `plan` with the slots' memory and with what its table says; and those whose layers have not gone to a GPU
    whole.
    """
    on_cpu = {entry.key for entry in plan.entries if entry.placement.generate_device == "cpu"}
    kept = [replace(one, slots={key: n for key, n in one.slots.items() if key in on_cpu}) for one in hots]
    kept = [one for one in kept if one.slots]
    extra = {what: nbytes for what, nbytes in plan.extra_bytes.items() if what != HOT_EXPERTS}
    if not kept:
        return replace(plan, extra_bytes=extra, slots={}), ()
    slots = {key: (count, one) for one in kept for key, count in one.slots.items()}

    def noted(key: str, note: str) -> str:
        if key not in slots:
            return note
        count, one = slots[key]
        return "; ".join(part for part in (f"{count} of {one.num_experts} hot on {one.device}", note) if part)

    entries = tuple(replace(entry, note=noted(entry.key, entry.note)) for entry in plan.entries)
    extra[HOT_EXPERTS] = {one.device: one.nbytes for one in kept}
    shares = {key: (one.device, count / one.num_experts) for key, (count, one) in slots.items()}
    return replace(plan, entries=entries, extra_bytes=extra, slots=shares), tuple(kept)

"""Plans how many experts of each layer on the CPU get a slot on the layer's GPU, and what that takes of its memory.

A layer's experts qualify when they can be streamed there (optimize/streaming): their bytes are copied as they lie in
the CPU's memory. `auto` divides what a plan leaves among all layers evenly; a number is as many slots for each layer,
beside which whole layers may fill the rest. Pure: reads headers only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ktransformers.config import hot_slots
from ktransformers.models.facts import ModelFacts
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.plan import Plan, format_bytes
from ktransformers.weights.source import WeightSource

__all__ = ["HOT_EXPERTS", "HotSlots", "plan_hot_slots", "with_hot_slots"]

logger = logging.getLogger(__name__)

HOT_EXPERTS = "hot experts"
"""What the plan's table calls the memory of slots."""

_MAP_BYTES = 20  # of an expert: where its slot is, how often it was picked


@dataclass(frozen=True, slots=True)
class HotSlots:
    """Expert slots of the layers whose layer device is one GPU.

    slots: by experts module, in the order of layers. expert_nbytes: of one expert of each; other_nbytes: what a layer
    has there beside, biases and maps.
    """

    device: str
    num_experts: int
    slots: Mapping[str, int]
    expert_nbytes: Mapping[str, int]
    other_nbytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes on the GPU of the slots, biases and maps."""
        return sum(count * self.expert_nbytes[key] + self.other_nbytes.get(key, 0) for key, count in self.slots.items())

    def __str__(self) -> str:
        least, most = min(self.slots.values()), max(self.slots.values())
        shown = f"{least}" if least == most else f"{least} to {most}"
        return (
            f"{shown} of the {self.num_experts} experts of each of {len(self.slots)} layers have a slot on "
            f"{self.device}, {format_bytes(self.nbytes)} in all"
        )


def plan_hot_slots(plan: Plan, source: WeightSource, facts: ModelFacts, asked: str) -> tuple[HotSlots, ...]:
    """Plan slots beside what `plan` holds on each GPU. asked: "auto", "off" or a number, where a rule does not say.

    Automatic slots are given up, with one line, where there are fewer than a token's experts.
    """
    made = list[HotSlots]()
    for device, found in _candidates(plan, source).items():
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
        left = plan.capacity.get(device, 0) - plan.total_bytes.get(device, 0) - sum(other.values())
        left -= sum(count * one.nbytes for one in kept for count in [fixed[one.key]])
        free = [one for one in kept if wanted[one.key] == "auto"]
        each = max(left, 0) // sum(one.nbytes for one in free) if free else 0
        if free and each < (facts.top_k() or 1):
            logger.info(
                "hot experts get no slots on %s: there is room for %d of each layer, and a token takes %d",
                device,
                each,
                facts.top_k() or 1,
            )
            each = 0
        slots = {one.key: fixed[one.key] or min(each, num_experts) for one in kept}
        slots = {key: count for key, count in slots.items() if count}
        if slots:
            made.append(HotSlots(device, num_experts, slots, {one.key: one.nbytes for one in kept}, other))
    return tuple(made)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A layer whose experts can have slots, with the bytes of one expert and of all biases."""

    key: str
    operator: KTransformersExperts
    nbytes: int
    bias_nbytes: int


def _candidates(plan: Plan, source: WeightSource) -> Mapping[str, list[_Candidate]]:
    """By device."""
    found: dict[str, list[_Candidate]] = {}
    for entry in plan.entries:
        operator, place = plan.operators.get(entry.key), entry.placement
        if (
            not isinstance(operator, KTransformersExperts)
            or place.layer_device is None
            or not plan.devices[place.layer_device].is_gpu
        ):
            continue
        if place.generate_device != "cpu" or place.prefill_device != place.layer_device:
            continue
        nbytes = operator.streamed_nbytes(source)
        if nbytes is not None:
            found.setdefault(place.layer_device, []).append(_Candidate(entry.key, operator, *nbytes))
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
        return replace(plan, extra_bytes=extra), ()
    slots = {key: (count, one) for one in kept for key, count in one.slots.items()}

    def noted(key: str, note: str) -> str:
        if key not in slots:
            return note
        count, one = slots[key]
        return "; ".join(part for part in (f"{count} of {one.num_experts} hot on {one.device}", note) if part)

    entries = tuple(replace(entry, note=noted(entry.key, entry.note)) for entry in plan.entries)
    extra[HOT_EXPERTS] = {one.device: one.nbytes for one in kept}
    return replace(plan, entries=entries, extra_bytes=extra), tuple(kept)

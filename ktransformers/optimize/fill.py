"""Fills what is left of the GPUs' memory with routed experts, when no rule file of the user's says where they go.

Experts are most of a model's bytes, and reading them bounds decoding: a layer whose experts are on its own GPU costs no
memory traffic on the CPU and no hand-over. Layers are taken from the last one backwards. Reads headers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.plan import Plan, format_bytes
from ktransformers.weights.source import WeightSource

__all__ = ["Filling", "experts_for_gpus"]


@dataclass(frozen=True, slots=True)
class Filling:
    """Experts moved to what was left of the GPUs. moved: {experts module: device}. candidates: layers whose experts
    could move. left: {device: bytes} after it, of what it was made for.
    """

    moved: Mapping[str, str] = field(default_factory=dict)
    candidates: int = 0
    left: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_all(self) -> bool:
        """Whether all experts that could move do."""
        return len(self.moved) == self.candidates

    def __str__(self) -> str:
        spare = ", ".join(f"{format_bytes(max(n, 0))} of {device}" for device, n in self.left.items())
        return f"the experts of {len(self.moved)} of {self.candidates} layers go to the GPU; {spare} are left"


def experts_for_gpus(plan: Plan, source: WeightSource, most: Mapping[str, int] | None = None) -> Filling:
    """Return the experts that still fit beside what `plan` holds, cache and workspace included.

    most: layers on each device at most, by its name; all that fit where it says nothing.
    """
    total = plan.total_bytes
    left = {device: free - total.get(device, 0) for device, free in plan.capacity.items() if device != "cpu"}
    chosen: dict[str, str] = {}
    full: set[str] = set()
    candidates = 0
    for entry in reversed(plan.entries):
        operator, layer_device = plan.operators.get(entry.key), entry.placement.layer_device
        if not isinstance(operator, KTransformersExperts) or entry.placement.generate_device != "cpu":
            continue
        nbytes = operator.gpu_nbytes(source)
        if layer_device not in left or nbytes is None:
            continue
        candidates += 1
        count = list(chosen.values()).count(layer_device)
        if nbytes > left[layer_device] or count == (most or {}).get(layer_device):
            full.add(layer_device)
        if layer_device not in full:
            left[layer_device] -= nbytes
            chosen[entry.key] = layer_device
    return Filling(chosen, candidates, left)

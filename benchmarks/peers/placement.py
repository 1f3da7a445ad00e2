"""Where our plan has what a peer then has in the same places."""

from __future__ import annotations

from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.decode_bound import layer_of
from ktransformers.optimize.plan import Plan

__all__ = ["cpu_expert_layers"]


def cpu_expert_layers(plan: Plan) -> list[int] | None:
    """Layers whose routed experts lie in RAM, of a plan that has something on a GPU; None for the CPU alone."""
    if all(device == "cpu" for device, nbytes in plan.total_bytes.items() if nbytes):
        return None
    experts = [entry for entry in plan.entries if isinstance(plan.operators.get(entry.key), KTransformersExperts)]
    in_ram = [entry for entry in experts if entry.nbytes.get("cpu", 0) > entry.total_bytes // 2]
    return sorted(layer for entry in in_ram if (layer := layer_of(entry)) >= 0)

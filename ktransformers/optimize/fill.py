"""Fills what is left of the GPUs' memory with routed experts, when no rule file of the user's says where they go.

Experts are most of a model's bytes, and reading them bounds decoding: a layer whose experts are on its own GPU costs no
memory traffic on the CPU and no hand-over. Layers are taken from the last one backwards. Reads headers only.
"""

from __future__ import annotations

import logging

from ktransformers.operators.experts import KTransformersExperts
from ktransformers.optimize.plan import Plan, format_bytes
from ktransformers.weights.source import WeightSource

__all__ = ["experts_for_gpus"]

logger = logging.getLogger(__name__)


def experts_for_gpus(plan: Plan, source: WeightSource) -> dict[str, str]:
    """{experts module: device} of what still fits beside what `plan` holds, cache and workspace included."""
    total = plan.total_bytes
    left = {device: free - total.get(device, 0) for device, free in plan.capacity.items() if device != "cpu"}
    chosen: dict[str, str] = {}
    full: set[str] = set()
    candidates = 0
    for entry in reversed(plan.entries):
        operator, home = plan.operators.get(entry.key), plan.home_of(entry.key)
        if not isinstance(operator, KTransformersExperts) or entry.placement.generate_device != "cpu":
            continue
        nbytes = operator.gpu_nbytes(source)
        if home not in left or nbytes is None:
            continue
        candidates += 1
        if nbytes > left[home]:
            full.add(home)
        if home not in full:
            left[home] -= nbytes
            chosen[entry.key] = home
    if chosen:
        spare = ", ".join(f"{format_bytes(max(n, 0))} of {device}" for device, n in left.items())
        logger.info("the experts of %d of %d layers go to the GPU; %s are left", len(chosen), candidates, spare)
    return chosen

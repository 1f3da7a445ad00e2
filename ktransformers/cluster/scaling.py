"""Decides how many replicas there should be, by what waits in front of them and runs in them. Knows Ray Serve's words
only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["QueuePolicy"]


class _Context(Protocol):
    """What of ray.serve.config.AutoscalingContext is read."""

    target_num_replicas: int
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None


class QueuePolicy:
    """The policy that wants as many replicas as have `target` answers to do each. Bounds, delays and factors are
    autoscaling_config's.

    Answers that are suspended do not count: nothing computes them.
    """

    def __init__(self, target: float):
        self._target = target

    def __call__(self, context: _Context) -> tuple[int, dict[str, Any]]:
        """Replicas that are wanted, and no state. As many as now while no replica has said anything."""
        queued = (context.aggregated_metrics or {}).get("num_queued")
        if not queued:
            return context.target_num_replicas, {}
        return math.ceil(sum(queued.values()) / self._target), {}

"""How many replicas are wanted."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from ktransformers.cluster.scaling import QueuePolicy


@dataclass
class Context:
    target_num_replicas: int = 2
    aggregated_metrics: dict[str, dict[str, float]] | None = field(default_factory=dict)


@pytest.mark.parametrize(
    ("queued", "wanted"), [((0.0, 0.0), 0), ((16.0, 0.0), 1), ((16.0, 1.0), 2), ((40.0, 40.0), 5), ((), 2)]
)
def test_one_replica_for_so_many_answers(queued: tuple[float, ...], wanted: int) -> None:
    metrics = {"num_queued": {f"r{number}": value for number, value in enumerate(queued)}}
    assert QueuePolicy(16.0)(Context(aggregated_metrics=metrics)) == (wanted, {})


def test_without_any_word_nothing_changes() -> None:
    assert QueuePolicy(16.0)(Context(aggregated_metrics=None)) == (2, {})

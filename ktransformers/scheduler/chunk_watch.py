"""Notes when steps compute the chunks of prompts, for traces. The scheduler process asks; nothing here changes what it
does.

planned ──> in flight ──> finished            steps in the order of their ids, two of them in flight at most
                └──────> lost, with the engine
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ktransformers.scheduler.commands import ChunkTrace, Traces
from ktransformers.scheduler.records import StepPlan

__all__ = ["ChunkWatch"]


@dataclass(frozen=True, slots=True)
class _Step:
    """planned: seconds. rows: (request, first position, tokens) of its chunks."""

    step_id: int
    planned: float
    num_tokens: int
    rows: Sequence[tuple[str, int, int]]


class ChunkWatch:
    """Times of the chunks that steps compute: of running requests, of steps in flight, and those not sent yet."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[str, int]] = {}  # that are not through: the request, tokens known at the start
        self._steps: deque[_Step] = deque()
        self._free_at = 0.0  # when the engine finished a step last
        self._planned: list[tuple[str, float]] = []
        self._chunks: list[ChunkTrace] = []

    def planned(self, plan: StepPlan, now: float) -> None:
        """Note a step that goes to the engine."""
        for start in plan.starts:
            self._runs[start.run_id] = (start.request_id, len(start.token_ids))
            self._planned.append((start.request_id, now))
        rows = []
        for row in plan.rows:
            known = self._runs.get(row.run_id)
            if known is None:
                continue
            request_id, known_len = known
            rows.append((request_id, row.start, row.num_tokens))
            if row.start + row.num_tokens >= known_len:
                del self._runs[row.run_id]
        for run_id in plan.ended:
            self._runs.pop(run_id, None)
        self._steps.append(_Step(plan.step_id, now, plan.num_tokens, rows))

    def finished(self, step_id: int, now: float) -> None:
        """Note a step whose result is here. The step began when it was planned, or when the one before it was
        finished.
        """
        while self._steps and self._steps[0].step_id <= step_id:
            step = self._steps.popleft()
            began = max(step.planned, self._free_at)
            for request_id, position, num_tokens in step.rows:
                self._chunks.append(ChunkTrace(request_id, began, now, position, num_tokens, step.num_tokens))
        self._free_at = now

    def lost(self) -> None:
        """Drop the steps in flight and the runs: the engine is gone."""
        self._steps.clear()
        self._runs.clear()

    def take(self) -> Traces | None:
        """Return the times that are new since the last call; None: nothing."""
        if not self._planned and not self._chunks:
            return None
        taken = Traces(self._planned, self._chunks)
        self._planned, self._chunks = [], []
        return taken

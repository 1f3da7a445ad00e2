"""Steps of a drafter that the engine runs: how many rows each had, and whether it was replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ktransformers.engine.drafting.drafter import ModelDrafter
from ktransformers.engine.load.builder import Engine
from ktransformers.engine.sampling.logits_request import StepLogits
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.scheduler.drafting.account import Account
from ktransformers.scheduler.drafting.planner import DraftPlanner
from ktransformers.scheduler.drafting.prompt_lookup import PromptLookup
from ktransformers.scheduler.drafting.row_costs import RowCosts

__all__ = ["DrafterSteps", "draft_in_every_step", "equal_steps", "runner_of"]


def equal_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps count as taking the same whatever their rows, and nothing rests: as many tokens are drafted as are likely
    to be right at all, on any machine and however busy it is."""
    add = RowCosts.add
    monkeypatch.setattr(RowCosts, "add", lambda self, rows, seconds, **kinds: add(self, rows, 1.0, **kinds))
    monkeypatch.setattr(Account, "is_awake", lambda self, now: True)


def draft_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as may be, by the drafter alone, however few are right and whatever that takes."""
    equal_steps(monkeypatch)
    monkeypatch.setattr(PromptLookup, "chances", lambda self, most: ())  # nothing is copied

    def counts(
        self: DraftPlanner, chances: Sequence[tuple[float, ...]], costly: Sequence[bool]
    ) -> tuple[list[int], float]:
        return [len(one) * self._costs.knows(len(chances)) for one in chances], 1.0

    monkeypatch.setattr(DraftPlanner, "_counts", counts)


def runner_of(engine: Engine) -> ModelRunner:
    """The runner of the engine's drafter."""
    drafter = engine.executor.drafter
    assert isinstance(drafter, ModelDrafter)
    runner: ModelRunner = drafter._forward._steps._runner  # type: ignore[attr-defined]
    return runner


class DrafterSteps:
    """num_replays: counts what all graphs of the process have replayed so far. seen: (rows, whether it was replayed,
    what was requested of its logits) of each step. num_held: how many were launched before their tokens were known."""

    def __init__(self, engine: Engine, num_replays: Callable[[], int], monkeypatch: pytest.MonkeyPatch):
        self.seen: list[tuple[int, bool, list[int]]] = []
        self.num_held = 0
        runner = runner_of(engine)
        step, launch_held = runner.reduced_step, runner.launch_held
        launched_before = [0]  # of the step to come

        def held(batch: ForwardBatch) -> bool:
            is_held = launch_held(batch)
            launched_before[0] = int(is_held)
            self.num_held += is_held
            return is_held

        def watched(batch: ForwardBatch, needs: Sequence[int] | None) -> StepLogits:
            before, launched_before[0] = num_replays() - launched_before[0], 0
            logits = step(batch, needs)
            self.seen.append((len(batch), num_replays() - launched_before[0] > before, list(needs or ())))
            return logits

        monkeypatch.setattr(runner, "reduced_step", watched)
        monkeypatch.setattr(runner, "launch_held", held)

"""How many draft tokens pay, for times and chances that are given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.drafting import planner
from ktransformers.scheduler.drafting.planner import DraftPlanner
from ktransformers.scheduler.drafting.prompt_lookup import PromptLookup
from ktransformers.scheduler.records import StepResult
from ktransformers.scheduler.scheduler import Scheduler
from tests.support.servers.fake_engine import Loop, make_config, make_request, next_token

REPEATED = [1, 2, 3, 4, 5, 6, 7, 8] * 3


class Timed(Loop):
    """A loop whose steps take what `seconds` says of their rows, and looking for draft tokens per_look. looks: the
    steps that were planned with looking."""

    seconds: Callable[[int], float] = staticmethod(lambda rows: 1.0)
    per_look = 0.0

    def __init__(self, config: SchedulerConfig):
        super().__init__(config)
        self._now, self.looks = 0.0, list[int]()
        self.planner = self.scheduler._drafts = DraftPlanner(config, self._clock)

    def _clock(self) -> float:
        """Whoever looks at it before and behind looking sees that pass."""
        self._now += self.per_look
        return self._now

    def commit(self):  # type: ignore[no-untyped-def]
        (step,) = [step for step in self.scheduler._in_flight if step.step_id == self.results[0][0]]
        step_id, results, tiers = self.results.pop(0)
        if step.look_seconds:
            self.looks.append(step_id)
        updates = self.scheduler.commit(
            StepResult(step_id=step_id, results=results, tiers=tiers), self.seconds(step.num_rows) + step.look_seconds
        )
        for update in updates:
            self.hear(update)
        return updates


def drafted(seconds: Callable[[int], float], num_streams: int = 1, max_tokens: int = 300) -> tuple[int, int, float]:
    """(draft tokens, tokens, seconds of all steps) of streams that repeat themselves."""
    loop = Timed(make_config(num_pages=2000, chunk_size=256, max_batch_size=16, max_drafts=7))
    loop.seconds, total = seconds, 0.0  # type: ignore[method-assign]
    for i in range(num_streams):
        loop.add(make_request(f"r{i}", REPEATED, max_tokens, ignore_eos=True, seed=2 * i + 2))
    while loop.scheduler.has_work:
        loop.schedule()
        total += seconds(loop.scheduler._in_flight[0].num_rows)
        loop.commit()
    loop.check_answers()
    return loop.scheduler.stats().num_drafted, max_tokens * num_streams, total


def test_where_rows_cost_nothing_many_are_drafted() -> None:
    num_drafted, num_tokens, total = drafted(lambda rows: 1.0)
    assert num_drafted > 100
    assert total < 0.7 * num_tokens


def test_where_each_row_costs_a_step_none_are() -> None:
    """But for some that find that out, at most one in a hundred steps."""
    num_drafted, num_tokens, total = drafted(lambda rows: float(rows))
    assert num_drafted <= 7
    assert total <= 1.01 * num_tokens + 24  # the prompt


@pytest.mark.every(3)
@pytest.mark.parametrize("second", [1.2, 1.5, 1.75, 2.0])
def test_drafting_is_never_slower_by_more_than_a_hundredth(second: float) -> None:
    _, num_tokens, total = drafted(lambda rows: 1.0 + (second - 1) * (min(rows, 8) - 1), max_tokens=1000)
    assert total <= 1.01 * num_tokens + 30


def test_at_sixteen_streams_that_fill_the_processor_it_is_off() -> None:
    num_drafted, num_tokens, total = drafted(float, num_streams=16, max_tokens=200)
    assert num_drafted <= 192
    assert total <= 1.01 * num_tokens + 16 * 24


def test_nothing_is_looked_up_where_nothing_may_be_drafted() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("a", REPEATED))
    assert scheduler.schedule() is not None
    assert scheduler._requests["a"].drafter is None


def watched(
    monkeypatch: pytest.MonkeyPatch, drafter: type[PromptLookup], per_look: float, max_tokens: int, seed: int = 5
) -> Timed:
    """One answer, without any step ahead of the one in flight, of which each plain step takes a second."""
    monkeypatch.setattr(planner, "PromptLookup", drafter)
    loop = Timed(make_config(num_pages=2000, chunk_size=256, max_drafts=7))
    loop.seconds, loop.per_look = lambda rows: 0.9 + 0.1 * rows, per_look  # type: ignore[method-assign]
    loop.add(make_request("r", range(20), max_tokens, ignore_eos=True, seed=seed))
    while loop.scheduler.has_work:
        loop.schedule()
        loop.commit()
        if loop.planner._costs.knows(1):
            assert loop.planner._costs.seconds(1) == pytest.approx(1.0)  # plain steps are not charged with looking
    loop.check_answers()
    return loop


def test_plain_steps_are_those_in_which_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking takes a quarter of a step: with it, each would seem to take 1.25 seconds. See `watched`. An account that
    never gains rests longer each time: 0.247 are 0.048 of 6 steps, 0.024 of 11, and so on; and one step for itself."""
    loop = watched(monkeypatch, Hopeless, 0.25, 450)
    rests = [after - before for before, after in pairwise(loop.looks) if after - before > 1]
    assert rests[1:7] == [7, 12, 22, 43, 84, 84]
    assert 0.25 * len([step for step in loop.looks if step > 180]) <= 0.003 * 300


def test_what_begins_to_pay_is_looked_at_in_every_step_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that repeats itself, whose repetitions nobody sees before its 250th token."""
    loop = watched(monkeypatch, Late, 0.25, 440, seed=2)
    first = next(step for step in loop.looks if step >= 250)
    assert first <= 250 + 84  # behind the longest rest that looking has
    behind = [step for step in loop.looks if step >= first]
    last = loop.scheduler._next_step - 1
    assert len(behind) >= 0.8 * (last - first)
    assert last < 440 - 30  # and drafts were right


def test_where_looking_takes_next_to_nothing_nobody_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = watched(monkeypatch, Hopeless, 0.002, 200)
    assert len(loop.looks) > 190  # but for some plain steps


def test_a_step_in_which_all_rest_looks_at_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = watched(monkeypatch, Hopeless, 0.25, 100)
    planner, seq = loop.planner, object()  # it would fail with that
    planner._rests_until = planner._num_steps + 3
    assert list(planner.drafts([seq, seq], [])) == [(), ()]
    assert planner.awaits_tokens([seq], [seq], []) is False
    before = vars(planner._costs).copy()
    planner.add_step(None, 1.0)  # nor at what was in the step
    assert vars(planner._costs) == before


def test_what_one_answer_gains_is_not_taken_from_fifteen_others() -> None:
    """One repeats itself beside others that do not, where a further row costs what each of the first ones does."""
    loop = Timed(make_config(num_pages=4000, chunk_size=256, max_batch_size=16, max_drafts=7))
    loop.seconds, total, num_steps = lambda rows: 1.0 + 0.5 * rows, 0.0, 0  # type: ignore[method-assign]
    for i in range(16):
        prompt = [*range(20)] if i else REPEATED
        loop.add(make_request(f"r{i}", prompt, 200, ignore_eos=True, seed=2 * i + 1 if i else 2))
    while len(loop.last) < 15 and loop.scheduler.has_work:
        loop.schedule()
        step = loop.scheduler._in_flight[0]
        if len(step.rows) == 16 and all(row.is_decode for row in step.rows):
            total, num_steps = total + loop.seconds(step.num_rows), num_steps + 1
        loop.commit()
    assert num_steps > 50
    assert total <= 1.03 * num_steps * loop.seconds(16)


def planned_ahead(lost: float, second: float, seed: int, max_tokens: int = 300) -> tuple[int, float]:
    """(draft tokens, seconds) of an answer whose steps are planned ahead: one that is not takes `lost` more. A step
    without draft tokens takes 1.0."""
    loop = Timed(make_config(num_pages=2000, chunk_size=256, max_batch_size=16, max_drafts=7))
    loop.add(make_request("r", REPEATED, max_tokens, ignore_eos=True, seed=seed))
    total, flying = 0.0, loop.scheduler._in_flight
    while loop.scheduler.has_work:
        while len(flying) < 2 and loop.schedule() is not None:
            pass
        step = flying[0]
        seconds = 1.0 + (second - 1) * (min(step.num_rows, 8) - 1) + (0.0 if step.is_ahead else lost)
        loop.seconds = lambda rows, took=seconds: took  # type: ignore[misc]
        total += seconds
        loop.commit()
    loop.check_answers()
    return loop.scheduler.stats().num_drafted, total


@pytest.mark.every(5)
@pytest.mark.parametrize("seed", [2, 5])
@pytest.mark.parametrize("second", [1.02, 1.2, 1.75])
@pytest.mark.parametrize("lost", [0.1, 0.5, 2.0])
def test_what_is_lost_by_not_planning_ahead_is_no_more_than_draft_tokens_gain(
    lost: float, second: float, seed: int
) -> None:
    """Answers that repeat themselves (even seeds), and one that hardly does."""
    _, total = planned_ahead(lost, second, seed)
    assert total <= 1.01 * 300 + 30


class Hopeless(PromptLookup):
    """Never has a draft."""

    def chances(self, most: int) -> tuple[float, ...]:
        return ()


class Late(PromptLookup):
    """Has none for the first 250 tokens of an answer behind 20 of a prompt."""

    def chances(self, most: int) -> tuple[float, ...]:
        return super().chances(most) if len(self) >= 270 else ()


class Alternating:
    """A Drafter that is right six times of ten behind a wrong draft token, and nine times behind a right one."""

    SEED = 2

    def __init__(self, token_ids: Sequence[int], *args: object) -> None:
        self._ids, self._rng = list(token_ids), random.Random(3)
        self._right = {len(self._ids) - 1: False}

    def __len__(self) -> int:
        return len(self._ids)

    def _is_right(self, at: int) -> bool:
        if at not in self._right:
            self._right[at] = self._rng.random() < self._chance(at)
        return self._right[at]

    def _chance(self, at: int) -> float:
        return 0.9 if self._is_right(at - 1) else 0.6

    def extend(self, token_ids: Sequence[int]) -> None:
        self._ids += token_ids

    def chances(self, most: int) -> tuple[float, ...]:
        first = self._chance(len(self._ids))
        return tuple(first * 0.9**depth for depth in range(most))

    def later(self, most: int) -> tuple[float, tuple[float, ...]]:
        return self._chance(len(self._ids)), tuple(0.9 ** (depth + 1) for depth in range(most))

    def draft(self, most: int) -> list[int]:
        found, ids = list[int](), self._ids.copy()
        for _ in range(most):
            ids.append(next_token(ids, self.SEED))
            found.append(ids[-1] if self._is_right(len(ids) - 1) else ids[-1] + 1)
        return found


def test_draft_tokens_that_pay_are_run_though_nothing_is_planned_ahead_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that loses nearly half a step each time."""
    monkeypatch.setattr(planner, "PromptLookup", Alternating)
    for lost, most in ((0.1, 260), (0.4, 285)):
        num_drafted, total = planned_ahead(lost, 1.5, Alternating.SEED)
        assert num_drafted > 100
        assert total < most

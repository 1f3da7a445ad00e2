"""Draft tokens that the engine finds: the scheduler says how many, by how many were right and what they cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import pytest

from ktransformers.core import AnswerEnd
from ktransformers.scheduler.batch import PlannedRow, PlannedStep
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.drafting.acceptance import AcceptanceRates
from ktransformers.scheduler.drafting.engine_drafts import EngineDrafts
from ktransformers.scheduler.drafting.prompt_lookup import PromptLookup
from ktransformers.scheduler.drafting.row_costs import DraftCost
from ktransformers.scheduler.records import UNKNOWN, StepResult
from ktransformers.scheduler.sequence import Sequence as DraftedSequence
from tests.support.servers.fake_engine import (
    VOCAB_SIZE,
    FakeEngine,
    Loop,
    answer_alone,
    make_config,
    make_request,
    next_token,
    stir,
)


class Guessing(Loop):
    """A loop whose engine drafts tokens of which `share` are right, and whose steps take what is said of them.

    per_pass: what drafting takes for each draft token, or for all where they are a block. catch_up: what it takes
    longer behind a step without drafts. per_shown: what showing its drafter a token takes.
    """

    share = 1.0
    seconds: Callable[[int], float] = staticmethod(lambda rows: 1.0)
    per_draft = per_pass = catch_up = per_shown = 0.0
    total = 0.0
    has_drafted = False

    def __init__(self, config: SchedulerConfig):
        super().__init__(config)
        self.rng, self.shown = random.Random(1), list[bool]()
        self.watch(self.engine)

    def watch(self, engine: FakeEngine) -> None:
        engine.guess = self.guess

    def seconds_of(self, step: PlannedStep) -> tuple[float, float, float]:
        """All of it, and what of that finding its draft tokens took, and showing its drafter what was computed."""
        found = [len(row.drafts) for row in step.rows if UNKNOWN in row.drafts]
        longest = max(found, default=0)
        passes = min(longest, 1) if self.scheduler.config.drafts_in_block else longest
        draft_seconds = (
            self.per_draft * longest + self.per_pass * passes + self.catch_up * (bool(found) and not self.has_drafted)
        )
        observe_seconds = self.per_shown * (step.num_rows - step.num_drafted) * self.shown.pop(0)
        return self.seconds(step.num_rows) + draft_seconds + observe_seconds, draft_seconds, observe_seconds

    def guess(self, token_ids: Sequence[int], seed: int | None) -> int:
        token = next_token(token_ids, seed)
        return token if self.rng.random() < self.share else (token + 1) % VOCAB_SIZE

    def schedule(self):  # type: ignore[no-untyped-def]
        plan = super().schedule()
        if plan is not None:
            self.shown.append(plan.is_observed)
        return plan

    def commit(self):  # type: ignore[no-untyped-def]
        elapsed, draft_seconds, observe_seconds = self.seconds_of(self.scheduler._in_flight[0])
        self.total += elapsed
        self.has_drafted = draft_seconds > 0
        step_id, results, tiers = self.results.pop(0)
        seconds = {"seconds": elapsed, "draft_seconds": draft_seconds, "observe_seconds": observe_seconds}
        result = StepResult(step_id=step_id, results=results, tiers=tiers, **seconds)
        updates = self.scheduler.commit(result, elapsed)
        self.scheduler.check_integrity()
        for update in updates:
            self.hear(update)
        return updates


def guessing(max_drafts: int = 4, **changes: object) -> Guessing:
    values = {"num_pages": 600, "chunk_size": 64, "max_drafts": max_drafts, "drafter": "draft"}
    return Guessing(make_config(**(values | changes)))


def run(loop: Guessing, num_streams: int = 1, max_tokens: int = 300) -> Guessing:
    for i in range(num_streams):
        loop.add(make_request(f"r{i}", range(5, 15), max_tokens, ignore_eos=True, seed=2 * i + 1))
    loop.drain()
    loop.check_answers()
    return loop


def test_the_plan_says_how_many_and_the_engine_which() -> None:
    loop = guessing()
    loop.add(make_request("a", range(5, 15), 60, ignore_eos=True))
    seen = 0
    while loop.scheduler.has_work:
        plan = loop.schedule()
        assert plan is not None
        for row in plan.rows:
            assert list(row.token_ids).count(UNKNOWN) == row.num_drafts
            seen += row.num_drafts
        loop.commit()
    loop.check_answers()
    stats = loop.scheduler.stats()
    assert stats.num_drafted == seen
    assert stats.num_accepted == loop.engine.num_accepted == 60 - (loop.scheduler._next_step - 1) > 20


def test_right_drafts_are_taken_as_long_as_they_are() -> None:
    loop = run(guessing())
    assert loop.total < 300 / 4.3  # five tokens a step, once that is known


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_wrong_drafts_cost_next_to_nothing(share: float) -> None:
    loop = guessing()
    loop.share, loop.per_draft, loop.seconds = share, 0.1, lambda rows: 0.5 + 0.5 * rows  # type: ignore[method-assign]
    run(loop, max_tokens=900)
    assert loop.total < 1.03 * 900
    assert loop.scheduler.stats().num_drafted >= 6  # tried again now and then


def test_what_a_draft_token_takes_the_engine_counts() -> None:
    """Rows cost nothing here: with drafts that cost next to nothing all are run, with costly ones hardly any."""
    cheap, costly = guessing(), guessing()
    for loop, seconds in ((cheap, 0.02), (costly, 0.9)):
        loop.share, loop.per_draft = 0.7, seconds
        run(loop, max_tokens=500)
    assert cheap.total < 300
    assert costly.total < 520
    assert cheap.scheduler.stats().num_drafted > 10 * costly.scheduler.stats().num_drafted


def test_a_block_of_draft_tokens_costs_as_much_as_one() -> None:
    """Where one pass makes all of them, as many are run as are likely, or none: 0.8 of a step for three more tokens
    pays, and would not pay for each of them."""
    block, single = guessing(drafter="mtp", drafts_in_block=True), guessing(drafter="mtp")
    for loop in (block, single):
        loop.share, loop.per_pass = 0.9, 0.8
        run(loop, max_tokens=500)
    assert block.total < 0.62 * 500
    assert single.total > 0.85 * 500
    wrong = guessing(drafter="mtp", drafts_in_block=True)
    wrong.share, wrong.per_pass = 0.1, 0.8
    assert run(wrong, max_tokens=500).total < 1.04 * 500


def test_what_the_text_says_already_is_copied() -> None:
    """Of a request with its own answer as the prediction, the engine is hardly asked for tokens: it is right less
    often."""
    loop, asked = guessing(), 0

    def guess(token_ids: Sequence[int], seed: int | None) -> int:
        nonlocal asked
        asked += 1
        return Guessing.guess(loop, token_ids, seed)

    loop.share, loop.engine.guess = 0.5, guess
    request = make_request("a", range(5, 15), 200, ignore_eos=True, seed=5)
    answer, _ = answer_alone(request, loop.config)
    loop.add(msgspec.structs.replace(request, prediction_ids=[*range(10, 15), *answer]))
    loop.drain()
    loop.check_answers()
    assert loop.scheduler.stats().num_accepted > 130
    assert asked < 40


def test_copies_cost_the_engine_nothing() -> None:
    """Where its drafts would never pay, those from the text still do."""
    loop = guessing()
    loop.per_draft, loop.seconds = 5.0, lambda rows: 1.0  # type: ignore[method-assign]
    request = make_request("a", range(5, 15), 200, ignore_eos=True, seed=5)
    answer, _ = answer_alone(request, loop.config)
    loop.add(msgspec.structs.replace(request, prediction_ids=[*range(10, 15), *answer]))
    loop.drain()
    loop.check_answers()
    assert loop.total < 100


CONFIGS = {
    "pages": make_config(num_pages=24, page_size=4, chunk_size=16, max_drafts=5, drafter="draft"),
    "few pages": make_config(num_pages=12, page_size=4, chunk_size=16, max_drafts=5, drafter="draft"),
    "states": make_config(num_pages=40, chunk_size=16, max_drafts=3, num_states=24, snapshot_align=8, drafter="draft"),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_drafts_of_the_engine_change_no_answer(name: str, seed: int) -> None:
    """Requests come and go, are preempted, suspended and resumed, and the engine dies."""
    rng, loop = random.Random(seed), Guessing(CONFIGS[name])
    loop.share = 0.7
    for i in range(12):
        loop.add(make_request(f"r{i}", range(8), rng.randrange(1, 30), ignore_eos=rng.random() < 0.5, seed=i))
        stir(loop, rng)
        if rng.random() < 0.1:
            loop.crash()
            loop.watch(loop.engine)
    loop.drain()
    loop.check_answers()
    assert loop.scheduler.stats().num_accepted > 0


def test_rates_have_two_keys() -> None:
    rates = AcceptanceRates(2, 3)
    assert rates.chances(0, 2) == (0.6, 0.36)
    for _ in range(2000):
        rates.add(0, True, 0)
        rates.add(0, False, 1)
        rates.add(5, True, 7)  # as the largest keys there are
    first, second = rates.chances(0, 2)
    assert first > 0.98
    assert second < 0.02
    assert rates.chances(1, 1) == (0.6,)
    assert rates.chances(2, 4)[3] == pytest.approx(0.6**3, rel=0.01)


def test_what_was_not_tried_for_long_is_doubted() -> None:
    rates = AcceptanceRates(2, 3)
    for _ in range(500):
        rates.add(0, False)
    for _ in range(20):
        rates.add(0, True)
    assert rates.chances(0, 1)[0] < 0.1
    rates.doubt()
    for _ in range(20):
        rates.add(0, True)
    assert rates.chances(0, 1)[0] > 0.7


def sequence() -> DraftedSequence:
    request = make_request("a", range(10))
    return DraftedSequence(request=request, arrival=0, params=request.params, end=AnswerEnd.of(request.params, (), 9))


def test_a_sequence_learns_by_its_streak() -> None:
    drafts, seq = EngineDrafts(make_config(max_drafts=4, drafter="mtp")), sequence()
    drafts.took(seq, 3, 3, is_cut=False)
    assert seq.streak == 3
    drafts.took(seq, 3, 1, is_cut=True)  # the end: nobody looked at the others
    assert seq.streak == 4
    before = drafts.chances(seq, 2)
    drafts.took(seq, 3, 1, is_cut=False)
    assert seq.streak == 0
    seq.streak = 4
    after = drafts.chances(seq, 2)
    assert after[0] > before[0]
    assert after[1] < before[1]


def step_of(*drafts: list[int]) -> PlannedStep:
    rows = tuple(
        PlannedRow(sequence(), None, 20, 21 + len(one), True, drafts=tuple(one))  # type: ignore[arg-type]
        for one in drafts
    )
    return PlannedStep(1, rows, len(rows), sum(map(len, drafts)))


def test_what_the_layer_takes_is_paid_by_the_step_or_spread() -> None:
    """Finding two tokens takes 2 seconds each. What it takes longer behind other steps, and prompts, is spread over
    128 steps."""
    drafts, two = EngineDrafts(make_config(max_drafts=4, drafter="mtp")), step_of([UNKNOWN, UNKNOWN], [5, 6, 7])
    assert drafts.add_decode(two, 4.0, 0.5) == (4.5, 4.5)
    assert drafts.add_decode(step_of([]), 0.0, 0.5) == (0.5, 0.5)  # shown
    assert drafts.add_decode(two, 4.0 + 12.8, 0.0) == (16.8, pytest.approx(4.0 + 0.1))
    drafts.add_prompt(128.0)
    assert drafts.add_decode(step_of([5]), 0.0, 0.0) == (0.0, pytest.approx(12.7 / 128 + 1.0))


def test_showing_a_model_of_its_own_is_paid_by_nobody() -> None:
    """It is shown all steps, whether it drafts or not: so does a plain step take that."""
    drafts = EngineDrafts(make_config(max_drafts=4, drafter="draft"))
    drafts.add_prompt(128.0)
    assert drafts.add_decode(step_of([UNKNOWN]), 2.0, 0.5) == (2.0, 2.0)


def test_a_layer_that_rests_is_shown_the_last_steps_before_it_is_tried_again() -> None:
    layer, model = (EngineDrafts(make_config(max_drafts=4, drafter=name)) for name in ("mtp", "draft"))
    for drafts in (layer, model):
        drafts.account.spend(2.0)
        assert not drafts.is_awake(100)
    wakes_at = layer.account.wakes_at
    assert [now for now in range(100, wakes_at + 3) if layer.is_observed(now)] == [*range(wakes_at - 4, wakes_at + 3)]
    assert all(model.is_observed(now) for now in range(100, wakes_at))
    assert (layer.observed_from, model.observed_from) == (wakes_at - 4, model.account.wakes_at)  # nothing to do before


def test_what_was_learnt_before_a_rest_counts_for_little_behind_it() -> None:
    drafts, seq = EngineDrafts(make_config(max_drafts=4, drafter="mtp")), sequence()
    for _ in range(200):
        drafts.took(seq, 1, 0, is_cut=False)
    assert drafts.chances(seq, 1)[0] < 0.05
    drafts.account.spend(2.0)
    assert not drafts.is_awake(0)
    assert drafts.is_awake(drafts.account.wakes_at)
    drafts.took(seq, 1, 1, is_cut=False)
    seq.streak = 0
    assert drafts.chances(seq, 1)[0] > 0.11


def test_the_median_of_a_draft_tokens_seconds_counts() -> None:
    cost = DraftCost()
    assert cost.seconds == 0
    for depth, seconds in ((1, 1.0), (4, 8.0), (2, 1000.0)):
        cost.add(depth, seconds)
    assert cost.seconds == 2.0


def test_what_was_waiting_is_no_cost_of_a_draft_token() -> None:
    """It says the most of that, and nothing where this is not known."""
    cost = DraftCost()
    cost.add(1, 50.0, is_behind=True)
    assert cost.seconds == 0
    cost.add(2, 4.0)
    cost.add(1, 50.0, is_behind=True)
    assert cost.seconds == 2.0
    cost.add(1, 1.0, is_behind=True)
    assert cost.seconds == 1.5


def test_a_drafter_that_is_late_at_first_drafts_all_the_same() -> None:
    """Its first step runs the prompt's end, which takes as long as many steps."""
    loop = guessing()
    loop.per_draft, loop.catch_up = 0.1, 20.0
    run(loop)
    assert loop.total < 0.5 * 300


def test_sequences_that_may_have_no_drafts_are_planned_ahead_for_ever() -> None:
    """However long the engine has not drafted: there is nothing that could be tried."""
    loop = guessing()
    loop.add(make_request("a", range(8), 300, ignore_eos=True, max_drafts=0))
    awaited = 0
    planner = loop.scheduler._drafts
    asked = planner.awaits_tokens

    def counted(*args):  # type: ignore[no-untyped-def]
        nonlocal awaited
        found = asked(*args)
        awaited += found
        return found

    planner.awaits_tokens = counted  # type: ignore[method-assign]
    loop.drain()
    assert awaited == 0


def answered(per_shown: float) -> tuple[Guessing, float]:
    """Short answers behind long prompts, one after the other, all of which an MTP layer is shown while it drafts, and
    the seconds of the last half of them."""
    loop, half = guessing(drafter="mtp"), 0.0
    loop.scheduler.check_integrity = lambda: None  # type: ignore[method-assign]  # which takes most of the time
    loop.share, loop.per_draft, loop.per_shown = 0.6, 0.1, per_shown
    for i in range(40):
        loop.add(
            make_request(f"r{i}", [(5 + i + 3 * at) % VOCAB_SIZE for at in range(128)], 20, ignore_eos=True, seed=i)
        )
        loop.drain()
        half = loop.total if i == 19 else half
    loop.check_answers()
    return loop, loop.total - half


def test_what_keeping_a_layer_up_to_date_takes_is_counted() -> None:
    """It drafts where that gains more than showing it prompts takes, and is shown next to nothing where it does not."""
    plain = 40 * (2 + 19)  # steps of a second: each prompt is two
    cheap, _ = answered(0.02)
    costly, late = answered(0.2)
    assert cheap.total < 0.85 * plain
    assert costly.total < 1.4 * plain  # where all prompts are shown, that is 40 * 128 * 0.2 = 1.2 times as much
    assert late < 1.1 * plain / 2
    assert costly.scheduler.stats().num_drafted < cheap.scheduler.stats().num_drafted / 2


def test_drafts_that_begin_to_be_right_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It rests ever longer while its tokens are wrong, and is tried again then. A try takes half a plain step."""
    monkeypatch.setattr(PromptLookup, "chances", lambda self, most: ())
    loop = guessing(max_drafts=1)
    monkeypatch.setattr(loop.scheduler, "check_integrity", lambda: None)
    loop.share, loop.per_draft, loop.seconds = 0.0, 0.25, lambda rows: 0.75 + 0.25 * rows  # type: ignore[method-assign]
    loop.add(make_request("a", range(5, 15), 800, ignore_eos=True, seed=1))
    drafted, num_steps = list[int](), 0
    while loop.scheduler.has_work:
        plan = loop.schedule()
        assert plan is not None
        if plan.rows[0].num_drafts:
            drafted.append(num_steps)
        loop.commit()
        num_steps += 1
        loop.share = float(num_steps >= 350)
    loop.check_answers()
    tries = [step for step in drafted if step < 350]
    rests = [after - before for before, after in pairwise(tries) if after - before > 2]
    assert len(rests) >= 3
    assert all(after >= 1.8 * before for before, after in pairwise(rests))
    assert len(tries) < 8
    behind = [step for step in drafted if step >= 350]
    assert behind[0] <= 350 + 170  # 0.5 are 0.003 of 166 steps
    assert len(behind) > 0.8 * (num_steps - behind[0])
    assert num_steps < 800 - 100

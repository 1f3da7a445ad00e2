"""Each promise of the scheduler on its own, with plans worked out by hand: page_size 4, chunk_size 8 unless said."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from ktransformers.core import FinishReason, SamplingParams, TokenLogprobs
from ktransformers.errors import ConfigError, ContextLengthError
from ktransformers.scheduler.page_tables import WORTH_WAITING
from ktransformers.scheduler.records import Request, RowResult, StepPlan, StepResult
from ktransformers.scheduler.scheduler import Scheduler
from tests.support.servers.fake_engine import EOS, Loop, answer_alone, make_config, make_request, next_token


def shape(plan: StepPlan | None) -> list[tuple[int, int, bool]]:
    """(first position, tokens, sampled) of each row."""
    assert plan is not None
    return [(row.start, row.num_tokens, row.is_sampled) for row in plan.rows]


def long_request(request_id: str, prompt_len: int, max_tokens: int | None = 8, **more: object) -> Request:
    """A prompt that shares nothing with others, and an answer that only a limit ends."""
    first = int(request_id.strip("abcdefghijklmnopqrstuvwxyz") or 0) + 10
    return make_request(request_id, [first] * prompt_len, max_tokens, ignore_eos=True, **more)


# Batches


def test_a_prompt_is_cut_into_chunks_and_decodes_go_first() -> None:
    loop = Loop(make_config(num_pages=32))
    loop.add(long_request("a1", 3), long_request("a2", 18))
    assert shape(loop.schedule()) == [(0, 3, True), (0, 5, False)]
    loop.commit()
    assert shape(loop.schedule()) == [(3, 1, True), (5, 7, False)]
    loop.commit()
    loop.add(long_request("a3", 9))
    assert shape(loop.schedule()) == [(4, 1, True), (12, 6, True), (0, 1, False)]  # the rest goes to the next in line
    loop.commit()
    assert shape(loop.schedule()) == [(5, 1, True), (18, 1, True), (1, 6, False)]
    loop.drain()
    loop.check_answers()


def test_seats_are_limited_by_batch_and_by_chunk() -> None:
    loop = Loop(make_config(num_pages=64, max_batch_size=3))
    loop.add(*(long_request(f"a{i}", 2) for i in range(5)))
    assert len(shape(loop.schedule())) == 3
    loop = Loop(make_config(num_pages=64, max_batch_size=9, chunk_size=4))
    loop.add(
        *(long_request(f"a{i}", 1, max_tokens=50) for i in range(3)), long_request("b9", 12), long_request("b8", 1)
    )
    for position in range(12):  # three decodes leave one token of each step to the prefill: slow, but not starved
        assert shape(loop.schedule())[3:] == [(position, 1, position == 11)]
        loop.commit()
    assert loop.scheduler.stats().num_waiting == 1
    loop.drain()
    loop.check_answers()


def test_priority_orders_the_queue() -> None:
    loop = Loop(make_config(max_batch_size=1))
    loop.add(long_request("a1", 2), long_request("a2", 2, priority=1), long_request("a3", 2, priority=-1))
    order = []
    while loop.scheduler.has_requests:
        loop.schedule()
        order += [update.request_id for update in loop.commit() if update.finish_reason]
    assert order == ["a3", "a1", "a2"]


def test_pages_grow_with_the_sequence() -> None:
    loop = Loop(make_config())
    loop.add(long_request("a1", 3, max_tokens=None))
    used = []
    for _ in range(7):
        loop.schedule()
        used.append(loop.scheduler.stats().num_used_pages)
        loop.commit()
    assert used == [1, 1, 2, 2, 2, 2, 3]  # positions 3, 4 .. 7, 8


# Pipelining


def test_the_next_step_is_planned_with_a_placeholder() -> None:
    loop = Loop(make_config())
    loop.add(long_request("a1", 2), long_request("a2", 3, max_tokens=1), long_request("a3", 2))
    first = loop.schedule()
    assert first is not None
    second = loop.schedule()
    assert second is not None
    assert second.step_id == first.step_id + 1
    # a2's only token is being sampled, so it has no row; a3's token is the third of the first step
    assert [(row.start, row.token_ids, row.token_source) for row in second.rows] == [(2, [], 0), (2, [], 2)]
    assert loop.schedule() is None  # two are in flight
    loop.commit()
    third = loop.schedule()
    assert third is not None
    assert [row.token_source for row in third.rows] == [0, 1]
    loop.drain()
    loop.check_answers()


def test_a_row_too_many_is_discarded() -> None:
    prompt = next([i, j] for i in range(20) for j in range(20) if next_token([i, j], 5) == EOS)
    loop = Loop(make_config())
    loop.add(make_request("a", prompt))
    loop.schedule()
    assert shape(loop.schedule()) == [(2, 1, True)]  # planned before anyone knew of the end token
    (update,) = loop.commit()
    assert (update.token_id, update.finish_reason, update.completion_len) == (EOS, FinishReason.STOP, 1)
    assert loop.scheduler.stats().num_used_pages == 0
    assert loop.commit() == []
    loop.add(make_request("b", [1, 2], max_tokens=1))
    plan = loop.schedule()
    assert plan is not None
    assert plan.ended == [1]  # now the engine may forget the run


def test_commit_checks_what_it_is_given() -> None:
    loop = Loop(make_config())
    with pytest.raises(ValueError, match="not the oldest in flight"):
        loop.scheduler.commit(StepResult(step_id=1, results=[]))
    loop.add(long_request("a1", 2))
    loop.schedule()
    loop.schedule()
    with pytest.raises(ValueError, match="would be step 1"):
        loop.scheduler.commit(StepResult(step_id=2, results=[RowResult(1)]))
    with pytest.raises(ValueError, match="samples 1 tokens, got 0"):
        loop.scheduler.commit(StepResult(step_id=1, results=[]))
    loop.commit()
    loop.drain()
    loop.check_answers()


def test_an_error_of_one_row_ends_one_request() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(long_request("a1", 2))
    scheduler.add(long_request("a2", 2))
    scheduler.schedule()
    logprobs = TokenLogprobs(-0.5, ((4, -0.5),))
    sampled = [RowResult(None, error="logit is nan"), RowResult(4, logprobs)]
    bad, good = scheduler.commit(StepResult(step_id=1, results=sampled))
    assert (bad.request_id, bad.finish_reason, bad.error) == ("a1", FinishReason.ABORT, "logit is nan")
    assert not bad.is_refused
    assert (good.request_id, good.token_id, good.logprobs) == ("a2", 4, logprobs)
    scheduler.check_integrity()


# Pages run out


def test_the_newest_is_preempted_and_goes_on_with_the_same_tokens() -> None:
    loop = Loop(make_config(num_pages=6, has_prefix_cache=False))
    loop.add(*(long_request(f"a{i}", 6, max_tokens=12) for i in (1, 2, 3)))
    preempted: list[str] = []
    while loop.scheduler.has_requests or loop.results:
        before = {seq.request_id for seq in loop.scheduler._running}
        while loop.schedule() is not None:
            pass
        preempted += sorted(before & {seq.request_id for seq in loop.scheduler._waiting})
        loop.commit()
    assert preempted
    assert "a1" not in preempted  # the first in rank always moves
    assert loop.scheduler.stats().num_preemptions == len(preempted)
    loop.check_answers()


def test_low_priority_is_preempted_before_the_newest() -> None:
    loop = Loop(make_config(num_pages=6, has_prefix_cache=False))
    loop.add(long_request("a1", 7, priority=1), long_request("a2", 7))
    loop.schedule()
    loop.commit()
    while loop.scheduler.stats().num_preemptions == 0:
        loop.schedule()
        loop.commit()
        assert loop.scheduler.has_requests, "both fitted: the test is void"
    assert [seq.request_id for seq in loop.scheduler._waiting] == ["a1"]
    loop.drain()
    loop.check_answers()


def test_a_sequence_that_is_in_the_step_already_is_taken_out_of_it() -> None:
    loop = Loop(make_config(num_pages=6, chunk_size=4, has_prefix_cache=False))
    loop.add(long_request("a1", 1, max_tokens=20))
    loop.schedule()
    loop.commit()
    loop.add(long_request("a2", 18, priority=-1))  # fits, but not beside what a1 grows by while a2 is read in
    for i in range(5):
        assert shape(loop.schedule()) == [(i + 1, 1, True), (3 * i, 3, False)]
        loop.commit()
    # the step is given a1's decode first; then a2 wants its fifth page, which a1 has to give
    assert loop.scheduler.stats().num_used_pages == 6
    assert shape(loop.schedule()) == [(15, 3, True)]
    loop.commit()
    assert loop.scheduler.stats().num_preemptions == 1
    loop.drain()
    loop.check_answers()


def test_idle_pages_that_are_hits_cannot_be_given_up_too() -> None:
    loop = Loop(make_config(num_pages=4, chunk_size=16))
    prompt = list(range(10, 19))
    loop.add(make_request("a", prompt, max_tokens=1))
    loop.drain()
    loop.add(long_request("b9", 5))
    assert shape(loop.schedule()) == [(0, 5, True)]
    assert loop.scheduler.stats().num_idle_pages == 2  # all that is left, and two hits plus a new page are wanted
    loop.add(make_request("c", prompt, max_tokens=1))
    loop.commit()
    assert shape(loop.schedule()) == [(5, 1, True)]
    assert loop.scheduler.stats().num_waiting == 1
    loop.drain()
    loop.check_answers()


def test_nobody_overtakes_a_long_prompt_that_waits_for_pages() -> None:
    loop = Loop(make_config(num_pages=8))
    loop.add(long_request("a1", 10, max_tokens=6), long_request("a2", 24, max_tokens=2), long_request("a3", 1))
    started = []
    while loop.scheduler.has_requests:
        plan = loop.schedule()
        assert plan is not None
        started += [start.request_id for start in plan.starts]
        loop.commit()
    assert started == ["a1", "a2", "a3"]


def test_a_preempted_sequence_finds_its_own_pages_again() -> None:
    loop = Loop(make_config())
    loop.add(long_request("a1", 8))
    loop.schedule()
    loop.schedule()  # in flight when the sequence is thrown out: its token is dropped and sampled again
    loop.commit()
    assert loop.preempt("a1")
    assert not loop.preempt("a1")
    assert loop.scheduler.stats().num_used_pages == 0
    assert loop.commit() == []
    plan = loop.schedule()
    assert shape(plan) == [(8, 1, True)]  # two full pages of nine known tokens
    assert plan is not None
    assert list(plan.starts[0].token_ids) == [11] * 8 + loop.answers["a1"]
    loop.drain()
    loop.check_answers()
    stats = loop.scheduler.stats()
    assert (stats.prefix_query_len, stats.prefix_hit_len, loop.last["a1"].cached_len) == (8, 0, 0)


# Prefix cache


def test_hits_are_whole_pages_and_never_the_last_token() -> None:
    loop = Loop(make_config())
    prompt = list(range(10, 18))
    for request_id, ids, cached_len in (
        ("a", prompt, 0),
        ("b", prompt, 4),
        ("c", [*prompt, 1], 8),
        ("d", prompt[:7], 4),
    ):
        loop.add(make_request(request_id, ids, max_tokens=1))
        assert shape(loop.schedule()) == [(cached_len, len(ids) - cached_len, True)]
        loop.commit()
        assert loop.last[request_id].cached_len == cached_len
    loop.add(make_request("e", prompt, max_tokens=1, cache_salt="tenant"))
    assert shape(loop.schedule()) == [(0, 8, True)]
    loop.commit()
    stats = loop.scheduler.stats()
    assert (stats.prefix_query_len, stats.prefix_hit_len) == (8 + 8 + 9 + 7 + 8, 16)
    assert (stats.num_used_pages, stats.num_idle_pages) == (0, 4)  # two of each tenant


def test_running_sequences_share_pages_and_duplicates_are_given_up() -> None:
    loop = Loop(make_config(chunk_size=32))
    loop.add(*(make_request(request_id, [9] * 8, ignore_eos=True) for request_id in "xyz"))
    loop.schedule()
    assert loop.scheduler.stats().num_used_pages == 6  # side by side: nothing to share yet
    loop.commit()
    assert loop.scheduler.stats().num_used_pages == 2
    loop.schedule()
    assert loop.scheduler.stats().num_used_pages == 2 + 3
    loop.drain()
    loop.check_answers()


def test_a_conversation_finds_its_answer_again() -> None:
    loop = Loop(make_config(num_pages=32))
    loop.add(long_request("a1", 5, max_tokens=8))
    loop.drain()
    history = [11] * 5 + loop.answers["a1"]  # 13 tokens, of which the last was never computed
    loop.add(make_request("b", [*history, 1, 2]))
    assert shape(loop.schedule()) == [(12, 3, True)]
    loop.drain()
    loop.check_answers()


def test_idle_pages_are_given_up_before_anyone_is_preempted() -> None:
    loop = Loop(make_config(num_pages=8))
    loop.add(long_request("a1", 16, max_tokens=1))
    loop.drain()
    assert loop.scheduler.stats().num_idle_pages == 4
    loop.add(long_request("a2", 24, max_tokens=4))
    loop.drain()
    loop.check_answers()
    stats = loop.scheduler.stats()
    assert stats.num_preemptions == 0
    assert stats.num_idle_pages == 6 + 1  # a2's, and the one of a1's that was left: its first


def test_no_prefix_cache() -> None:
    loop = Loop(make_config(has_prefix_cache=False))
    for request_id in "ab":
        loop.add(make_request(request_id, [9] * 9))
        loop.drain()
        assert loop.last[request_id].cached_len == 0
    assert loop.scheduler.stats().num_idle_pages == 0
    loop.check_answers()


# Ends


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_abort_frees_pages_at_once(num_steps: int) -> None:
    loop = Loop(make_config())
    loop.add(long_request("a1", 20), long_request("a2", 2))
    for _ in range(num_steps):
        loop.schedule()
    others = loop.scheduler.pages.pages_for(2 + max(num_steps - 1, 0)) if num_steps else 0  # a2 passes it
    update = loop.scheduler.finish("a1", FinishReason.ABORT)
    loop.scheduler.check_integrity()
    assert update is not None
    assert (update.finish_reason, update.token_id, update.error, update.is_expired) == (
        FinishReason.ABORT,
        None,
        None,
        False,
    )
    loop.hear(update)
    assert loop.scheduler.stats().num_used_pages == others
    assert loop.scheduler.finish("a1", FinishReason.ABORT) is None
    loop.scheduler.add(long_request("a1", 20))  # the same id again, while rows of the old one are in flight
    del loop.last["a1"]
    loop.drain()
    loop.check_answers()


def test_deadlines() -> None:
    loop = Loop(make_config(max_batch_size=1))
    loop.add(long_request("a1", 2, deadline=5.0), long_request("a2", 2, deadline=4.0), long_request("a3", 2))
    loop.schedule()
    assert loop.scheduler.next_deadline == 4.0
    assert loop.scheduler.expire(3.9) == []
    (update,) = loop.scheduler.expire(4.0)  # while it waits
    assert (update.request_id, update.finish_reason, update.is_expired) == ("a2", FinishReason.ABORT, True)
    (update,) = loop.scheduler.expire(9.0)  # while its step is in flight
    assert (update.request_id, update.completion_len) == ("a1", 0)
    assert loop.scheduler.next_deadline is None
    assert loop.commit() == []
    assert loop.scheduler.stats().num_expired == 2
    loop.drain()
    loop.check_answers()


def test_end_tokens_and_limits() -> None:
    config = make_config(num_pages=4)
    loop = Loop(config)
    requests = [make_request(f"r{i}", [i, 3], None, ignore_eos=i % 2 == 0, stop_token_ids=(i,)) for i in range(12)]
    loop.add(*requests)
    loop.drain()
    loop.check_answers()
    reasons = {loop.last[request.request_id].finish_reason for request in requests}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert max(2 + len(answer) for answer in loop.answers.values()) == config.max_len == 16


def test_what_is_refused() -> None:
    scheduler = Scheduler(make_config(num_pages=4))
    message = r"maximum context length is 16 tokens \(set by --cache_lens\).*no room"
    with pytest.raises(ContextLengthError, match=message) as caught:
        scheduler.add(make_request("a", [1] * 16))
    assert (caught.value.prompt_len, caught.value.max_len) == (16, 16)
    with pytest.raises(ContextLengthError, match=r"is 9 tokens \(what the model takes\)"):
        Scheduler(make_config(max_model_len=9)).add(make_request("a", [1] * 9))
    with pytest.raises(ConfigError, match="empty"):
        scheduler.add(make_request("a", []))
    with pytest.raises(ConfigError, match="ids are 0 to 39"):
        scheduler.add(make_request("a", [1, 40]))
    with pytest.raises(ConfigError, match="names token -1"):
        scheduler.add(make_request("a", [-1]))
    assert not scheduler.has_requests
    scheduler.add(make_request("a", [1] * 15))
    with pytest.raises(ValueError, match="is here already"):
        scheduler.add(make_request("a", [1]))
    scheduler.check_integrity()


@pytest.mark.parametrize("name", ["num_pages", "page_size", "chunk_size", "max_batch_size", "vocab_size"])
def test_config_is_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make_config(**{name: 0})


def test_config_needs_room_for_an_answer() -> None:
    with pytest.raises(ConfigError, match="no room"):
        make_config(num_pages=1, page_size=1)


# The engine dies


def test_all_go_on_after_the_engine_is_lost() -> None:
    loop = Loop(make_config(num_pages=10))
    requests = [long_request(f"a{i}", 5 + i, max_tokens=9) for i in range(6)]
    loop.add(*requests)
    for num_steps in (1, 4, 9):
        for _ in range(num_steps):
            loop.schedule()
            loop.schedule()
            loop.commit()
        ranks = [seq.rank for seq in loop.scheduler._running + loop.scheduler._waiting]
        loop.crash()
        assert [seq.rank for seq in loop.scheduler._waiting] == sorted(ranks)
        for step_id, results, _ in loop.lost:
            assert loop.scheduler.commit(StepResult(step_id=step_id, results=results)) == []
    loop.drain()
    loop.check_answers()
    assert [loop.last[request.request_id].finish_reason for request in requests] == [FinishReason.LENGTH] * 6
    assert loop.scheduler.stats().num_engine_losses == 3


def test_a_seed_is_drawn_once() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(Request(request_id="a", prompt_ids=[1], params=SamplingParams()))
    seeds = []
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None
        seeds.append(plan.starts[0].params.seed)
        scheduler.engine_lost()
    assert seeds[0] is not None
    assert seeds[0] == seeds[1]


# The package


def test_the_oracle_and_the_engine_are_not_trivial() -> None:
    config = make_config(num_pages=64)
    answers = {tuple(answer_alone(make_request("a", [i], 20), config)[0]) for i in range(20)}
    assert len(answers) == 20


def test_plans_are_plain_data_and_torch_is_not_needed() -> None:
    code = (
        "import sys, msgspec; from ktransformers.scheduler import scheduler, config, records; "
        "from ktransformers.core import SamplingParams; "
        "s = scheduler.Scheduler(config.SchedulerConfig(4, 4, 8, 2, 9)); "
        "s.add(records.Request(request_id='a', prompt_ids=[1, 2], params=SamplingParams(logit_bias={3: 1.0}))); "
        "plan = s.schedule(); "
        "assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=records.StepPlan) == plan; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_decodes_of_long_prompts_tell_of_new_pages_only() -> None:
    loop = Loop(make_config(num_pages=400, page_size=4, chunk_size=600, max_batch_size=4))
    loop.add(*(make_request(str(num), [num % 39] * num, 60, ignore_eos=True) for num in (300, 250)))
    num_told = []
    for _ in range(40):
        plan = loop.schedule()
        assert plan is not None
        num_told.append(sum(len(row.block_table) for row in plan.rows))
        loop.commit()
    assert num_told[0] >= 137  # 550 tokens in pages of 4
    assert max(num_told[1:]) <= 2


def test_answers_to_one_prompt_compute_it_once() -> None:
    loop = Loop(make_config(num_pages=64))
    prompt = [7] * 18
    shared = [make_request(f"a{i}", [], 3, ignore_eos=True, seed=i) for i in range(4)]
    shared = [msgspec.structs.replace(one, prompt_ids=prompt) for one in shared]
    loop.add(*shared, long_request("b9", 2))
    assert shape(loop.schedule()) == [(0, 6, False), (0, 2, True)]  # b9 passes with what it has
    loop.scheduler.finish("b9", FinishReason.ABORT)
    loop.commit()
    assert shape(loop.schedule()) == [(6, 8, False)]
    loop.commit()
    assert shape(loop.schedule()) == [(14, 4, True)]
    loop.commit()
    # Full pages are there: the others begin behind them.
    assert shape(loop.schedule())[1:] == [(16, 2, True), (16, 2, True), (16, 2, True)]
    del loop.requests["b9"], loop.answers["b9"]
    loop.drain()
    loop.check_answers()
    stats = loop.scheduler.stats()
    assert stats.prefix_hit_len == 3 * 16


def test_prompts_that_begin_alike_compute_it_once() -> None:
    """Of 180 tokens, of which 160 are the same: whoever comes later waits for these, and nobody for a few."""
    loop = Loop(make_config(num_pages=300, chunk_size=80))
    same = [i % 5 + 10 for i in range(160)]
    others = [make_request(f"a{i}", [*same, *[20 + i] * 20], 3, ignore_eos=True) for i in range(3)]
    loop.add(*others, make_request("few", [*same[:40], *[30] * 20], 3, ignore_eos=True))
    loop.drain()
    loop.check_answers()
    assert loop.last["a0"].cached_len == 0
    assert all(loop.last[name].cached_len >= 160 - WORTH_WAITING for name in ("a1", "a2"))
    assert loop.last["few"].cached_len == 0
    # One that comes first does not wait for one that comes later.
    loop = Loop(make_config(num_pages=300, chunk_size=80))
    loop.add(msgspec.structs.replace(others[0], priority=1))
    loop.schedule()
    loop.add(others[1])
    loop.drain()
    loop.check_answers()
    assert loop.last["a1"].cached_len < 160


def test_a_short_prompt_passes_and_long_ones_are_not_held_up() -> None:
    loop = Loop(make_config(num_pages=4000, page_size=4, chunk_size=400, max_batch_size=8))
    loop.add(make_request("long", [1, 2] * 2000, 1), make_request("longer", [3] * 4001, 1))
    loop.schedule()
    loop.add(make_request("short", [4] * 9, 2, ignore_eos=True))
    plan = loop.schedule()
    assert plan is not None
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(400, 391), (0, 9)]
    for i in range(60):  # without end: a quarter of the rows is theirs, and no more
        loop.add(make_request(f"q{i}", [5, *[i % 30] * 89], 1))
    rows = 0
    while "long" not in loop.last:
        loop.schedule()
        loop.commit()
        rows += 1
    assert rows <= 4000 / 300 + 3
    assert "longer" not in loop.last
    loop.drain()
    loop.check_answers()


def test_rank_decides_before_length() -> None:
    loop = Loop(make_config(num_pages=400, chunk_size=40))
    loop.add(make_request("long", [1, 2] * 200, 1, priority=-1), make_request("short", [4] * 9, 2))
    plan = loop.schedule()
    assert plan is not None
    assert [row.num_tokens for row in plan.rows] == [40]


def test_nobody_waits_for_a_prompt_that_is_not_computed() -> None:
    """The one that computes it leaves, or gives up its pages: the next does it."""
    loop = Loop(make_config(num_pages=64))
    prompt = [7] * 18
    loop.add(*(msgspec.structs.replace(make_request(f"a{i}", [], 3), prompt_ids=prompt) for i in range(2)))
    assert shape(loop.schedule()) == [(0, 8, False)]
    loop.scheduler.finish("a0", FinishReason.ABORT)
    loop.commit()
    assert shape(loop.schedule()) == [(0, 8, False)]
    loop.commit()
    assert shape(loop.schedule()) == [(8, 8, False)]


def test_stages_share_the_sequences() -> None:
    """Three steps are under way over two stages: each decode is in one at most, with tokens that are known."""
    loop = Loop(make_config(num_pages=100, max_batch_size=5, chunk_size=64, num_stages=2))
    for i in range(5):
        loop.add(make_request(f"r{i}", [1, 2, 3 + i], 30, ignore_eos=True))
    loop.schedule()
    loop.commit()
    plans = [loop.schedule() for _ in range(4)]
    rows = [[row.run_id for row in plan.rows] for plan in plans if plan is not None]
    assert [len(row) for row in rows] == [3, 2]
    assert len({*rows[0], *rows[1]}) == 5
    assert all(row.token_source is None for plan in plans if plan is not None for row in plan.rows)
    while loop.scheduler.has_requests:
        while loop.schedule() is not None:
            pass
        loop.commit()

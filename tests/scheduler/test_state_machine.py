"""Any order of calls: pages add up, slots and states read are the right ones, answers are as each request gets them."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ktransformers.core import FinishReason
from ktransformers.scheduler.records import StepResult
from tests.support.servers.fake_engine import EOS, VOCAB_SIZE, FakeDisk, Loop, make_config, make_request, make_tiers

# Prompts share prefixes, also up to the middle of a page; repeated tokens tell a page's place from its contents.
BASE = [1, 2, 3, 4, 1, 2, 1, 2, 3, 4, 5, 6, 3, 3, 3, 3, 3, 3, 3, 3, 1, 2, 3, 4]
PROMPTS = st.one_of(
    st.tuples(st.integers(1, len(BASE)), st.lists(st.integers(1, 4), max_size=3)).map(lambda p: BASE[: p[0]] + p[1]),
    st.sampled_from([[3] * 8, [3] * 9, [1, 2] * 9, BASE]),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(8, 24),
        page_size=st.sampled_from([1, 2, 4]),
        chunk_size=st.sampled_from([1, 3, 6, 16, 64]),
        max_batch_size=st.integers(1, 5),
        has_prefix_cache=st.sampled_from([True, True, True, False]),
        num_states=st.sampled_from([0, 1, 3, 5, 9, 30]),
        snapshot_align=st.sampled_from([1, 2, 3, 8]),
        snapshot_interval=st.sampled_from([0, 4, 9]),
        host_pages=st.sampled_from([0, 0, 1, 3, 10, 100]),
        host_states=st.sampled_from([0, 1, 4, 20]),
        disk_bytes=st.sampled_from([0, 0, 200, 1500, 1 << 20]),
        disk_seed=st.integers(0, 99),
        num_stages=st.sampled_from([1, 1, 2, 3]),
        max_drafts=st.sampled_from([0, 1, 3, 7]),
        drafter=st.sampled_from(["ngram", "draft"]),
    )
    def start(self, host_pages: int, host_states: int, disk_bytes: int, disk_seed: int, **config: int | str) -> None:
        rng = random.Random(disk_seed)
        disk = FakeDisk(
            is_bad=lambda: disk_seed % 2 == 1 and rng.random() < 0.2,
            num_done=lambda: 1000 if disk_seed % 3 == 0 else rng.choice((0, 0, 1, 2, 9)),
        )
        if not host_pages:
            self.loop = Loop(make_config(**config))
        else:
            tiers = make_tiers(host_pages=host_pages, host_states=host_states, disk_bytes=disk_bytes)
            self.loop = Loop(make_config(tiers=tiers, **config), disk)
        self.now = 0.0
        self.count = 0

    def _pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.loop.requests)))

    @rule(
        prompt=PROMPTS,
        max_tokens=st.sampled_from([None, 1, 2, 9, 30]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        wait=st.sampled_from([None, None, None, 2.0, 5.0]),
        salt=st.sampled_from(["", "", "tenant"]),
        ignore_eos=st.booleans(),
        seeds=st.sampled_from([(5,), (5, 6), (5, 5, 6)]),
    )
    def add(self, prompt, max_tokens, priority, wait, salt, ignore_eos, seeds) -> None:
        for seed in seeds:  # the same prompt several times: side by side, so that pages are shared while in use
            self.count += 1
            request = make_request(
                f"r{self.count}",
                prompt[: self.loop.config.max_len - 1],
                max_tokens,
                priority=priority,
                deadline=None if wait is None else self.now + wait,
                cache_salt=salt,
                ignore_eos=ignore_eos,
                seed=seed,
                stop_token_ids=(EOS + 1,),
            )
            self.loop.add(request)
        self.loop.scheduler.check_integrity()

    @precondition(lambda self: self.loop.scheduler.has_requests)
    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        """One step at a time, nothing planned ahead."""
        for _ in range(times):
            if not self.loop.results:
                self.loop.schedule()
            if self.loop.results:
                self.loop.commit()

    @precondition(lambda self: self.loop.scheduler.has_requests)
    @rule(times=st.integers(1, 15))
    def pipeline(self, times: int) -> None:
        for _ in range(times):
            while self.loop.schedule() is not None:
                pass
            if self.loop.results:
                self.loop.commit()

    @rule()
    def schedule(self) -> None:
        self.loop.schedule()

    @precondition(lambda self: self.loop.results)
    @rule()
    def commit(self) -> None:
        self.loop.commit()

    @precondition(lambda self: self.loop.requests)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def finish(self, data: st.DataObject, reason: FinishReason) -> None:
        request_id = self._pick(data)
        update = self.loop.scheduler.finish(request_id, reason)
        assert (update is None) == (request_id in self.loop.last)
        if update is not None:
            assert update.finish_reason is reason
            self.loop.hear(update)
        self.loop.scheduler.check_integrity()

    @precondition(lambda self: self.loop.requests)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.loop.preempt(self._pick(data))
        self.loop.scheduler.check_integrity()

    @precondition(lambda self: self.loop.requests)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        self.loop.suspend(self._pick(data))

    @precondition(lambda self: self.loop.requests)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.loop.resume(self._pick(data))

    @rule(seconds=st.sampled_from([1.0, 3.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        for update in self.loop.scheduler.expire(self.now):
            assert update.is_expired
            deadline = self.loop.requests[update.request_id].deadline
            assert deadline is not None
            assert deadline <= self.now
            self.loop.hear(update)
        self.loop.scheduler.check_integrity()
        assert (self.loop.scheduler.next_deadline or self.now + 1) > self.now

    @precondition(lambda self: self.count % 3 == 2)  # seldom, or the tree would always be small
    @rule(is_late=st.booleans())
    def crash(self, is_late: bool) -> None:
        self.loop.crash()
        if is_late:  # results that were on their way when the engine died
            for step_id, results, _ in self.loop.lost:
                assert self.loop.scheduler.commit(StepResult(step_id=step_id, results=results)) == []
        stats = self.loop.scheduler.stats()
        assert (stats.num_running, stats.num_used_pages, stats.num_idle_pages) == (0, 0, 0)

    @precondition(lambda self: self.count % 4 == 3)
    @rule()
    def restart(self) -> None:
        self.loop.restart()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.loop.drain()
        stats = self.loop.scheduler.stats()
        assert stats.num_suspended == len(self.loop.requests) - len(self.loop.last)
        assert stats.num_used_pages == 0, "what is suspended holds pages"
        for request_id in self.loop.requests:
            self.loop.resume(request_id)
        self.loop.drain()
        self.loop.check_answers()
        assert self.loop.last.keys() == self.loop.requests.keys()
        stats = self.loop.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_used_pages) == (0, 0, 0)


SETTINGS = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


class TestScheduler(SchedulerMachine.TestCase):
    settings = settings(SETTINGS, max_examples=80)


@pytest.mark.exhaustive
class TestSchedulerForLonger(SchedulerMachine.TestCase):
    settings = settings(SETTINGS, max_examples=250)

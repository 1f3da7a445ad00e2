"""Decides what the engine runs next, and what its results mean. Owns the truth about every request, in ids and counts.

    add ─> waiting ── schedule: admitted ──> running ── commit: end token, limit ──> gone
              ^                                 │  └──── finish, abort, expire ────> gone (from anywhere)
              ├── out of pages, engine_lost ────┤
              └── resume ── suspended <─────────┴── suspend (from waiting too)

A step takes, within chunk_size tokens (long_prompts.py: or more): first one token of every decode, so that streams do
not stall; then chunks of prompts by rank (priority, then arrival), a part of them to the one with the fewest tokens
left (passing.py). With max_itl_ratio, prompts beside decodes get only the rows that prefill_throttle.py allows.

Waiting sequences are admitted in the order of rank while fewer than max_running run and pages are free, with rows in
this step or without, so that a short prompt is seen behind long ones. Nobody overtakes the head that waits for pages.

A suspended request has its tokens, its deadline and its rank, and nothing else: no run, no pages, no place in a queue.
What prompts have in common is computed once: while one computes it, those behind it wait for its pages.

Pages are allocated as sequences grow. When none is left, the running sequence of the last rank gives up its pages and
waits again with its tokens; if that is the very sequence that wants to grow, it just sits this step out. So the first
in rank always moves, and everyone gets to be first.

A step in flight is not waited for: the step after it is planned with the tokens it will sample as placeholders. Its
results count only for runs that still exist:

    while a step is in flight       its result for that request
    finished by the step before     dropped (it ran one token too many)
    aborted, expired                dropped
    preempted, suspended            dropped; the token is sampled again, the same, in the next run
    engine lost                     dropped by step id

A step that runs draft tokens (scheduler/drafting) is waited for, and so is one behind which they would pay. They take
nobody's pages.

A pipeline of several stages has as many steps under way. Then nobody is in two of them with a token that is not known,
and decodes are shared out over the steps, so that all stages have work.

Models with recurrent layers have states beside pages: a run has a slot of its own, and begins from a snapshot of one
(scheduler/snapshots.py). What a stale row writes goes to slots that have no reader: its run's own, and those of
snapshots that are never published. They may have new owners by then, who write in later steps.
Pages may have copies in host memory and in files (scheduler/kv_offload.py). A waiting sequence whose pages are read
from files is passed by others; steps without rows copy when nobody has any. Knows no text, tensors, processes, time.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from operator import attrgetter

import msgspec

from ktransformers.core import PROMPT_LOGPROB_ROWS, AnswerEnd, FinishReason
from ktransformers.media.records import whole_stretches
from ktransformers.scheduler.batch import Batch, PlannedRow, PlannedStep, runnable
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.drafting.planner import DraftPlanner
from ktransformers.scheduler.integrity import Queues, check_queues, check_run
from ktransformers.scheduler.long_prompts import LongPrompts
from ktransformers.scheduler.page_tables import PageTables
from ktransformers.scheduler.passing import Passing
from ktransformers.scheduler.prefill_throttle import PendingPrefill, PrefillThrottle
from ktransformers.scheduler.records import (
    Request,
    RequestUpdate,
    RowResult,
    SchedulerStats,
    StepPlan,
    StepResult,
    salted,
)
from ktransformers.scheduler.sequence import RunningState, Sequence

__all__ = ["Scheduler"]

logger = logging.getLogger(__name__)

MAX_FETCHING = 2
"""Of the waiting requests so many, the first ones, have their pages read from files while max_running others run."""

_rank = attrgetter("rank")


class Scheduler:
    """Decides what the engine runs next, see the module's docstring. One caller at a time; no call blocks."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self._pages = PageTables(config)
        self._snapshots = self._pages.snapshots
        ratio = config.max_itl_ratio
        self._throttle = PrefillThrottle(ratio, config.max_gap_ms / 1000) if ratio else None
        self._passing, self._long = Passing(config.chunk_size), LongPrompts(config)
        self._drafts = DraftPlanner(config)
        self._requests: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # by rank
        self._running: list[Sequence] = []  # by rank
        self._suspended: dict[str, Sequence] = {}
        self._in_flight: deque[PlannedStep] = deque()
        self._ended: list[int] = []  # runs that the engine does not know yet to be over
        self._deadlines: dict[str, float] = {}
        self._arrivals, self._run_ids = itertools.count(), itertools.count(1)
        self._next_step = 1
        self._totals = SchedulerStats()
        self.max_admitted: int | None = None  # a lower limit on running sequences, for admissions to come

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Put a request into the queue, or aside when it is suspended.

        Raises what Limits raise, and ValueError for the id of a request that is still here.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} is here already")
        self.config.limits.check(request.prompt_ids, request.params, request.prediction_ids, request.media)
        params, prompt_len = request.params, len(request.prompt_ids)
        request = salted(request, self.config.picture_sight)
        if params.seed is None:  # drawn here, once: every run of the request must draw the same tokens
            params = replace(params, seed=secrets.randbits(63))
        seq = Sequence(
            request=request,
            arrival=next(self._arrivals),
            params=params,
            end=AnswerEnd.of(params, self.config.eos_token_ids, self.config.max_len - prompt_len),
            token_ids=[*request.prompt_ids, *request.answer_ids],
            cached_len=request.cached_len,
            stretches=whole_stretches(request.prompt_ids, request.media, self.config.picture_sight),
        )
        if seq.known_len >= seq.limit_len:
            raise ValueError(f"request {request.request_id!r} has its answer already: {seq.completion_len} tokens")
        self._requests[request.request_id] = seq
        if request.deadline is not None:
            self._deadlines[request.request_id] = request.deadline
        if request.is_suspended:
            self._suspended[request.request_id] = seq
        else:
            bisect.insort(self._waiting, seq, key=_rank)

    def finish(self, request_id: str, reason: FinishReason) -> RequestUpdate | None:
        """End a request from outside: its text held a stop string, or its caller left (ABORT). Its pages are free at
        once. None when it has ended already."""
        seq = self._requests.get(request_id)
        return None if seq is None else self._end(seq, reason)

    def expire(self, now: float) -> list[RequestUpdate]:
        """End all requests whose deadline is not after `now`."""
        if not self._deadlines:
            return []
        expired = [request_id for request_id, deadline in self._deadlines.items() if deadline <= now]
        self._totals.num_expired += len(expired)
        return [self._end(self._requests[i], FinishReason.ABORT, is_expired=True) for i in expired]

    @property
    def next_deadline(self) -> float | None:
        """The time at which `expire` will have something to do."""
        return min(self._deadlines.values(), default=None)

    def suspend(self, request_id: str) -> bool:
        """Take a request out of its step and its queue, until `resume`: its pages are free at once.

        Its deadline goes on. True also for one that is suspended already; False when there is no such request.
        """
        seq = self._requests.get(request_id)
        if seq is None:
            return False
        if request_id not in self._suspended:
            self._pause(seq)
            self._suspended[request_id] = seq
        return True

    def resume(self, request_id: str) -> bool:
        """Let a suspended request wait for its turn again, in its old rank. False when there is no such one."""
        seq = self._suspended.pop(request_id, None)
        if seq is None:
            return False
        bisect.insort(self._waiting, seq, key=_rank)
        return True

    def is_suspended(self, request_id: str) -> bool:
        """Whether the request is here and suspended."""
        return request_id in self._suspended

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may have a step, now or after a commit: for requests that are not suspended, or for copies
        of tiers."""
        tiers = self._pages.kv_offload
        return len(self._requests) > len(self._suspended) or (tiers is not None and tiers.has_work)

    def in_flight_ids(self, step_id: int | None = None) -> list[str]:
        """Return the requests with a row in the step in flight of this id, or in any; those that have left excepted."""
        steps = [step for step in self._in_flight if step_id in (None, step.step_id)]
        return list(dict.fromkeys(row.seq.request_id for step in steps for row in step.rows if not row.is_stale))

    def _end(
        self, seq: Sequence, reason: FinishReason, *, error: str | None = None, is_expired: bool = False
    ) -> RequestUpdate:
        """Remove a sequence, wherever it is. The update carries no token."""
        self._remove(seq)
        return seq.update(finish_reason=reason, error=error, is_expired=is_expired)

    def _remove(self, seq: Sequence) -> None:
        del self._requests[seq.request_id]
        self._deadlines.pop(seq.request_id, None)
        if self._suspended.pop(seq.request_id, None) is None:
            self._pause(seq)

    def _pause(self, seq: Sequence) -> None:
        """Out of the queue that it is in."""
        self._pages.forget(seq)
        if seq.run is None:
            del self._waiting[bisect.bisect_left(self._waiting, seq.rank, key=_rank)]
        else:
            self._stop_run(seq, seq.run)

    def _stop_run(self, seq: Sequence, run: RunningState) -> None:
        self._running.remove(seq)
        self._pages.release(run)
        seq.run = None
        if run.is_started:
            self._ended.append(run.run_id)

    # Planning a step.

    def schedule(self) -> StepPlan | None:
        """Plan the next step, which is then in flight until it is committed.

        None when max_in_flight steps are, or when nothing can run before the next commit or request.
        """
        if len(self._in_flight) >= self.config.max_in_flight:
            return None
        tiers = self._pages.kv_offload
        if tiers is not None and tiers.awaits_listing:
            return None if self._in_flight else self._plan(Batch(self.config.chunk_size))
        decodes, prefills = runnable(self._running, self.config.num_stages)
        if prefills and prefills[0].stretches:  # a picture that has to be whole is not put off by decodes for ever
            decodes = decodes[: max(self.config.chunk_size - prefills[0].least_tokens, 0)]
        if self._in_flight and self._drafts.awaits_tokens(self._running, decodes, prefills):
            return None
        self._pages.begin_step()
        batch = Batch(self.config.chunk_size)
        for seq, drafts in zip(decodes, self._drafts.drafts(decodes, prefills), strict=True):
            self._extend(batch, seq, drafts)
        if prefills or self._waiting:
            prefills = [seq for seq in prefills if seq.run is not None]  # not those that have just given way
            prefills = sorted(prefills + self._admit(), key=_rank)
        batch.budget += self._long.more(prefills, may_lend=self._throttle is not None or not len(batch))
        self._fill(batch, prefills)
        for seq in self._waiting[:MAX_FETCHING]:
            self._pages.awaits_tiers(seq)
        if not len(batch) and (self._in_flight or tiers is None or not tiers.wants_step()):
            return None
        return self._plan(batch)

    def _fill(self, batch: Batch, prefills: list[Sequence]) -> None:
        """Rows of prompts: in the order of rank, but for the part of one that may pass."""
        if not prefills and self._throttle is None:
            return
        least = prefills[0].least_tokens if prefills else 0
        passing = self._passing.choose(prefills) if prefills and least == 1 else None
        if self._throttle is not None and len(batch):
            pending = None
            if prefills:
                num_rows = sum(seq.num_unplanned for seq in prefills)
                pending = PendingPrefill(num_rows, self._passing.shortest(prefills, passing))
            batch.limit(max(self._throttle.rows(len(batch), batch.budget, pending), least if least > 1 else 0))
        part = self._passing.part(passing, batch.budget)
        batch.budget -= part
        for seq in prefills:
            if seq is not passing:
                self._extend(batch, seq)
        batch.budget += part
        if passing is not None:
            before = batch.budget
            self._extend(batch, passing)
            self._passing.spend(min(before - batch.budget, part))

    def _plan(self, batch: Batch) -> StepPlan:
        """The step of these rows; of none, for what tiers have to copy."""
        rows, looked = tuple(batch), self._drafts.take_look_seconds()
        step = PlannedStep(self._next_step, rows, batch.num_sampled, batch.num_drafted, bool(self._in_flight), looked)
        if self._throttle is not None:
            self._throttle.planned(step.num_decodes, step.num_rows - step.num_decodes)
        ended, self._ended = self._ended, []
        self._next_step += 1
        self._in_flight.append(step)
        copies = self._pages.take_copies(is_alone=not rows)
        return batch.plan(step.step_id, ended, copies, is_observed=self._drafts.is_observed, is_long=self._long.is_on)

    def _extend(self, batch: Batch, seq: Sequence, drafts: Seq[int] = ()) -> None:
        """Plan the next tokens of a running sequence, as many as the budget allows, at the cost of the last in rank.

        drafts: draft tokens to be run behind them, if there is room at nobody's cost.
        """
        run = seq.run
        if run is None or not batch.budget:
            return  # preempted a moment ago, for a sequence before it
        num_tokens = min(batch.budget, len(seq.token_ids) + run.num_pending - run.planned_len)
        if seq.params.prompt_logprobs is not None:
            num_tokens = min(num_tokens, PROMPT_LOGPROB_ROWS)
        num_tokens = seq.whole_tokens(run.planned_len, num_tokens, batch.budget)
        if not num_tokens:
            return  # the next step has more room
        drafts = self._pages.drafts_that_fit(run, drafts[: batch.budget - num_tokens])
        while not self._pages.grow(run, run.planned_len + num_tokens + len(drafts)):
            if drafts:
                drafts = ()
                continue
            victim = self._running[-1]
            if victim is seq:
                return  # keeps its pages until a sequence before it needs them
            batch.discard(victim)
            self._preempt(victim)
        saves: tuple[tuple[int, int], ...] = ()
        if self._snapshots is not None:
            saves = self._snapshots.plan(run, run.planned_len, run.planned_len + num_tokens)
        batch.add(seq, run, num_tokens, saves, drafts)

    def _admit(self) -> list[Sequence]:
        """Let waiting sequences run, in order, as long as each one's known tokens fit beside those of the others.

        A sequence that shares a prefix with one that computes it now waits for its pages, and lets others pass: it
        loses nothing, because the other one comes first or gives way to those that do. So does one whose pages are
        read from files, once.

        The check covers the whole prefill, though pages are only taken chunk by chunk: a sequence that is let in too
        early would be the first to be thrown out again.
        """
        at, admitted = 0, []
        while at < len(self._waiting) and len(self._running) < self._max_running:
            seq = self._waiting[at]
            if self._pages.awaits_prefix(seq, self._running) or self._pages.awaits_tiers(seq):
                at += 1
                continue
            run = self._pages.start(seq, next(self._run_ids), self._pages.num_reserved(self._running))
            if run is None:
                break
            if seq.cached_len is None:  # finding one's own pages again after a preemption is not a hit
                seq.cached_len = min(run.planned_len, seq.prompt_len)  # of an answer begun before, more may be found
                self._totals.prefix_query_len += seq.prompt_len
                self._totals.prefix_hit_len += seq.cached_len
            seq.run = run
            del self._waiting[at]
            bisect.insort(self._running, seq, key=_rank)
            admitted.append(seq)
        return admitted

    @property
    def _max_running(self) -> int:
        limit = self.config.max_running
        return limit if self.max_admitted is None else min(limit, self.max_admitted)

    def _preempt(self, seq: Sequence) -> None:
        """Take its pages for a sequence before it. What the tree and tiers have of it is not lost."""
        run = seq.run
        assert run is not None
        logger.debug("preempting %s at %d tokens", seq.request_id, seq.known_len)
        self._stop_run(seq, run)
        bisect.insort(self._waiting, seq, key=_rank)
        self._totals.num_preemptions += run.is_started  # one that had no rows yet has lost nothing

    # Taking in results.

    def _fail(self, failed: Seq[tuple[int, str]]) -> list[RequestUpdate]:
        """End the requests of these runs, for these reasons: nothing of a step that is not committed yet is to be found
        by others. See StepResult.failed."""
        errors = dict(failed)
        ended = [seq for seq in self._running if seq.run is not None and seq.run.run_id in errors] if errors else []
        return [
            self._end(seq, FinishReason.ABORT, error=errors[seq.run.run_id]) for seq in ended if seq.run is not None
        ]

    def commit(self, result: StepResult, elapsed: float = 0.0) -> list[RequestUpdate]:
        """Take in the result of a step, committed in the order planned. elapsed: seconds since it was planned, or the
        last commit; 0: nobody knows. The result of a step that went down with its engine is dropped. Raises ValueError
        for one that was never planned, out of order, or with too few or many sampled rows."""
        step_id = result.step_id
        if not self._in_flight or step_id != self._in_flight[0].step_id:
            oldest = self._in_flight[0].step_id if self._in_flight else self._next_step
            if 0 < step_id < oldest:
                logger.info("dropping the results of step %d: its engine is gone", step_id)
                return []
            raise ValueError(f"step {step_id} is not the oldest in flight; that would be step {oldest}")
        step = self._in_flight[0]
        if len(result.results) != step.num_sampled:
            raise ValueError(f"step {step_id} samples {step.num_sampled} tokens, got {len(result.results)} results")
        updates = self._fail(result.failed)
        self._in_flight.popleft()
        if self._throttle is not None:
            self._throttle.took(step.num_decodes, step.num_rows - step.num_decodes, result.row_seconds)
        if result.tiers is not None and self._pages.kv_offload is not None:
            self._pages.kv_offload.commit(result.tiers, step.num_prefilled)
        self._drafts.add_step(step, elapsed, result.draft_seconds, result.observe_seconds)
        if result.prompt_logprobs:
            seqs = step.seqs
            scored = [one for one in result.prompt_logprobs if one.run_id in seqs]
            updates += [seqs[one.run_id].update(finish_reason=None, prompt_logprobs=one) for one in scored]
        remaining = iter(result.results)
        for row in step.rows:
            sampled = next(remaining) if row.is_sampled else None
            if not row.is_stale:
                updates += self._take_row(row, sampled)
        return updates

    def _take_row(self, row: PlannedRow, result: RowResult | None) -> list[RequestUpdate]:
        """Take in what was computed of a row, and the tokens that were drawn behind it."""
        seq, run = row.seq, row.run
        updates, ends = ([], False) if result is None else self._take(seq, result, len(row.drafts))
        run.computed_len = row.end - len(row.drafts)
        if result is not None:
            run.num_pending -= 1 + len(row.drafts)
        if row.drafts:
            self._take_back(row, max(len(updates) - 1, 0), is_cut=ends)
        self._pages.publish(seq, run)
        if self._snapshots is not None:
            self._snapshots.publish(run, row.saves)
        if ends:
            self._remove(seq)
        return updates

    def _take_back(self, row: PlannedRow, num_accepted: int, *, is_cut: bool) -> None:
        """Accept so many of a row's draft tokens: what was computed behind them is as if it had not been."""
        self._drafts.add_row(row, num_accepted, is_cut=is_cut)
        run, computed_len = row.run, row.run.computed_len + num_accepted
        run.computed_len, run.planned_len, run.num_drafted = computed_len, computed_len, 0
        self._pages.shrink(run)
        if self._snapshots is not None:
            self._snapshots.accept_drafts(run, num_accepted, len(row.drafts))

    def _take(self, seq: Sequence, result: RowResult, num_drafted: int) -> tuple[list[RequestUpdate], bool]:
        """Append the tokens of a row. Returns the updates, and whether the answer ends with them."""
        updates: list[RequestUpdate] = []
        seq.num_drafted += num_drafted
        self._totals.num_drafted += num_drafted
        for one in result.tokens:
            if one.token_id is None:
                error = one.error or "the engine sent no token and no reason"
                updates.append(seq.update(one, finish_reason=FinishReason.ABORT, error=error))
                return updates, True
            if updates:
                seq.num_accepted += 1
                self._totals.num_accepted += 1
            seq.token_ids.append(one.token_id)
            reason = seq.end.reason(one.token_id, seq.completion_len)
            updates.append(seq.update(one, finish_reason=reason))
            if reason is not None:
                return updates, True
        return updates, False

    def engine_lost(self) -> None:
        """Note that engine and cache are gone. What ran waits again, in its old order, for the next engine."""
        self._in_flight.clear()
        if self._throttle is not None:
            self._throttle.lost()
        self._ended.clear()
        for seq in self._running:
            seq.run = None
        self._waiting = sorted(self._waiting + self._running, key=_rank)
        self._running.clear()
        self._pages.clear()
        self._totals.num_engine_losses += 1

    # Looking at it.

    @property
    def pages(self) -> PageTables:
        """The page tables, for those who copy prefixes out and in while no step is in flight."""
        return self._pages

    def stats(self) -> SchedulerStats:
        """Counts since the start, and of what runs and waits now."""
        pages = self._pages
        return msgspec.structs.replace(
            self._totals,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_suspended=len(self._suspended),
            num_pages=pages.num_pages,
            num_used_pages=pages.num_pages - pages.num_available,
            num_idle_pages=pages.num_idle,
            tiers=None if pages.kv_offload is None else pages.kv_offload.stats(),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when any invariant of this package's docstrings is broken. Slow: reads all."""
        queues = Queues(self._waiting, self._running, list(self._suspended.values()))
        check_queues(self.config, queues, self._requests, self._deadlines)
        assert len(self._in_flight) <= self.config.max_in_flight, "too many steps in flight"
        self._pages.check_integrity(self._running)
        for seq in self._running:
            check_run(self.config, seq, self._in_flight)

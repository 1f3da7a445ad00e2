"""Drives a scheduler: commands and results of steps in, plans and news out. The same in process and over sockets.

    obey(Add | Finish | Suspend | Resume) ──> ┌───────────┐ ──> plan(): the next step, for whoever has an engine
    commit(StepResult) ─────────────────────> │ scheduler │
    fail_step, lose_steps ──────────────────> └───────────┘ ──> take_updates(), take_news(): for whoever has the text

An engine that dies takes the steps in flight with it. Requests that were in them are suspects: with every loss before
one of their rows has been committed again they get a strike. From the second strike on, sequences run one at a time, so
that the third one names the request that kills engines; it is ended with an error, and nobody else is. The three deaths
are then explained, and do not speak against the engine, if engines have computed anything since the last ones were.

Knows no sockets, threads or text. One caller at a time; no call blocks.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable

import msgspec

from ktransformers.core import FinishReason
from ktransformers.errors import KTransformersError
from ktransformers.profiling.messages import Message
from ktransformers.profiling.stored_counts import sum_stored
from ktransformers.scheduler.chunk_watch import ChunkWatch
from ktransformers.scheduler.commands import (
    Add,
    EngineLoss,
    EngineTotals,
    Finish,
    News,
    RequestCommand,
    Resume,
    Suspend,
)
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.profiled import RequestTracker
from ktransformers.scheduler.records import Request, RequestUpdate, SchedulerStats, StepPlan, StepResult
from ktransformers.scheduler.scheduler import Scheduler
from ktransformers.system.restart_policy import MAX_STRIKES

__all__ = ["SchedulerDriver"]

logger = logging.getLogger(__name__)

ISOLATING_STRIKES = 2


class SchedulerDriver:
    """A scheduler with what its commands and its engine's results come to, see the module's docstring.

    clock: of deadlines, and of the times in traces. has_traces: whether news have traces. checks_integrity: after every
    change; for tests.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_traces: bool = False,
        checks_integrity: bool = False,
    ):
        self.scheduler, self._clock, self._checks = Scheduler(config), clock, checks_integrity
        self._updates: list[RequestUpdate] = []
        self._first_lens: dict[str, int] = {}  # length of the answer with its first new token, until that comes
        self._began: dict[str, float] = {}  # when those were first planned
        self._began_steps: dict[int, float] = {}  # when planning those in flight began
        self._busy_since = 0.0  # the last commit, if there was something to do behind it
        self._prefill_seconds: dict[str, float] = {}
        self._strikes: dict[str, list[int]] = {}  # epochs that died with a request's rows in flight
        self._steps_explained = -1  # steps there were when deaths were last explained
        self._totals = EngineTotals()
        self._expert_counts: list[bytes] = []
        self._chunks = ChunkWatch() if has_traces else None
        self._tracker: RequestTracker | None = None

    # Requests.

    def obey(self, command: RequestCommand) -> bool:
        """Do what a command says. Returns whether its request was there, and for Resume suspended; True for Add."""
        match command:
            case Add():
                for request in command.requests():
                    self._add(request)
                return True
            case Finish(request_id, reason, completion_len):
                update = self.scheduler.finish(request_id, reason)
                if update is not None:
                    self._ended(update, completion_len)
                return update is not None
            case Suspend() | Resume():
                return self._pause(command)

    def _add(self, request: Request) -> None:
        try:
            self.scheduler.add(request)
        except (KTransformersError, ValueError) as error:  # whoever sends it checks first, and has a bug
            logger.error("request %s was refused: %s", request.request_id, error)
            self._updates.append(_refusal(request.request_id, len(request.prompt_ids), str(error)))
            return
        self._first_lens[request.request_id] = len(request.answer_ids) + 1
        if self._tracker is not None:
            prompt_len = len(request.prompt_ids)
            self._tracker.added(request.request_id, prompt_len, is_suspended=request.is_suspended)

    def _pause(self, command: Suspend | Resume) -> bool:
        if self._tracker is not None:
            self._tracker.pause(command.request_id, isinstance(command, Suspend))
        if isinstance(command, Resume):
            return self.scheduler.resume(command.request_id)
        was_here = self.scheduler.suspend(command.request_id)
        if was_here:
            self._began.pop(command.request_id, None)  # the time until it goes on is no prefill
        return was_here

    def _ended(self, update: RequestUpdate, completion_len: int | None = None) -> None:
        """A request that ended by other things than its tokens."""
        self._forget(update.request_id)
        self._updates.append(update)
        if self._tracker is not None:
            self._tracker.ended(update, completion_len)

    def _forget(self, request_id: str) -> None:
        self._first_lens.pop(request_id, None)
        self._began.pop(request_id, None)
        self._strikes.pop(request_id, None)

    def expire(self) -> None:
        """End the requests whose deadline has passed."""
        for update in self.scheduler.expire(self._clock()):
            self._ended(update)

    def record(self, post: Callable[[Message], None] | None) -> None:
        """Send how requests fare to `post` from now on, in place of where it went before; None: nowhere."""
        if self._tracker is not None:
            self._tracker.stop()
        self._tracker = None if post is None else RequestTracker(post)

    # Steps.

    def plan(self) -> StepPlan | None:
        """Plan the next step, which is in flight until `commit`, or None; see Scheduler.schedule."""
        now = self._clock()
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self._began_steps[plan.step_id] = now
        if plan.starts or self._chunks is not None:
            self._note_times(plan, now)
        self._totals.num_tokens += plan.num_tokens
        if self._tracker is not None:
            self._tracker.planned(plan)
        self.check()
        return plan

    def _note_times(self, plan: StepPlan, now: float) -> None:
        for start in plan.starts:
            if start.request_id in self._first_lens:
                self._began.setdefault(start.request_id, now)
        if self._chunks is not None:
            self._chunks.planned(plan, now)

    def commit(self, result: StepResult) -> None:
        """Take in the result of a step, see Scheduler.commit."""
        if self._chunks is not None:
            self._chunks.finished(result.step_id, self._clock())
        if self._strikes:
            for request_id in self.scheduler.in_flight_ids(result.step_id):
                self._strikes.pop(request_id, None)
        now = self._clock()
        elapsed = now - (self._busy_since or self._began_steps.get(result.step_id, now))
        self._began_steps.pop(result.step_id, None)
        updates = self.scheduler.commit(result, elapsed)
        self._busy_since = now if self.scheduler.has_work else 0.0
        self._note_first_tokens(updates)
        if self._tracker is not None and result.had_rows:
            self._tracker.committed(result.step_id, updates, self.scheduler.stats().num_waiting)
        self._updates += updates
        if result.expert_counts:
            self._expert_counts.append(result.expert_counts)
        self._count(result)
        self.check()

    def _note_first_tokens(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            request_id = update.request_id
            if update.token_id is not None and update.completion_len == self._first_lens.get(request_id):
                del self._first_lens[request_id]
                if request_id in self._began:
                    self._prefill_seconds[request_id] = self._clock() - self._began.pop(request_id)
            if update.finish_reason is not None:
                self._forget(request_id)

    def _count(self, result: StepResult) -> None:
        totals, (num_rows, num_samples, num_touched) = self._totals, result.experts
        reads, hits, uploads, upload_bytes = result.hot
        totals.num_steps += result.had_rows
        totals.busy_seconds += result.seconds
        totals.num_expert_rows += num_rows
        totals.num_expert_samples += num_samples
        totals.num_touched_experts += num_touched
        totals.num_hot_reads += reads
        totals.num_hot_hits += hits
        totals.num_hot_uploads += uploads
        totals.hot_upload_bytes += upload_bytes
        totals.num_tower_pictures += result.tower[0]
        totals.tower_seconds += result.tower[1]
        totals.stored = sum_stored([totals.stored, result.stored])
        totals.stored_rows = sum_stored([totals.stored_rows, result.stored_rows])

    def fail_step(self, plan: StepPlan, error: str) -> list[str]:
        """End the requests of a step that failed with `error`; all others begin anew, for the cache may hold anything.

        Returns the ids of those that ended.
        """
        suspects = self.scheduler.in_flight_ids(plan.step_id)
        self._drop_steps()
        for request_id in suspects:
            update = self.scheduler.finish(request_id, FinishReason.ABORT)
            if update is not None:
                self._ended(msgspec.structs.replace(update, error=error))
        return suspects

    def lose_steps(self, epoch: int | None = None) -> list[int]:
        """Drop what is in flight, and the cache: an engine died, or its processes were brought together again.

        epoch: of the engine that died; None: nobody is suspected of it. Returns the epochs of deaths that a request
        explains.
        """
        suspects = self.scheduler.in_flight_ids()
        self._drop_steps()
        explained: list[int] = []
        for request_id in suspects if epoch is not None else ():
            assert epoch is not None
            strikes = self._strikes.setdefault(request_id, [])
            strikes.append(epoch)
            if len(strikes) >= MAX_STRIKES:
                explained += strikes
                self._end_poisonous(request_id)
        if explained and self._totals.num_steps == self._steps_explained:
            explained.clear()  # no engine has done anything but die: it is hardly the requests' fault
        elif explained:
            self._steps_explained = self._totals.num_steps
        self.check()
        return explained

    def _drop_steps(self) -> None:
        if self._chunks is not None:
            self._chunks.lost()
        self._began_steps.clear()
        self._busy_since = 0.0
        self.scheduler.engine_lost()

    def _end_poisonous(self, request_id: str) -> None:
        logger.error("request %s was in the batch of %d engines that died: it is ended", request_id, MAX_STRIKES)
        update = self.scheduler.finish(request_id, FinishReason.ABORT)
        if update is None:
            self._forget(request_id)
        else:
            error = "the engine died again and again while it computed this request; the server's log says more"
            self._ended(msgspec.structs.replace(update, error=error))
            self._totals.num_poisoned += 1

    def isolate(self) -> None:
        """Let requests run one at a time while one of them is suspected of killing engines, and all at once again when
        it is cleared or has left."""
        suspects = [name for name, strikes in self._strikes.items() if len(strikes) >= ISOLATING_STRIKES]
        suspects = [name for name in suspects if not self.scheduler.is_suspended(name)]
        limit = 1 if suspects else None
        if limit != self.scheduler.max_admitted:
            if suspects:
                logger.warning("engines died with %s in their batch: one request at a time", ", ".join(suspects))
            else:
                logger.info("no request is suspected any more: requests are computed together again")
            self.scheduler.max_admitted = limit

    # News.

    def take_updates(self) -> list[RequestUpdate]:
        """Return the updates since the last call of this or of `take_news`."""
        updates, self._updates = self._updates, []
        return updates

    def take_prefill_seconds(self, request_id: str) -> float | None:
        """Return the seconds from a request's admission to its first token, once."""
        return self._prefill_seconds.pop(request_id, None)

    def take_news(self, losses: list[EngineLoss], hanging: int | None) -> News:
        """Return all that is new since the last call. losses, hanging: see News."""
        news = News(
            self.take_updates(),
            self.stats(),
            copy.copy(self._totals),
            self._prefill_seconds,
            losses,
            hanging,
            b"".join(self._expert_counts),
            None if self._chunks is None else self._chunks.take(),
        )
        self._prefill_seconds, self._expert_counts = {}, []
        return news

    def stats(self) -> SchedulerStats:
        """Return the scheduler's figures of this moment."""
        return self.scheduler.stats()

    def check(self) -> None:
        """Raise AssertionError when the scheduler's invariants do not hold, where this is to be checked."""
        if self._checks:
            self.scheduler.check_integrity()


def _refusal(request_id: str, prompt_len: int, error: str) -> RequestUpdate:
    return RequestUpdate(
        request_id=request_id,
        token_id=None,
        prompt_len=prompt_len,
        cached_len=0,
        completion_len=0,
        finish_reason=FinishReason.ABORT,
        error=error,
    )

"""The scheduler process: owns every request, plans steps ahead of the engine, survives the engine. No torch here.

    waits for: commands of the API process, results of the engine, the next deadline. Then, in this order:
    take in what came, expire, plan steps up to two ahead, look for a step that takes too long, send the news.

An engine that dies takes the steps in flight with it. Requests that were in them are suspects: with every loss before
one of their rows has been committed again they get a strike. From the second strike on, sequences run one at a time, so
that the third one names the request that kills engines; it is ended with an error, and nobody else is. The three deaths
are then explained, and do not speak against the engine, if engines have computed anything since the last ones were.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from ktransformers.core import FinishReason
from ktransformers.errors import KTransformersError
from ktransformers.profiling.recorder import Recorder
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.profiled import RequestTracker
from ktransformers.scheduler.records import Request, RequestUpdate, StepResult
from ktransformers.scheduler.scheduler import Scheduler
from ktransformers.server.balance.child import read_options
from ktransformers.server.balance.chunk_watch import ChunkWatch
from ktransformers.server.balance.messages import (
    Add,
    Anew,
    Command,
    EngineDown,
    EngineLoss,
    EngineTotals,
    EngineUp,
    EngineWork,
    Finish,
    News,
    ProfileOff,
    ProfileOn,
    Resume,
    SchedulerOptions,
    Suspend,
    decode,
    encode,
)
from ktransformers.server.balance.step_watch import StepWatch
from ktransformers.system.child import become, follow_parent
from ktransformers.system.logs import set_up_logging
from ktransformers.system.restart_policy import MAX_STRIKES

__all__ = ["EngineLink", "SchedulerProcess", "main"]

logger = logging.getLogger("ktransformers.scheduler")

ISOLATING_STRIKES = 2


class EngineLink:
    """The sockets to the engine of one epoch. Closing them drops what a dead engine never read. is_recovering: it takes
    no steps for now.

    A PUSH socket without a peer does not send: the engine has not connected yet, or it has died and nobody has said so
    yet. Steps then wait in the outbox, and never block the scheduler.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], up: EngineUp):
        self.epoch, self.is_recovering = up.epoch, False
        self.steps, self.results = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket, endpoint in ((self.steps, up.steps), (self.results, up.results)):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(endpoint)

        self._outbox: deque[bytes] = deque()

    def send(self, work: EngineWork) -> None:
        """Send work, such as a step, to the engine; what its socket does not take now goes with `flush`."""
        self._outbox.append(encode(work))
        self.flush()

    def flush(self) -> None:
        """Send the work that waits in the outbox, as far as a peer takes it."""
        while self._outbox:
            try:
                self.steps.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._outbox.popleft()

    @property
    def awaits_peer(self) -> bool:
        return bool(self._outbox)

    def close(self) -> None:
        """Close the sockets to the engine."""
        self.steps.close()
        self.results.close()


class _Profile:
    """What is recorded here. command: what engines are sent."""

    def __init__(self, command: ProfileOn):
        self.command = command
        self._recorder = Recorder(command.endpoint, "scheduler")
        self.tracker = RequestTracker(self._recorder.post)

    def close(self) -> None:
        self.tracker.stop()
        self._recorder.close()


def scheduler_config(options: SchedulerOptions) -> SchedulerConfig:
    """Return the part of the options that is the scheduler's."""
    names = SchedulerConfig.__dataclass_fields__
    return SchedulerConfig(**{name: getattr(options, name) for name in names})


class SchedulerProcess:
    """The loop of the scheduler process, see the module's docstring. clock: of deadlines, which the API process sets by
    the monotonic one.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._context, self._checks, self._clock = context, options.checks_integrity, clock
        self.scheduler = Scheduler(scheduler_config(options))
        self._commands, self._news = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket, endpoint in ((self._commands, options.commands), (self._news, options.news)):
            socket.setsockopt(zmq.SNDHWM, 0)  # a message is never dropped, and the API process bounds what waits there
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._link: EngineLink | None = None
        self._updates: list[RequestUpdate] = []
        self._began: dict[str, float] = {}  # when a request was first planned, until its first token
        self._prefill_seconds: dict[str, float] = {}
        self._strikes: dict[str, list[int]] = {}  # epochs that died with a request's rows in flight
        self._steps_explained = -1  # steps there were when deaths were last explained
        self._losses: list[EngineLoss] = []
        self._watch = StepWatch(options.step_seconds)
        self._hanging: int | None = None
        self._totals = EngineTotals()
        self._expert_counts: list[bytes] = []
        self._chunks = ChunkWatch() if options.has_traces else None
        self._sent = b""
        self._profile: _Profile | None = None

    def run(self) -> None:
        """Serve forever: the process ends with its parent."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Do one round of the loop: wait for messages, receive them, plan and send steps."""
        due = [at for at in (self.scheduler.next_deadline, self._watch.next_look) if at is not None]
        timeout = max(int(1000 * (min(due) - self._clock())) + 1, 0) if due else None
        link = self._link
        if link is not None:
            self._poller.register(link.steps, zmq.POLLOUT if link.awaits_peer else 0)
        ready = dict(self._poller.poll(timeout))
        if link is not None:
            link.flush()
        if self._commands in ready:
            self._receive_commands()
        if self._link is not None and self._link.results in ready:
            self._receive_results(self._link)
        self._expire()
        self._isolate()
        self._plan()
        self._look_for_hang()
        self._send_news()

    def _receive_commands(self) -> None:
        while self._commands.poll(0):
            self._obey(decode(self._commands.recv(), Command))

    def _obey(self, command: Command) -> None:
        match command:
            case Add():
                for request in command.requests():
                    self._add(request)
            case Finish(request_id, reason, completion_len):
                update = self.scheduler.finish(request_id, reason)
                if update is not None:
                    self._ended(update, completion_len)
            case Suspend() | Resume():
                self._pause(command)
            case EngineUp():
                self._link = EngineLink(self._context, command)
                self._poller.register(self._link.results, zmq.POLLIN)
                if self._profile is not None:
                    self._link.send(self._profile.command)
            case EngineDown(epoch):
                self._lose_engine(epoch)
            case ProfileOn():
                self._record(command)
            case ProfileOff():
                self._record(None)

    def _pause(self, command: Suspend | Resume) -> None:
        if self._profile is not None:
            self._profile.tracker.pause(command.request_id, isinstance(command, Suspend))
        if isinstance(command, Resume):
            self.scheduler.resume(command.request_id)
        elif self.scheduler.suspend(command.request_id):
            self._began.pop(command.request_id, None)  # the time until it goes on is no prefill

    def _record(self, command: ProfileOn | None) -> None:
        """Begin a profile, or end the one there is; the engine does so before its next step."""
        if self._profile is not None:
            self._profile.close()
        self._profile = None if command is None else _Profile(command)
        if self._link is not None:
            self._link.send(command or ProfileOff())

    def _ended(self, update: RequestUpdate, completion_len: int | None = None) -> None:
        """A request that ended by other things than its tokens."""
        self._forget(update.request_id)
        self._updates.append(update)
        if self._profile is not None:
            self._profile.tracker.ended(update, completion_len)

    def _add(self, request: Request) -> None:
        try:
            self.scheduler.add(request)
        except (KTransformersError, ValueError) as error:  # the API process checks first: it has a bug
            logger.error("request %s was refused: %s", request.request_id, error)
            self._updates.append(_refusal(request.request_id, len(request.prompt_ids), str(error)))
            return
        if self._profile is not None:
            tracker, prompt_len = self._profile.tracker, len(request.prompt_ids)
            tracker.added(request.request_id, prompt_len, is_suspended=request.is_suspended)

    def _expire(self) -> None:
        for update in self.scheduler.expire(self._clock()):
            self._ended(update)

    def _look_for_hang(self) -> None:
        if self._link is not None and self._watch.is_overdue(self._clock()):
            self._hanging = self._link.epoch
            self._watch.clear()  # once is enough: the engine will be killed

    def _receive_results(self, link: EngineLink) -> None:
        while link.results.poll(0):
            result: StepResult = decode(link.results.recv(), StepResult)
            if result.recovering is not None:
                self._note_recovering(link, result.recovering)
                continue
            self._watch.finished(self._clock())
            if self._chunks is not None:
                self._chunks.finished(result.step_id, self._clock())
            committed = self.scheduler.in_flight_ids(result.step_id)
            for request_id in committed:
                self._strikes.pop(request_id, None)
            updates = self.scheduler.commit(
                result.step_id, result.results, result.prompt_logprobs, result.tiers, result.row_seconds
            )
            self._note_first_tokens(updates)
            if self._profile is not None and result.had_rows:
                num_waiting = self.scheduler.stats().num_waiting
                self._profile.tracker.committed(result.step_id, updates, num_waiting)
            self._updates += updates
            self._expert_counts.append(result.expert_counts)
            totals, (num_rows, num_samples, num_touched) = self._totals, result.experts
            reads, hits, uploads, upload_bytes = result.hot
            self._totals = msgspec.structs.replace(
                totals,
                num_steps=totals.num_steps + result.had_rows,
                busy_seconds=totals.busy_seconds + result.seconds,
                num_expert_rows=totals.num_expert_rows + num_rows,
                num_expert_samples=totals.num_expert_samples + num_samples,
                num_touched_experts=totals.num_touched_experts + num_touched,
                num_hot_reads=totals.num_hot_reads + reads,
                num_hot_hits=totals.num_hot_hits + hits,
                num_hot_uploads=totals.num_hot_uploads + uploads,
                hot_upload_bytes=totals.hot_upload_bytes + upload_bytes,
            )
            self._check()

    def _note_recovering(self, link: EngineLink, is_begun: bool) -> None:
        link.is_recovering = is_begun
        if is_begun:
            self._lose_steps(link.epoch)
            self._check()
        else:
            link.send(Anew())

    def _note_first_tokens(self, updates: list[RequestUpdate]) -> None:
        now = self._clock()
        for update in updates:
            if update.completion_len == 1 and update.request_id in self._began:
                self._prefill_seconds[update.request_id] = now - self._began.pop(update.request_id)
            if update.finish_reason is not None:
                self._forget(update.request_id)

    def _forget(self, request_id: str) -> None:
        self._began.pop(request_id, None)
        self._strikes.pop(request_id, None)

    def _lose_engine(self, epoch: int) -> None:
        if self._link is not None and self._link.epoch == epoch:
            self._poller.unregister(self._link.results)
            self._poller.register(self._link.steps, 0)  # no events: forgets the socket
            self._receive_results(self._link)  # what it finished before it died counts
            self._link.close()
            self._link = None
        explained = self._lose_steps(epoch)
        self._losses.append(EngineLoss(epoch, tuple(explained)))
        self._check()

    def _lose_steps(self, epoch: int) -> list[int]:
        """What is in flight, and the cache. Returns the epochs of deaths that a request explains."""
        self._watch.clear()
        if self._chunks is not None:
            self._chunks.lost()
        suspects = self.scheduler.in_flight_ids()
        self.scheduler.engine_lost()
        explained: list[int] = []
        for request_id in suspects:
            strikes = self._strikes.setdefault(request_id, [])
            strikes.append(epoch)
            if len(strikes) >= MAX_STRIKES:
                explained += strikes
                self._end_poisonous(request_id)
        if explained and self._totals.num_steps == self._steps_explained:
            explained.clear()  # no engine has done anything but die: it is hardly the requests' fault
        elif explained:
            self._steps_explained = self._totals.num_steps
        return explained

    def _end_poisonous(self, request_id: str) -> None:
        logger.error("request %s was in the batch of %d engines that died: it is ended", request_id, MAX_STRIKES)
        update = self.scheduler.finish(request_id, FinishReason.ABORT)
        if update is None:
            self._forget(request_id)
        else:
            error = "the engine died again and again while it computed this request; the server's log says more"
            self._ended(msgspec.structs.replace(update, error=error))
            self._totals = msgspec.structs.replace(self._totals, num_poisoned=self._totals.num_poisoned + 1)

    def _isolate(self) -> None:
        """Requests one at a time while one of them is suspected; all at once again when it is cleared or has left."""
        suspects = [name for name, strikes in self._strikes.items() if len(strikes) >= ISOLATING_STRIKES]
        suspects = [name for name in suspects if not self.scheduler.is_suspended(name)]
        limit = 1 if suspects else None
        if limit != self.scheduler.max_admitted:
            if suspects:
                logger.warning("engines died with %s in their batch: one request at a time", ", ".join(suspects))
            else:
                logger.info("no request is suspected any more: requests are computed together again")
            self.scheduler.max_admitted = limit

    def _plan(self) -> None:
        if self._link is None or self._link.is_recovering:
            return
        while (plan := self.scheduler.schedule()) is not None:
            now = self._clock()
            for start in plan.starts:
                if len(start.token_ids) == start.prompt_len:
                    self._began.setdefault(start.request_id, now)
            self._totals = msgspec.structs.replace(self._totals, num_tokens=self._totals.num_tokens + plan.num_tokens)
            self._link.send(plan)
            if self._profile is not None:
                self._profile.tracker.planned(plan)
            self._watch.sent(plan.num_tokens, now)
            if self._chunks is not None:
                self._chunks.planned(plan, now)
            self._check()

    def _send_news(self) -> None:
        """Send what is new; nothing when nothing is."""
        news = News(
            self._updates,
            self.scheduler.stats(),
            self._totals,
            self._prefill_seconds,
            self._losses,
            self._hanging,
            b"".join(self._expert_counts),
            None if self._chunks is None else self._chunks.take(),
        )
        data = encode(news)
        if data != self._sent:
            self._news.send(data)
            self._sent = encode(News([], news.stats, news.totals, {}))
        self._updates, self._prefill_seconds, self._losses, self._hanging = [], {}, [], None
        self._expert_counts = []

    def _check(self) -> None:
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


def main() -> int:
    """Run the scheduler process. Does not return."""
    become("kt-scheduler")
    follow_parent()
    options: SchedulerOptions = read_options(SchedulerOptions)
    set_up_logging(options.log_level, "scheduler", with_time=True)
    SchedulerProcess(options, zmq.Context()).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

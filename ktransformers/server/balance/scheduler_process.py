"""The scheduler process: owns every request, plans steps ahead of the engine, survives the engine. No torch here.

    waits for: commands of the API process, results of the engine, the next deadline. Then, in this order:
    take in what came, expire, plan steps up to two ahead, look for a step that takes too long, send the news.

What commands and results come to is scheduler/driver.py; here are the sockets, the engines and their hangs.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable

import zmq

from ktransformers.profiling.recorder import Recorder
from ktransformers.scheduler.commands import (
    EngineLoss,
    News,
    ProfileOff,
    ProfileOn,
)
from ktransformers.scheduler.driver import SchedulerDriver
from ktransformers.scheduler.records import StepResult
from ktransformers.scheduler.scheduler import Scheduler
from ktransformers.server.balance.child import read_options
from ktransformers.server.balance.messages import (
    Anew,
    Command,
    EngineDown,
    EngineUp,
    EngineWork,
    SchedulerOptions,
    decode,
    encode,
)
from ktransformers.server.balance.step_watch import StepWatch
from ktransformers.system.child import become, follow_parent
from ktransformers.system.logs import set_up_logging

__all__ = ["EngineLink", "SchedulerProcess", "main"]

logger = logging.getLogger("ktransformers.scheduler")


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
        self._context, self._clock = context, clock
        self.driver = SchedulerDriver(
            options.config,
            clock,
            has_traces=options.has_traces,
            checks_integrity=options.checks_integrity,
        )
        self._commands, self._news = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket, endpoint in ((self._commands, options.commands), (self._news, options.news)):
            socket.setsockopt(zmq.SNDHWM, 0)  # a message is never dropped, and the API process bounds what waits there
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._link: EngineLink | None = None
        self._losses: list[EngineLoss] = []
        self._watch = StepWatch(options.step_seconds)
        self._hanging: int | None = None
        self._sent = b""
        self._profile: ProfileOn | None = None  # what engines are sent
        self._recorder: Recorder | None = None

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for tests."""
        return self.driver.scheduler

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
        self.driver.expire()
        self.driver.isolate()
        self._plan()
        self._look_for_hang()
        self._send_news()

    def _receive_commands(self) -> None:
        while self._commands.poll(0):
            self._obey(decode(self._commands.recv(), Command))

    def _obey(self, command: Command) -> None:
        match command:
            case EngineUp():
                self._link = EngineLink(self._context, command)
                self._poller.register(self._link.results, zmq.POLLIN)
                if self._profile is not None:
                    self._link.send(self._profile)
            case EngineDown(epoch):
                self._lose_engine(epoch)
            case ProfileOn():
                self._record(command)
            case ProfileOff():
                self._record(None)
            case _:
                self.driver.obey(command)

    def _record(self, command: ProfileOn | None) -> None:
        """Begin a profile, or end the one there is; the engine does so before its next step."""
        self.driver.record(None)
        if self._recorder is not None:
            self._recorder.close()
        self._profile = command
        self._recorder = None if command is None else Recorder(command.endpoint, "scheduler")
        if self._recorder is not None:
            self.driver.record(self._recorder.post)
        if self._link is not None:
            self._link.send(command or ProfileOff())

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
            self.driver.commit(result)

    def _note_recovering(self, link: EngineLink, is_begun: bool) -> None:
        link.is_recovering = is_begun
        if is_begun:
            self._watch.clear()
            self.driver.lose_steps(link.epoch)
        else:
            link.send(Anew())

    def _lose_engine(self, epoch: int) -> None:
        if self._link is not None and self._link.epoch == epoch:
            self._poller.unregister(self._link.results)
            self._poller.register(self._link.steps, 0)  # no events: forgets the socket
            self._receive_results(self._link)  # what it finished before it died counts
            self._link.close()
            self._link = None
        self._watch.clear()
        self._losses.append(EngineLoss(epoch, tuple(self.driver.lose_steps(epoch))))

    def _plan(self) -> None:
        if self._link is None or self._link.is_recovering:
            return
        while (plan := self.driver.plan()) is not None:
            self._link.send(plan)
            self._watch.sent(plan.num_tokens, self._clock())

    def _send_news(self) -> None:
        """Send what is new; nothing when nothing is."""
        news = self.driver.take_news(self._losses, self._hanging)
        self._losses, self._hanging = [], None
        data = encode(news)
        if data != self._sent:
            self._news.send(data)
            self._sent = encode(News([], news.stats, news.totals, {}))


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

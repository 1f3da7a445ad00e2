"""Starts child processes, notices their ends, and stops them: the one place that does, for threads and event loops.

    start ──> starting ── running ── ended, reaped ── on_end, ended(), wait()
                 │           └── stop: end of file and SIGTERM ── grace ── SIGKILL
                 └── EngineError: the system gives no process

Each process has a thread of its own, which starts it and stays until its end. A child that follows its parent
(`child.follow_parent`) is killed by the system when the *thread* that started it ends: this one never ends before it,
and is gone at once when this process is, by SIGKILL too. Children are started with the signals of a shutdown blocked,
which are left to the parent. No signal is sent to a process that was reaped, whose id may be another one's by now.

Knows no engines, and does not decide whether a process is replaced: `restart_policy.py` and `restarts.py` do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO

from ktransformers.errors import EngineError, reason_of
from ktransformers.system.child import PARENTS_SIGNALS
from ktransformers.system.private_folder import PrivateFolder

__all__ = ["ChildProcess", "ProcessGroup", "Program"]

logger = logging.getLogger(__name__)

_NOT_STARTED = 127  # the return code of a process that there never was, as shells have it
_KEPT_WORDS = 4096  # bytes at the end of standard error


@dataclass(frozen=True, slots=True)
class Program:
    """What a child process runs. name: for messages. command: as `child.spawn_code` makes it.

    stdin, stdout: subprocess.PIPE, a file descriptor, or None for those of this process.
    environment: all variables of the process; None: those of this process.
    keeps_words: whether standard error is kept for `ChildProcess.last_words`, instead of being this process's.
    """

    name: str
    command: Sequence[str]
    stdin: int | None = subprocess.PIPE
    stdout: int | None = None
    environment: Mapping[str, str] | None = None
    keeps_words: bool = False


class ChildProcess:
    """A process of a ProcessGroup, which alone makes these. Its methods may be called on any thread."""

    def __init__(self, program: Program, forget: Callable[[ChildProcess, bool], None]):
        self.program, self.name = program, program.name
        self._forget = forget
        self._owner = os.getpid()
        self._lock = threading.Lock()  # guards the process against signals after it was reaped
        self._process: subprocess.Popen[bytes] | None = None
        self._is_doomed = False  # to be killed as soon as there is a process
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._started: Future[subprocess.Popen[bytes]] = Future()
        self._ended: Future[int] = Future()
        self._started.set_running_or_notify_cancel()  # whoever waits for them may be cancelled, they are not
        self._ended.set_running_or_notify_cancel()
        self._errors: IO[bytes] | None = None
        self.last_words = ""

    # The thread of this process.

    def begin(self) -> None:
        """Start the process. Raises EngineError when the system gives none."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the system gives no thread
            self._not_started(error)
        self._started.result()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
        try:
            process = self._popen()
        except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
            self._not_started(error)
            return
        with self._lock:
            self._process = process
            if self._is_doomed:
                process.kill()
        self._started.set_result(process)
        code = self._reap(process)
        self.last_words = self._read_words()
        self._forget(self, process.stdout is not None)
        self._ended.set_result(code)
        self.close_stdin()

    def _popen(self) -> subprocess.Popen[bytes]:
        program = self.program
        if program.keeps_words:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        return subprocess.Popen(
            list(program.command),
            stdin=program.stdin,
            stdout=program.stdout,
            stderr=self._errors,
            env=program.environment,
        )

    def _not_started(self, error: Exception) -> None:
        why = reason_of(error) if isinstance(error, OSError) else str(error)
        self._read_words()
        self._forget(self, False)
        self._ended.set_result(_NOT_STARTED)
        started = EngineError(f"{self.name} cannot be started: {why}")
        started.__cause__ = error
        self._started.set_exception(started)

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end, and return the code. Not by `wait` alone, which would let another thread's signal go to
        whoever has the id next."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return process.wait()
        with contextlib.suppress(ChildProcessError):  # the process ignores its children's ends, or reaps them itself
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            return process.wait()

    def _read_words(self) -> str:
        if self._errors is None:
            return ""
        with self._errors as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _KEPT_WORDS, 0))
            return file.read().decode(errors="replace").strip()

    # What is known.

    @property
    def is_own(self) -> bool:
        """Whether this process is the parent, and not a forked copy of it, which has no part in its children."""
        return os.getpid() == self._owner

    @property
    def pid(self) -> int:
        """The process id."""
        return self._started.result().pid

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe from the process's standard output. Whoever reads it closes it; else `ProcessGroup.close` does."""
        stdout = self._started.result().stdout
        assert stdout is not None, "the program has no pipe there"
        return stdout

    @property
    def returncode(self) -> int | None:
        """The return code, negative for a signal, or None while the process runs."""
        return self._ended.result() if self._ended.done() else None

    def poll(self) -> int | None:
        """Return the return code, or None while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, for at most `timeout` seconds, and return the return code. Raises TimeoutError."""
        return self._ended.result(timeout)

    async def ended(self) -> int:
        """Wait for the end on an event loop, and return the return code."""
        return await asyncio.wrap_future(self._ended)

    def on_end(self, call: Callable[[int], None]) -> None:
        """Call `call` with the return code when the process ends, on a thread of its own; at once, on this one, when it
        has ended."""
        self._ended.add_done_callback(lambda ended: call(ended.result()))

    # What is done with it.

    def send(self, data: bytes) -> None:
        """Write to the process's standard input, all of it. Raises BrokenPipeError when the process is gone."""
        stdin = self._started.result().stdin
        assert stdin is not None, "the program has no pipe there"
        with self._sending:
            if stdin.closed:
                raise BrokenPipeError(f"{self.name} is gone")
            stdin.write(data)
            stdin.flush()

    def kill(self) -> None:
        """Kill the process, if it lives."""
        self._signal(signal.SIGKILL)

    def ask_to_end(self) -> None:
        """Ask the process to end: by the end of its standard input, where that is a pipe, and SIGTERM."""
        if self._sending.acquire(blocking=False):  # who sends without end is not waited for
            self._sending.release()
            self.close_stdin()
        self._signal(signal.SIGTERM)

    def close_stdin(self) -> None:
        """Close the pipe to the process, once nobody sends."""
        stdin = self._process and self._process.stdin
        if stdin:
            with self._sending:
                try:
                    stdin.close()
                except BrokenPipeError:  # of what it was never to read
                    logger.debug("%s had not read everything", self.name)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if not self.is_own:
                return
            if self._process is None:
                self._is_doomed = True
            elif self._process.returncode is None:
                os.kill(self._process.pid, number)


class ProcessGroup:
    """The child processes of one owner. None of them outlives `close`, nor this process if they follow their parent.

    May be used on any thread; methods that wait have a twin for event loops.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: list[ChildProcess] = []  # those that were started and have not ended
        self._unread: list[ChildProcess] = []  # those that have ended, and whose output may still be read
        self._folder: PrivateFolder | None = None
        self._is_closed = False
        self._owner = os.getpid()

    @property
    def processes(self) -> list[ChildProcess]:
        """The processes that have not ended, in the order in which they were started."""
        with self._lock:
            return list(self._children)

    @property
    def folder(self) -> PrivateFolder:
        """A folder for the sockets of these processes, made when it is asked for and removed by `close`. Raises
        ConfigError when there can be none."""
        with self._lock:
            if self._folder is None:
                self._folder = PrivateFolder()
            return self._folder

    def start(self, program: Program) -> ChildProcess:
        """Start a process and return it. Raises EngineError when the system gives none, or after `close`."""
        child = ChildProcess(program, self._forget)
        with self._lock:
            if self._is_closed:
                raise EngineError(f"{program.name} is not started: what it belongs to ends")
            self._children.append(child)  # before it begins: `close` on another thread waits for it
        child.begin()
        return child

    def _forget(self, child: ChildProcess, is_unread: bool) -> None:
        with self._lock:
            self._children = [one for one in self._children if one is not child]
            self._unread = [one for one in self._unread if not one.stdout.closed]
            if is_unread:
                self._unread.append(child)

    def stop(self, process: ChildProcess, grace: float = 0.0) -> None:
        """End one process and reap it. grace: seconds in which it may end by itself once it is asked to; 0: it is
        killed. Its output can still be read."""
        _stop([process], grace)

    def close(self, grace: float = 0.0) -> None:
        """End all processes, last started first, and start none any more. grace: as `stop`, for all together.

        Returns when all are reaped, pipes from them are closed, and the folder is removed. Safe to call twice.
        """
        if os.getpid() != self._owner:  # a forked copy of the parent has no part in its children
            return
        with self._lock:
            self._is_closed = True
            children = list(reversed(self._children))
            folder, self._folder = self._folder, None
        _stop(children, grace)
        with self._lock:
            unread, self._unread = self._unread, []
        for process in unread:
            process.stdout.close()
        if folder is not None:
            folder.remove()

    async def stop_async(self, process: ChildProcess) -> None:
        """Do what `stop` does, while the event loop goes on."""
        await asyncio.to_thread(self.stop, process)

    async def close_async(self) -> None:
        """Do what `close` does, while the event loop goes on."""
        await asyncio.to_thread(self.close)


def _stop(processes: Sequence[ChildProcess], grace: float) -> None:
    processes = [process for process in processes if process.is_own]
    if grace > 0:
        for process in processes:
            process.ask_to_end()
        deadline = time.monotonic() + grace
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except TimeoutError:
                logger.warning("%s does not end within %g s: it is killed", process.name, grace)
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        process.close_stdin()

"""A child process that answers one question after the other, each within a time, for work that nothing else can end.

    parent ── framed question ──> standard input       standard output ── framed answer ──> parent
              framed()                                                    read_frame()

It is started when the first question comes, ended when an answer takes too long, and started again for the next one,
as it is when it has ended since the last.
It has to end with its standard input, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping, Sequence

from ktransformers.system.child import FRAME_HEADER, framed

__all__ = ["AnswerTimeout", "AskedProcess", "ProcessEndedError"]


class AnswerTimeout(Exception):
    """The error for an answer that took too long; its process is ended."""


class ProcessEndedError(Exception):
    """The error for a process that ended in place of an answer. status: its exit code, negative for a signal."""

    def __init__(self, status: int):
        super().__init__(f"signal {-status}" if status < 0 else f"exit code {status}")
        self.status = status


class AskedProcess:
    """A process of `command`, whose first question is always `opening`. Any thread may ask; they wait for each other.

    start_seconds: for the answer to `opening`. env: variables beside those of this process.
    """

    def __init__(
        self, command: Sequence[str], opening: bytes, start_seconds: float, env: Mapping[str, str] | None = None
    ):
        self._command, self._opening, self._start_seconds = list(command), opening, start_seconds
        self._env = {**os.environ, **(env or {})}
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._ends: weakref.finalize[..., AskedProcess] | None = None
        self._pid = os.getpid()
        self.opened = b""
        """The answer to `opening`, of the process that runs."""

    def start(self) -> bytes:
        """Start the process, unless it runs; return its answer to `opening`. Raises as `ask`."""
        with self._lock:
            self._running()
            return self.opened

    def ask(self, question: bytes, seconds: float) -> bytes:
        """Return the answer to a question. Raises AnswerTimeout, and ProcessEndedError for a process that died."""
        with self._lock:
            return self._asked(self._running(), question, seconds)

    def _asked(self, process: subprocess.Popen[bytes], question: bytes, seconds: float) -> bytes:
        try:
            return _exchange(process, framed(question), seconds)
        except OSError:
            process.kill()  # it may have closed its pipes and live
            status = process.wait()
            self._close()
            raise ProcessEndedError(status) from None
        except BaseException:  # an answer that comes later would be taken for that to another question
            self._close()
            raise

    def _running(self) -> subprocess.Popen[bytes]:
        if self._pid != os.getpid():  # after a fork: the process answers the parent
            self.process, self._ends, self._pid = None, None, os.getpid()
        if self.process is not None and self.process.poll() is None:
            return self.process
        self._close()  # one that ended between two questions died of neither
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=self._env
        )
        self.process, self._ends = process, weakref.finalize(self, _end, process, self._pid)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # whoever does not read is given up, too
        self.opened = self._asked(process, self._opening, self._start_seconds)
        return process

    def kill(self) -> None:
        """Kill the process, if it runs, whoever waits for an answer of it: they get ProcessEndedError."""
        process = self.process
        if process is not None and self._pid == os.getpid():
            process.kill()

    def close(self) -> None:
        """End the process. Another one is started when a question comes."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._ends is not None:
            self._ends()
        self.process = self._ends = None


def _exchange(process: subprocess.Popen[bytes], question: bytes, seconds: float) -> bytes:
    """Raises AnswerTimeout, and OSError for a process that died."""
    assert process.stdin is not None
    assert process.stdout is not None
    until = time.monotonic() + seconds
    to_child, from_child = process.stdin.fileno(), process.stdout.fileno()
    rest = memoryview(question)
    while rest:
        _wait(to_child, select.POLLOUT, until, seconds)
        with contextlib.suppress(BlockingIOError):
            rest = rest[os.write(to_child, rest[: 1 << 20]) :]
    answer = bytearray()
    wanted = FRAME_HEADER.size
    while len(answer) < wanted:
        _wait(from_child, select.POLLIN, until, seconds)
        piece = os.read(from_child, min(wanted - len(answer), 1 << 20))
        if not piece:
            raise BrokenPipeError
        answer += piece
        if len(answer) == FRAME_HEADER.size and wanted == FRAME_HEADER.size:
            wanted += FRAME_HEADER.unpack(answer)[0]
    return bytes(answer[FRAME_HEADER.size :])


def _wait(descriptor: int, event: int, until: float, seconds: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(1000 * max(until - time.monotonic(), 0.0)):
        raise AnswerTimeout(f"it took more than {seconds:.0f} s")


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """owner: the id of the process that started it, which alone may end it."""
    if owner != os.getpid():
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what was not sent
                pipe.close()

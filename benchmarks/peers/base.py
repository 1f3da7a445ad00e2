"""Another program as a peer: a child process that answers measuring questions one at a time.

The parent sends a line, the child answers with a line `answer NUMBER`, or `answer -` for what it does not do. Between
two questions the child is stopped by a signal: its threads may spin, which would spoil our figures. Knows nothing of
what is measured.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["PeerProcess", "answer_questions", "is_missing", "mean_time"]

UNKNOWN = "-"
_PR_SET_PDEATHSIG = 1
_ROOT = str(Path(__file__).parents[2])
"""Where a child finds this package, from whatever folder the benchmark is run."""


def is_missing(peer: str, package: str, pip_name: str) -> bool:
    """Whether the package of a peer is not installed, which is said in one printed line."""
    if importlib.util.find_spec(package) is not None:
        return False
    print(f"peer {peer} is not installed (pip install {pip_name}): measured without it", flush=True)
    return True


class PeerProcess:
    """Asks a child process for the figures of the peer `name`; `command` starts it, `environment` None is ours.

    The child is asked `ready` once, which it answers when it has loaded what it needs. A child that ends early is
    reported in one line, is_dead from there on, and has no more figures.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self.name, pipe = name, subprocess.PIPE
        variables = dict(os.environ if environment is None else environment)
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, variables.get("PYTHONPATH"))))
        self._child = subprocess.Popen(list(command), stdin=pipe, stdout=pipe, text=True, env=variables)
        self.pid, self.is_dead = self._child.pid, False
        try:
            self._ask("ready")
        except BaseException:  # nobody else could end a child that is still loading
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, question: str) -> float | None:
        """The child's figure; None when it does not have it, or has failed. `question` is one line."""
        if self.is_dead:
            return None
        self._signal(signal.SIGCONT)
        answer = self._ask(question)
        self._signal(signal.SIGSTOP)
        return None if answer in ("", UNKNOWN) else float(answer)

    def _ask(self, line: str) -> str:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return self._ended()
        for answer in self._child.stdout:  # libraries print lines of their own
            if answer.startswith("answer "):
                return answer.split()[1]
        return self._ended()

    def _ended(self) -> str:
        self.is_dead = True
        print(f"peer {self.name} ended early: measured without it from here on", flush=True)
        return ""

    def _signal(self, number: signal.Signals) -> None:
        if not self.is_dead:
            self._child.send_signal(number)

    def close(self) -> None:
        """End the child."""
        self._child.kill()  # works on a stopped process too
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:  # what it was sent last stayed unread
                continue


def answer_questions(answer: Callable[[list[str]], float | None]) -> None:
    """The child's side: `answer` gets the words of each question; its None is "not done here". Does not return."""
    if sys.platform == "linux":  # a stopped process would not notice that its parent was killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for line in sys.stdin:
        words = line.split()
        figure = None if words == ["ready"] else answer(words)
        print(f"answer {UNKNOWN if figure is None else figure}", flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of the peer may never end


def mean_time(once: Callable[[int], object], seconds: float, warm_ups: int) -> float:
    """Return the seconds of a call, the mean of those that fit in `seconds` (at least two), which are numbered."""
    for i in range(warm_ups):
        once(i)
    began, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - began < seconds:
        once(count)
        count += 1
    return (time.perf_counter() - began) / count

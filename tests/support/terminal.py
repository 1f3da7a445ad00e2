"""The chat of fake_chat.py as a program, on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROGRAM = [sys.executable, "-m", "tests.support.fake_chat"]
TIMEOUT = 60  # seconds; only a hang reaches it


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "TERM": "xterm",
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
    }


class Terminal:
    """The chat on a pseudo-terminal."""

    def __init__(self, *flags: str):
        pid, self._fd = pty.fork()
        if pid == 0:
            os.execve(PROGRAM[0], [*PROGRAM, *flags], environment())
        self._pid = pid
        self._seen = ""

    def expect(self, text: str) -> str:
        """Read until `text` was shown; what came before it."""
        while text not in self._seen:
            ready, _, _ = select.select([self._fd], [], [], TIMEOUT)
            assert ready, f"waited for {text!r}, saw {self._seen!r}"
            try:
                self._seen += os.read(self._fd, 65536).decode("utf-8", "replace")
            except OSError:  # the program ended
                raise AssertionError(f"ended before {text!r}, saw {self._seen!r}") from None
        before, self._seen = self._seen.split(text, 1)
        return before

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def exit_code(self) -> int:
        while True:
            try:
                if not os.read(self._fd, 65536):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def close(self) -> None:
        os.close(self._fd)

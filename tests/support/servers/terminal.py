"""The chat of fake_chat.py as a program, or another one, on a pseudo-terminal."""

from __future__ import annotations

import codecs
import os
import pty
import select
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent
PROGRAM = [sys.executable, "-m", "tests.support.servers.fake_chat"]
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

    def __init__(self, *flags: str, program: Sequence[str] = PROGRAM):
        """program: what runs there, with the flags behind it."""
        pid, self._fd = pty.fork()
        if pid == 0:
            os.execvpe(program[0], [*program, *flags], environment())
        self._pid = pid
        self._seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def expect(self, text: str) -> str:
        """Read until `text` was shown; what came before it."""
        while text not in self._seen:
            self._read(text)
        before, self._seen = self._seen.split(text, 1)
        return before

    def rest(self) -> str:
        """What was read and not asked for, with at least one more piece that the program writes."""
        self._read("anything")
        found, self._seen = self._seen, ""
        return found

    def _read(self, awaited: str) -> None:
        ready, _, _ = select.select([self._fd], [], [], TIMEOUT)
        assert ready, f"waited for {awaited!r}, saw {self._seen!r}"
        try:
            self._seen += self._decoder.decode(os.read(self._fd, 65536))
        except OSError:  # the program ended
            raise AssertionError(f"ended before {awaited!r}, saw {self._seen!r}") from None

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

"""The history of prompts over sessions: a private file of bounded size. Knows no chat."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

__all__ = ["MAX_BYTES", "MAX_PROMPT", "PromptHistory", "open_history"]

_log = logging.getLogger(__name__)

MAX_BYTES = 2**20
"""What the file may have when a session begins; older prompts go first."""

MAX_PROMPT = 2**14
"""Characters of a prompt that the file takes; longer ones are recalled in their own session only."""

_START = b"\n# "  # how FileHistory begins an entry; no line of a prompt begins like this


class PromptHistory(FileHistory):
    """A prompt_toolkit FileHistory whose file nobody else can read, and whose recording can be switched off."""

    def __init__(self, path: Path):
        super().__init__(str(path))
        self._path, self.is_recording = path, True

    def store_string(self, string: str) -> None:
        """Append a prompt to the file.

        Logs once when it cannot be written; prompts are then recalled in this session only.
        """
        if not self.is_recording or len(string) > MAX_PROMPT:
            return
        try:
            _make_private(self._path)
            super().store_string(string.encode("utf-8", "replace").decode())
        except OSError as error:
            self.is_recording = False
            _log.warning("prompts are no longer kept for later sessions: %s: %s", self._path, error.strerror)


def open_history(path: Path) -> History:
    """Open the history in `path`, making it when it is missing. Where that fails, one line and a history in memory."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        _make_private(path)
        _drop_oldest(path)
    except OSError as error:
        _log.warning("prompts are not kept for later sessions: %s: %s", error.filename or path, error.strerror)
        return InMemoryHistory()
    return PromptHistory(path)


def _make_private(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o600)  # a pipe that nobody reads: an error
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def _drop_oldest(path: Path) -> None:
    """Halve a file that has grown too large, so that this is rare."""
    if path.stat().st_size <= MAX_BYTES:
        return
    data = path.read_bytes()[-MAX_BYTES // 2 :]
    start = data.find(_START)
    rest = path.with_name(path.name + ".new")
    rest.touch(mode=0o600)
    rest.write_bytes(data[start:] if start >= 0 else b"")
    os.replace(rest, path)

"""Sources of the user's turns other than a terminal: one document, or the lines of a pipe.

Puts `\"\"\"` blocks together. Does not know commands or models. Terminals are in terminal.py.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ktransformers.errors import CapacityError, ConfigError, reason_of
from ktransformers.system.user_files import read_named

__all__ = [
    "DocumentSource",
    "LineSource",
    "NoSource",
    "ReadLine",
    "TurnSource",
    "UserTurn",
    "is_open_block",
    "lines_of",
    "quoted",
    "read_document",
    "read_prompt_file",
    "read_text_file",
    "read_turn",
    "typed_path",
]

_log = logging.getLogger(__name__)

_QUOTES = '"""'
_MAX_FILE_BYTES = 32 * 2**20

ReadLine = Callable[[bool], str | None]
"""Reads the next line (is it inside of a block?); None at the end of the input. May raise KeyboardInterrupt."""


@dataclass(frozen=True, slots=True)
class UserTurn:
    """An input of the user: a prompt, a command or a path.

    is_literal: a block or several lines, which are never a command or a path.
    has_attachments: whether `@path` in it attaches that file; a text that comes from elsewhere is left as it is.
    document: what the text is about, to be put below it.
    """

    text: str
    is_literal: bool = False
    has_attachments: bool = True
    document: str = ""


class TurnSource(ABC):
    """A source of the user's turns. has_commands: whether more turns, and commands among them, can follow an answer."""

    has_commands = True

    @abstractmethod
    def read_turn(self) -> UserTurn | None:
        """Return the next turn, None at the end. Raises KeyboardInterrupt, and ConfigError for no valid turn."""

    def prefill(self, text: str) -> None:
        """Begin the next turn with `text`, for editing. Raises ConfigError where nobody can edit."""
        raise ConfigError("/edit needs a terminal")

    def confirm(self, question: str) -> bool:
        """Whether the user says yes to `question`. False where no user can be asked."""
        return False

    def record_history(self, is_on: bool) -> None:
        """Set whether prompts are written to the history from now on. Raises ConfigError where there is none."""
        raise ConfigError("only prompts that are typed at a terminal are written to a history")


class LineSource(TurnSource):
    """A source that reads each line as one turn; `\"\"\"` blocks have several lines."""

    def __init__(self, stream: TextIO):
        self._read_line = lines_of(stream)

    def read_turn(self) -> UserTurn | None:
        """Return the next line or `\"\"\"` block; None at the end."""
        return read_turn(self._read_line)


class DocumentSource(TurnSource):
    """A source whose only turn is a whole stream. Nothing in it is a command, a path or an attachment.

    is_needed: whether an empty one deserves a line, because then there is no prompt at all.
    """

    has_commands = False

    def __init__(self, stream: TextIO, is_needed: bool = True):
        self._stream: TextIO | None = stream
        self._is_needed = is_needed

    def read_turn(self) -> UserTurn | None:
        """Return the whole stream as a turn the first time, then None; also None when it is empty."""
        if self._stream is None:
            return None
        text, self._stream = read_document(self._stream), None
        if not text and self._is_needed:
            _log.warning("standard input is empty, so there is no prompt")
        return UserTurn(text, is_literal=True, has_attachments=False) if text else None


class NoSource(TurnSource):
    """A source without turns, for a chat in which nothing follows the first turns."""

    has_commands = False

    def read_turn(self) -> UserTurn | None:
        """Return None: there are no turns."""
        return None


def read_document(stream: TextIO) -> str:
    """Return all of a pipe, without empty lines around it. Raises ConfigError when it is too much for a prompt."""
    text = stream.read(_MAX_FILE_BYTES + 1)
    if len(text) > _MAX_FILE_BYTES:
        raise CapacityError(f"standard input has more than {_MAX_FILE_BYTES // 2**20} MiB, too much for a prompt")
    return text.strip("\n").rstrip()


def is_open_block(text: str) -> bool:
    """Whether `text` opens a `\"\"\"` block that it does not close."""
    start = text.lstrip()
    return start.startswith(_QUOTES) and not start[len(_QUOTES) :].rstrip().endswith(_QUOTES)


def quoted(text: str) -> str:
    """Return `text` as a `\"\"\"` block, so that it is no command and no path."""
    return f"{_QUOTES}{text}{_QUOTES}"


def read_turn(read_line: ReadLine) -> UserTurn | None:
    """Return the next turn, or None at the end of the lines.

    A block opens with `\"\"\"`, ends with `\"\"\"` or with the input.
    """
    text = read_line(False)
    if text is None:
        return None
    if not text.lstrip().startswith(_QUOTES):
        return UserTurn(text.strip(), is_literal="\n" in text.strip())
    while is_open_block(text):
        line = read_line(True)
        if line is None:
            return UserTurn(text.lstrip()[len(_QUOTES) :].strip("\n"), is_literal=True)
        text += "\n" + line
    return UserTurn(text.strip()[len(_QUOTES) : -len(_QUOTES)].strip("\n"), is_literal=True)


def lines_of(stream: TextIO) -> ReadLine:
    """Return a function that reads the next line of a pipe or a file."""

    def read_line(is_inside: bool) -> str | None:
        line = stream.readline()
        return line.removesuffix("\n").removesuffix("\r") if line else None

    return read_line


def typed_path(text: str) -> Path | None:
    """Return the existing file that `text` is the path of, or None."""
    if not text or "\n" in text or "\0" in text or len(text) > 4096:
        return None
    path = Path(os.path.expanduser(text))
    return path if os.path.isfile(path) else None


def read_text_file(path: Path, purpose: str) -> str:
    """Return the text of a file. purpose: what it is wanted for ("a prompt").

    Raises ConfigError when it cannot be that.
    """
    try:
        data = read_named(path, _MAX_FILE_BYTES + 1)  # not by its size: it may grow, and files in /proc have none
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_FILE_BYTES // 2**20} MiB, too much for {purpose}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text, so it cannot be {purpose}") from error
    if "\0" in text:
        raise ConfigError(f"{path} is not text (it has zero bytes), so it cannot be {purpose}")
    if not text.strip():
        raise ConfigError(f"{path} is empty, so it cannot be {purpose}")
    return text.replace("\r\n", "\n")


def read_prompt_file(path: Path) -> str:
    """Return the text of a file, as a prompt. Raises ConfigError when it cannot be one."""
    return read_text_file(path, "a prompt").strip()

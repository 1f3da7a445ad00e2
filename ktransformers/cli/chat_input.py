"""Where the user's turns come from: a terminal with editing and history, or lines of a pipe.

Puts `\"\"\"` blocks together. Does not know commands or models.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ktransformers.errors import ConfigError

__all__ = ["ReadLine", "Turn", "lines_of", "prompt_lines", "read_prompt_file", "read_turn", "typed_path"]

_QUOTES = '"""'
_MAX_FILE_BYTES = 32 * 2**20

ReadLine = Callable[[bool], str | None]
"""Reads the next line (is it inside of a block?); None at the end of the input. May raise KeyboardInterrupt."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user typed. is_literal: a block or pasted lines, which are never a command or a path."""

    text: str
    is_literal: bool = False


def read_turn(read_line: ReadLine) -> Turn | None:
    """The next turn, or None at the end. A block opens with `\"\"\"`, ends with `\"\"\"` or with the input."""
    text = read_line(False)
    if text is None:
        return None
    if not text.lstrip().startswith(_QUOTES):
        return Turn(text.strip(), is_literal="\n" in text.strip())
    body = text.lstrip()[len(_QUOTES) :]
    while not body.rstrip().endswith(_QUOTES):
        line = read_line(True)
        if line is None:
            return Turn(body.strip("\n"), is_literal=True)
        body += "\n" + line
    return Turn(body.rstrip()[: -len(_QUOTES)].strip("\n"), is_literal=True)


def lines_of(stream: TextIO) -> ReadLine:
    """Lines of a pipe or a file."""

    def read_line(is_inside: bool) -> str | None:
        line = stream.readline()
        return line.removesuffix("\n").removesuffix("\r") if line else None

    return read_line


def prompt_lines() -> ReadLine:
    """Lines typed at a terminal, with editing and history; pasted lines come as one. Ctrl-D ends the input."""
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession()

    def read_line(is_inside: bool) -> str | None:
        try:
            return session.prompt("... " if is_inside else ">>> ")
        except EOFError:
            return None

    return read_line


def typed_path(text: str) -> Path | None:
    """The existing file that `text` is the path of, or None."""
    if not text or "\n" in text or "\0" in text or len(text) > 4096:
        return None
    path = Path(os.path.expanduser(text))
    return path if os.path.isfile(path) else None


def read_prompt_file(path: Path) -> str:
    """The text of a file, as a prompt. Raises ConfigError when it cannot be one."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_FILE_BYTES // 2**20} MiB, too much for a prompt")
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text, so it cannot be a prompt") from error
    if not text:
        raise ConfigError(f"{path} is empty, so it cannot be a prompt")
    return text

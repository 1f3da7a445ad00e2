"""API keys: what each may do, and has done lately. Keys are in no log; their names are.

A key counts its requests of the last minute in a window that slides: no 60 seconds ever see more than it may send.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ktransformers.errors import ConfigError, RateLimitError, reason_of
from ktransformers.system.user_files import read_named

__all__ = ["KeyLimits", "KeyUse", "read_api_keys"]

Clock = Callable[[], float]

_WINDOW = 60.0
_MAX_NAME = 64
_LARGEST = {"rpm": 1_000_000, "concurrent": 1 << 20, "priority": 1 << 30}


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one API key; None: no limit of its own.

    name: what the log calls it. rpm: requests for answers within any 60 seconds. concurrent: answers that wait or are
    computed at once. priority: of its requests; they may ask for a later turn, not for an earlier one.
    """

    name: str | None = None
    rpm: int | None = None
    concurrent: int | None = None
    priority: int | None = None


class KeyUse:
    """The answers and requests of one API key at the moment. name: for the log. clock: seconds, for tests."""

    def __init__(self, name: str = "", limits: KeyLimits | None = None, clock: Clock = time.monotonic):
        self.limits = limits or KeyLimits()
        self.name = self.limits.name or name
        self.num_answers = 0  # that wait or are computed; Admission counts them
        self._clock = clock
        self._sent: deque[float] = deque()  # when, of the requests in the window

    def _forget(self) -> float:
        now = self._clock()
        while self._sent and self._sent[0] <= now - _WINDOW:
            self._sent.popleft()
        return now

    def check(self, num_answers: int) -> None:
        """Raise RateLimitError when a request for so many answers is too much now, ConfigError when it always is."""
        concurrent, rpm = self.limits.concurrent, self.limits.rpm
        if concurrent is not None and num_answers > concurrent:
            raise ConfigError(
                f"this API key may have {concurrent} answers at once, and the request asks for {num_answers}"
            )
        if concurrent is not None and self.num_answers + num_answers > concurrent:
            raise RateLimitError(
                f"{self.num_answers} answers for this API key are running or waiting, and it may have {concurrent} at "
                "once; try again when one has ended",
                retry_after=1.0,
            )
        now = self._forget()
        if rpm is not None and len(self._sent) >= rpm:
            wait = self._sent[0] + _WINDOW - now
            raise RateLimitError(
                f"this API key may send {rpm} requests per minute; try again in {wait:.1f} s", retry_after=wait
            )

    def note(self) -> None:
        """Count a request that was let in."""
        if self.limits.rpm is not None:
            self._sent.append(self._forget())

    def priority(self, asked: int) -> int:
        """Return the priority of a request that asks for `asked`; 0 stands for a request that asks for none."""
        own = self.limits.priority
        return asked if own is None else own if asked == 0 else max(asked, own)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of a rate limit that OpenAI's clients read. reset: seconds until nothing of it is used."""
        rpm = self.limits.rpm
        if rpm is None:
            return []
        now = self._forget()
        reset = self._sent[-1] + _WINDOW - now if self._sent else 0.0
        values = {"limit": f"{rpm}", "remaining": f"{rpm - len(self._sent)}", "reset": f"{reset:.3f}s"}
        return [(f"x-ratelimit-{name}-requests".encode(), value.encode()) for name, value in values.items()]


def read_api_keys(keys: list[str], file: Path | None) -> dict[str, KeyLimits]:
    """Read API keys from the command line (each may be a comma-separated list) and from a file: see _key_line.

    Raises ConfigError for an empty key, a key that no HTTP header can carry, or a file without keys.
    """
    found = {key.strip(): KeyLimits() for text in keys for key in text.split(",")}
    if file is not None:
        in_file = _read(file)
        if not in_file:
            raise ConfigError(f"--api_key_file {file} holds no key")
        found |= in_file
    for key in found:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("an API key must not be empty and must consist of visible ASCII characters")
    return found


def _read(file: Path) -> dict[str, KeyLimits]:
    try:
        lines = [line.split() for line in read_named(file).decode().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else reason_of(error)
        raise ConfigError(f"--api_key_file {file} cannot be read: {why}") from error
    found: dict[str, KeyLimits] = {}
    for number, words in enumerate(lines, 1):
        if not words or words[0].startswith("#"):
            continue
        try:
            limits = _key_limits(words[1:])
        except ValueError as error:
            raise ConfigError(f"--api_key_file {file}, line {number}: {error}") from error
        if found.setdefault(words[0], limits) != limits:
            raise ConfigError(f"--api_key_file {file}, line {number}: this key is there already, with other limits")
    return found


def _key_limits(words: list[str]) -> KeyLimits:
    """Of `name=TEXT rpm=N concurrent=N priority=N`, all optional. Errors quote names of options only: a key with a
    space in it may be what comes here.
    """
    given: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or name not in KeyLimits.__dataclass_fields__ or name in given:
            raise ValueError("after the key come name=TEXT, rpm=N, concurrent=N and priority=N, each once at most")
        given[name] = value
    called = given.pop("name", None)
    if called is not None and not (0 < len(called) <= _MAX_NAME and called.isprintable() and called.isascii()):
        raise ValueError(f"name must be 1 to {_MAX_NAME} visible ASCII characters")
    return KeyLimits(called, **{option: _number(option, value) for option, value in given.items()})


def _number(option: str, text: str) -> int:
    largest = _LARGEST[option]
    smallest = -largest if option == "priority" else 1
    try:
        value = int(text)
    except ValueError:
        value = smallest - 1
    if not smallest <= value <= largest:
        raise ValueError(f"{option} must be a whole number from {smallest} to {largest}")
    return value

"""Limits of time and memory for unknown parts of a tokenizer: patterns, replacements.

A tokenizer.json may hold any pattern. Its engine gives up after ten million steps at one place of a text, but not after
as many places as a text has: `(a*)(a*)c|.` takes 7 s for 2,000 letters. Nothing interrupts it, so tokenizers with
patterns of their own work in a process that can be ended, and so do those that make much of little (growth.py); the
process may take so much memory and no more. The patterns of the usual models are known and need none,
the few excepted that look at all digits which follow.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.growth import MOST_GROWTH, growth_of
from ktransformers.tokenizer.pretokenizers import PRE_TOKENIZERS, QUADRATIC_PATTERNS, SPACE_PATTERNS

__all__ = ["PatternTimeout", "TimedEncoder", "unknown_patterns", "why_not_trusted"]

logger = logging.getLogger(__name__)

SECONDS, CHARS_PER_SECOND = 10.0, 100_000.0
"""What a text may take: so long, and more where it is long. A slow machine tokenizes ten times as much in a second."""

_START_SECONDS = 60.0
_KNOWN = {pattern for rule in PRE_TOKENIZERS.values() for pattern in rule.patterns}.difference(QUADRATIC_PATTERNS)
_KNOWN.update(SPACE_PATTERNS)


class PatternTimeout(Exception):
    """The error for a text that took a tokenizer too long."""


def _patterns(part: Any) -> Iterator[str]:
    """All regular expressions in what a tokenizer.json says of one of its parts."""
    if isinstance(part, dict):
        if isinstance(part.get("Regex"), str):
            yield part["Regex"]
        part = list(part.values())
    if isinstance(part, list):
        for value in part:
            yield from _patterns(value)


def unknown_patterns(tokenizer: Any) -> list[str]:
    """Return the unusual patterns that a `tokenizers.Tokenizer` applies to texts before it looks for tokens.

    Raises ConfigError for such a pattern in the decoder, which has no process to work in.
    """

    def of(part: Any) -> list[str]:
        stated = [] if part is None else _patterns(json.loads(part.__getstate__()))
        return [pattern for pattern in stated if pattern not in _KNOWN]

    back = of(tokenizer.decoder)
    if back:
        raise ConfigError(f"the tokenizer's decoder has a pattern of its own, {back[0][:80]!r}, which is not supported")
    return [*of(tokenizer.normalizer), *of(tokenizer.pre_tokenizer)]


def why_not_trusted(tokenizer: Any) -> str | None:
    """Return why texts need limits with a `tokenizers.Tokenizer`, in words; None for usual ones.

    Raises ConfigError as `unknown_patterns`, and for a decoder that makes much of little.
    """
    own, back = unknown_patterns(tokenizer), growth_of(tokenizer.decoder)
    if back > MOST_GROWTH:
        raise ConfigError(f"the tokenizer's decoder makes a text {back:.3g} times as long, which is not supported")
    if own:
        return f"a pattern of its own, {own[0][:80]!r}"
    growth = growth_of(tokenizer.normalizer) * growth_of(tokenizer.pre_tokenizer)
    return f"replacements that may make a text {growth:.3g} times as long" if growth > MOST_GROWTH else None


class TimedEncoder:
    """Encodes one text after the other in a process, which is ended when one takes too long; any thread may ask."""

    def __init__(self, tokenizer: Any):
        self._stated: str = tokenizer.to_str()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ends: weakref.finalize[..., TimedEncoder] | None = None
        self._pid = os.getpid()

    def encode(self, text: str, add_special_tokens: bool, seconds: float | None = None) -> list[int] | str:
        """Return token ids, or why the tokenizer gave up. seconds: by the text's length. Raises PatternTimeout."""
        with self._lock:
            seconds = SECONDS + len(text) / CHARS_PER_SECOND if seconds is None else seconds
            if self._pid != os.getpid():  # after a fork: the process answers the parent
                self._process, self._ends, self._pid = None, None, os.getpid()
            try:
                process = self._process or self._start()
                answer: list[int] | str = _ask(process, [text, add_special_tokens], seconds)
            except OSError:
                self.close()
                return "its process died, as it does when it makes too much of a text"
            except BaseException:  # an answer that comes later would be taken for that to another text
                self.close()
                raise
            return answer

    def _start(self) -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("encoder_process.py")
        command = [sys.executable, "-P", str(program), *sys.path]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},  # stacks count as memory
        )
        self._process, self._ends = process, weakref.finalize(self, _end, process, self._pid)
        assert process.stdin is not None
        process.stdin.write(self._stated.encode() + b"\n")
        _ask(process, ["", False], _START_SECONDS)
        return process

    def close(self) -> None:
        """End the encoder's process. Another one is started when a text comes."""
        if self._ends is not None:
            self._ends()
        self._process = self._ends = None


def _ask(process: subprocess.Popen[bytes], question: list[Any], seconds: float) -> Any:
    """Raises PatternTimeout, and OSError for a process that died."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(question).encode() + b"\n")
    process.stdin.flush()
    answer, until = b"", time.monotonic() + seconds
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while not answer.endswith(b"\n"):
        if not poll.poll(1000 * max(until - time.monotonic(), 0.0)):
            raise PatternTimeout(f"it took more than {seconds:.0f} s")
        piece = os.read(process.stdout.fileno(), 1 << 20)
        if not piece:
            raise BrokenPipeError
        answer += piece
    return json.loads(answer)


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

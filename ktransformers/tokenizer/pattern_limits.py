"""Limits of time and memory for unknown parts of a tokenizer: patterns, replacements.

A tokenizer.json may hold any pattern. Its engine gives up after ten million steps at one place of a text, but not after
as many places as a text has: `(a*)(a*)c|.` takes 7 s for 2,000 letters. Nothing interrupts it, so tokenizers with
patterns of their own work in a process that can be ended, and so do those that make much of little (growth.py); the
process may take so much memory and no more. The patterns of the usual models are known and need none,
the few excepted that look at all digits which follow.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ktransformers.errors import ConfigError
from ktransformers.system.asked_process import AskedProcess, ProcessEndedError
from ktransformers.tokenizer.growth import MOST_GROWTH, growth_of
from ktransformers.tokenizer.pretokenizers import PRE_TOKENIZERS, QUADRATIC_PATTERNS, SPACE_PATTERNS

__all__ = ["TimedEncoder", "unknown_patterns", "why_not_trusted"]

SECONDS, CHARS_PER_SECOND = 10.0, 100_000.0
"""What a text may take: so long, and more where it is long. A slow machine tokenizes ten times as much in a second."""

_START_SECONDS = 60.0
_KNOWN = {pattern for rule in PRE_TOKENIZERS.values() for pattern in rule.patterns}.difference(QUADRATIC_PATTERNS)
_KNOWN.update(SPACE_PATTERNS)


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
        program = Path(__file__).with_name("encoder_process.py")
        command = [sys.executable, "-P", str(program), *sys.path]
        env = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # stacks count as memory
        self.child = AskedProcess(command, tokenizer.to_str().encode(), _START_SECONDS, env)

    def encode(self, text: str, add_special_tokens: bool, seconds: float | None = None) -> list[int] | str:
        """Return token ids, or why the tokenizer gave up. seconds: by the text's length. Raises AnswerTimeout."""
        seconds = SECONDS + len(text) / CHARS_PER_SECOND if seconds is None else seconds
        try:
            answer = self.child.ask(json.dumps([text, add_special_tokens]).encode(), seconds)
        except ProcessEndedError:
            return "its process died, as it does when it makes too much of a text"
        ids: list[int] | str = json.loads(answer)
        return ids

    def close(self) -> None:
        """End the encoder's process. Another one is started when a text comes."""
        self.child.close()

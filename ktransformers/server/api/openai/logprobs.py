"""Log probabilities in the two shapes of OpenAI's API. Knows tokens and their bytes, not requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ktransformers.core import TokenLogprobs
from ktransformers.tokenizer import Tokenizer

__all__ = ["CompletionLogprobs", "chat_logprobs"]


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token_id)
    return {"token": spelled.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(spelled)}


def _finite(logprob: float) -> float:
    """OpenAI's stand-in for a probability of zero, which JSON cannot carry."""
    return max(logprob, -9999.0)


def chat_logprobs(tokenizer: Tokenizer, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    """Return one element of choices[].logprobs.content, for one token of a chat answer."""
    top = [_entry(tokenizer, other, value) for other, value in logprobs.top]
    return _entry(tokenizer, token_id, logprobs.logprob) | {"top_logprobs": top}


@dataclass(slots=True)
class CompletionLogprobs:
    """The field choices[].logprobs of /v1/completions, built token by token. text_offset counts characters from the
    beginning of the choice's text.
    """

    tokenizer: Tokenizer
    _offset: int = 0
    _tokens: list[str] = field(default_factory=list)
    _logprobs: list[float | None] = field(default_factory=list)
    _tops: list[dict[str, float] | None] = field(default_factory=list)
    _offsets: list[int] = field(default_factory=list)

    def add(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Add the next token. logprobs None: the first token of a prompt, which nothing comes before."""
        token = self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        self._tokens.append(token)
        self._offsets.append(self._offset)
        self._offset += len(token)
        if logprobs is None:
            self._logprobs.append(None)
            self._tops.append(None)
            return
        self._logprobs.append(_finite(logprobs.logprob))
        tops: dict[str, float] = {}
        for other, value in logprobs.top:
            name = self.tokenizer.token_bytes(other).decode("utf-8", "replace")
            tops.setdefault(name, _finite(value))
        self._tops.append(tops)

    def take(self) -> dict[str, Any]:
        """Return the fields for the tokens that were added since the last call."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }
        self._tokens, self._logprobs, self._tops, self._offsets = [], [], [], []
        return taken

"""What becomes of the fields that Ollama's clients send, by one table per object. Knows no model and no HTTP.

null, a neutral value ──> as if absent        a field of the body's class ──> read there
hint ───────────────────> taken, without any effect on the answer
refuse ─────────────────> 400 that names what to use instead
any other name ─────────> taken, logged once, named in the response's header (--strict_requests: 400)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CHAT",
    "EMBED",
    "GENERATE",
    "IGNORED_HEADER",
    "OPTIONS",
    "FieldTable",
    "LoggedNames",
    "Rule",
    "hint",
    "honour",
    "refuse",
    "shown_names",
    "without_neutral",
]

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-ktransformers-ignored"
"""Of responses: names of the request's fields that had no effect, separated by commas."""

_MAX_FIELDS = 256
_MAX_SHOWN = 32
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of a field whose value is neither null nor among `neutral`.

    nearest: refuse the value, and say what to use instead. is_hint: drop it. Neither: the body's class reads it.
    """

    neutral: tuple[Any, ...] = ()
    nearest: str | None = None
    is_hint: bool = False


FieldTable = Mapping[str, Rule]
"""The names that an object of this dialect may have."""


def honour(*neutral: Any) -> Rule:
    """The body's class reads the field."""
    return Rule(neutral)


def hint() -> Rule:
    """About memory, speed or what happens at the end of the context: whatever it says, the answer is the same."""
    return Rule(is_hint=True)


def refuse(nearest: str, *neutral: Any) -> Rule:
    """It would change the answer and cannot be honoured. nearest: what to do instead, as in "use nearest"."""
    return Rule(neutral, nearest=nearest)


_COMMON: FieldTable = {
    "model": honour(),
    "options": honour({}),
    "keep_alive": honour(),  # the model stays loaded: only 0, which asks for the opposite, is more than a hint
}

_ANSWER: FieldTable = {
    **_COMMON,
    "stream": honour(),
    "format": honour(""),
    "think": honour(),
    "logprobs": honour(False),
    "top_logprobs": honour(0),
    "truncate": hint(),  # a prompt that does not fit is an error here, never cut
    "shift": hint(),  # an answer ends at the end of the context
}

CHAT: FieldTable = {**_ANSWER, "messages": honour(), "tools": honour([])}
"""POST /api/chat."""

GENERATE: FieldTable = {
    **_ANSWER,
    "prompt": honour(),
    "system": honour(""),
    "raw": honour(False),
    "template": refuse("raw: true with the whole prompt, or start the server with another chat template", ""),
    "suffix": refuse("prompt alone", ""),
    "images": refuse("text alone", []),
    "context": refuse("/api/chat with messages", []),
}
"""POST /api/generate."""

EMBED: FieldTable = {
    **_COMMON,
    "input": honour(),
    "prompt": honour(),
    "truncate": honour(),
    "dimensions": honour(),
}
"""POST /api/embed and /api/embeddings."""

OPTIONS: FieldTable = {
    "num_predict": honour(),
    "num_ctx": honour(),
    "temperature": honour(),
    "top_k": honour(),
    "top_p": honour(),
    "min_p": honour(),
    "seed": honour(),
    "stop": honour(),
    "repeat_penalty": honour(),
    "repeat_last_n": honour(),
    "presence_penalty": honour(),
    "frequency_penalty": honour(),
    # Samplers that there are none of here.
    "mirostat": refuse("temperature, top_p or min_p", 0),
    "mirostat_tau": hint(),  # these two mean something beside mirostat only
    "mirostat_eta": hint(),
    "typical_p": refuse("top_p or min_p", 1),
    "tfs_z": refuse("top_p or min_p", 1),
    "penalize_newline": refuse("repeat_penalty for all tokens alike", True),
    # How a model is loaded: the server's own flags say that.
    "numa": hint(),
    "num_batch": hint(),
    "num_gpu": hint(),
    "main_gpu": hint(),
    "num_thread": hint(),
    "num_keep": hint(),
    "low_vram": hint(),
    "f16_kv": hint(),
    "logits_all": hint(),
    "vocab_only": hint(),
    "use_mmap": hint(),
    "use_mlock": hint(),
    "embedding_only": hint(),
}
"""`options` of all of them."""


def without_neutral(body: Mapping[str, Any], table: FieldTable) -> dict[str, Any]:
    """The fields that say something, those that no table knows among them. Raises ValueError for a refused one."""
    if len(body) > _MAX_FIELDS:
        raise ValueError(f"{len(body)} fields are more than any request has")
    kept = {}
    for name, value in body.items():
        rule = table.get(name, Rule())
        if value is None or rule.is_hint or any(_is_same(value, neutral) for neutral in rule.neutral):
            continue
        if rule.nearest is not None:
            raise ValueError(f"{name} is not supported here; use {rule.nearest}")
        kept[name] = value
    return kept


def _is_same(value: Any, other: Any) -> bool:
    """Equal, and true is no 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def shown_names(names: Iterable[str]) -> list[str]:
    """Names as a header and a log may carry them."""
    return list(dict.fromkeys(name if _NAME.fullmatch(name) else "?" for name in names))[:_MAX_SHOWN]


@dataclass(slots=True)
class LoggedNames:
    """Says each name once, and no more than `limit`: whoever sends others all the time does not fill the log."""

    limit: int = 200
    _said: set[str] = field(default_factory=set)

    def say(self, names: Iterable[str]) -> None:
        """Log the new ones among them."""
        for name in shown_names(names):
            if name not in self._said and len(self._said) < self.limit:
                self._said.add(name)
                logger.warning("requests carry %s, which has no effect here", name)

"""Reads vLLM's --speculative-config, one JSON object that says what here are two flags. Knows no parser."""

from __future__ import annotations

import json
from typing import NamedTuple

from ktransformers.errors import ConfigError

__all__ = ["NO_DRAFT_MODELS", "NO_JSON", "SpeculativeWords", "speculative_words"]

NO_DRAFT_MODELS = (
    "draft models and MTP heads are not supported here; draft tokens come from the text itself: --speculative ngram"
)
"""Said of every flag and value that needs one."""

NO_JSON = 'it must be a JSON object, such as {"method": "ngram", "num_speculative_tokens": 5}'

_NGRAM = ("ngram", "[ngram]", "ngram_gpu")
_METHOD, _MODEL, _COUNT = "method", "model", "num_speculative_tokens"


class SpeculativeWords(NamedTuple):
    """What stands for the flag on our command line, and the note about what has no effect, empty when all has."""

    words: list[str]
    note: str


def speculative_words(text: str) -> SpeculativeWords:
    """Return our flags for vLLM's. Raises ConfigError for what is no such object, or asks for a draft model."""
    try:
        config: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(NO_JSON) from error
    if not isinstance(config, dict):
        raise ConfigError(NO_JSON)
    said = {name: value for name, value in config.items() if value is not None}
    method = said.pop(_METHOD, None) or said.get(_MODEL)
    if method is None:
        raise ConfigError(f"it names no {_METHOD}; {NO_JSON}")
    if method not in _NGRAM or said.pop(_MODEL, method) not in _NGRAM:
        raise ConfigError(f"{_METHOD} {method!r:.40}: {NO_DRAFT_MODELS}")
    words, count = ["--speculative=ngram"], said.pop(_COUNT, None)
    if count is not None:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"{_COUNT} must be a whole number above 0, got {count!r:.40}")
        words.append(f"--speculative_tokens={count}")
    names = ", ".join(sorted(said))
    return SpeculativeWords(words, f"{names}: without effect; how long matches are is found out" if said else "")

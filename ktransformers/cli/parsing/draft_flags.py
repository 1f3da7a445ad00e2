"""Reads vLLM's --speculative-config, one JSON object that says what here are two flags. Knows no parser."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from ktransformers.errors import ConfigError

__all__ = ["NO_JSON", "OTHER_DRAFTERS", "SpeculativeWords", "speculative_words"]

OTHER_DRAFTERS = (
    "draft tokens come from the text (--speculative ngram), from a smaller model (--draft_model) or from the model's "
    "own MTP layers (--speculative mtp); EAGLE, Medusa and others are not supported here"
)
"""Said of every flag and value that names something else."""

NO_JSON = 'it must be a JSON object, such as {"method": "ngram", "num_speculative_tokens": 5}'

_NGRAM = ("ngram", "[ngram]", "ngram_gpu")
_DRAFT = "draft_model"
_MTP = re.compile(r"(.*_)?mtp")  # some versions name the family, too: deepseek_mtp
_METHOD, _MODEL, _COUNT = "method", "model", "num_speculative_tokens"


class SpeculativeWords(NamedTuple):
    """What stands for the flag on our command line, and the note about what has no effect, empty when all has."""

    words: list[str]
    note: str


def speculative_words(text: str) -> SpeculativeWords:
    """Return our flags for vLLM's. Raises ConfigError for what is no such object, or names another drafter."""
    try:
        config: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(NO_JSON) from error
    if not isinstance(config, dict):
        raise ConfigError(NO_JSON)
    said = {name: value for name, value in config.items() if value is not None}
    words, count = [_drafter(said.pop(_METHOD, None), said.pop(_MODEL, None))], said.pop(_COUNT, None)
    if count is not None:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"{_COUNT} must be a whole number above 0, got {count!r:.40}")
        words.append(f"--speculative_tokens={count}")
    names = ", ".join(sorted(said))
    return SpeculativeWords(words, f"{names}: without effect; how long matches are is found out" if said else "")


def _drafter(method: object, model: object) -> str:
    """The word of ours that names the drafter. Raises ConfigError."""
    if method is None and model is None:
        raise ConfigError(f"it names no {_METHOD}; {NO_JSON}")
    if model in _NGRAM and method in (None, *_NGRAM):
        return "--speculative=ngram"
    if isinstance(model, str) and method in (None, _DRAFT):
        return f"--draft_model={model}"
    if model is None and isinstance(method, str):
        if method in _NGRAM:
            return "--speculative=ngram"
        if _MTP.fullmatch(method):
            return "--speculative=mtp"
        if method == _DRAFT:
            raise ConfigError(f"{_METHOD} {method!r} needs a {_MODEL}")
    raise ConfigError(f"{_METHOD} {method!r:.40}, {_MODEL} {model!r:.40}: {OTHER_DRAFTERS}")

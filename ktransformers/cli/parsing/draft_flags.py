"""Reads flags of other programs that say by one value what here are several flags: vLLM's --speculative-config, a JSON
object, and llama.cpp's --spec-type, a list. Knows no parser."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from ktransformers.errors import ConfigError

__all__ = ["NO_JSON", "OTHER_DRAFTERS", "SpeculativeWords", "method_words", "spec_type_words", "speculative_words"]

OTHER_DRAFTERS = (
    "draft tokens come from the text (--speculative ngram), from a smaller model (--draft_model) or from the model's "
    "own MTP layers (--speculative mtp); EAGLE, Medusa and others are not supported here"
)
"""Said of every flag and value that names something else."""

NO_JSON = 'it must be a JSON object, such as {"method": "ngram", "num_speculative_tokens": 5}'

_FOUND_OUT = "how long matches are, and how many draft tokens pay, is found out"

_NGRAM = ("ngram", "[ngram]", "ngram_gpu")
_DRAFT = "draft_model"
_MTP = re.compile(r"(.*_)?mtp|dspark")  # some versions name the family, too: deepseek_mtp
_TYPES = {"none": "off", "draft": "draft", "draft-simple": "draft"}
_TYPES |= dict.fromkeys(("mtp", "draft-mtp", "dspark", "draft-dspark"), "mtp")
_TYPES |= dict.fromkeys(("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"), "ngram")
_METHOD, _MODEL, _COUNT = "method", "model", "num_speculative_tokens"


class SpeculativeWords(NamedTuple):
    """The words that replace a foreign flag on our command line, and a note on settings of it without effect, or ""."""

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
    words, count = _drafter(said.pop(_METHOD, None), said.pop(_MODEL, None)), said.pop(_COUNT, None)
    if count is not None:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"{_COUNT} must be a whole number above 0, got {count!r:.40}")
        words.append(f"--speculative_tokens={count}")
    names = ", ".join(sorted(said))
    return SpeculativeWords(words, f"{names}: without effect; {_FOUND_OUT}" if said else "")


def method_words(text: str) -> SpeculativeWords:
    """Return our flag for the method of vLLM's object, given by itself; the model of one that has one is a flag of its
    own. Raises ConfigError for other drafters."""
    if text == _DRAFT:
        return SpeculativeWords(["--speculative=draft"], "")
    if text not in _NGRAM and not _MTP.fullmatch(text):
        raise ConfigError(OTHER_DRAFTERS)
    return SpeculativeWords(_drafter(text, None), "")


def spec_type_words(text: str) -> SpeculativeWords:
    """Return our flag for llama.cpp's list of drafters, of which those of n-grams go with any other one here too.
    Raises ConfigError for others."""
    try:
        named = {_TYPES[name.strip().lower()] for name in text.split(",")}
    except KeyError as error:
        raise ConfigError(OTHER_DRAFTERS) from error
    own = (named - {"ngram"}) or named
    if len(own) > 1 or own < named == {"off", "ngram"}:
        raise ConfigError(f"of {text!r:.60} one can be had, and with draft or mtp n-grams are looked at, too")
    return SpeculativeWords([f"--speculative={own.pop()}"], "")


def _drafter(method: object, model: object) -> list[str]:
    """The words of ours that name the drafter. Raises ConfigError."""
    if method is None and model is None:
        raise ConfigError(f"it names no {_METHOD}; {NO_JSON}")
    if model in _NGRAM and method in (None, *_NGRAM):
        return ["--speculative=ngram"]
    of_model = [f"--draft_model={model}"] if isinstance(model, str) else []
    if of_model and method in (None, _DRAFT):
        return of_model
    if isinstance(method, str) and _MTP.fullmatch(method) and (of_model or model is None):
        return [*of_model, "--speculative=mtp"]  # with a model: an assistant
    if model is None and isinstance(method, str):
        if method in _NGRAM:
            return ["--speculative=ngram"]
        if method == _DRAFT:
            raise ConfigError(f"{_METHOD} {method!r} needs a {_MODEL}")
    raise ConfigError(f"{_METHOD} {method!r:.40}, {_MODEL} {model!r:.40}: {OTHER_DRAFTERS}")

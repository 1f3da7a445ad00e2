"""Regular expressions of schemas: without what no grammar follows, and asked of llguidance.

Source: JSON Schema takes ECMA-262's; llguidance's are Rust's, without look-around.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

from ktransformers.tokenizer.schemas.options import JSON_OPTIONS

__all__ = ["MAX_PATTERN", "are_apart", "followed", "is_plain", "matches", "without_assertions"]

_LOOK = re.compile(r"\(\?(?:[=!]|<[=!])")
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[=!]|<[=!])|\(|\)|.", re.DOTALL)
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})\??")
MAX_PATTERN = 4096


@functools.lru_cache(maxsize=4096)
def _verdict(text: str) -> str:
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
        return str(LLMatcher.validate_grammar(grammar, limits=LLParserLimits(verbose_errors=False)))
    except ValueError as error:
        return str(error)


def followed(schema: dict[str, Any]) -> bool | None:
    """Whether llguidance can follow a small core schema; None: it says that nothing fits."""
    said = _verdict(json.dumps(schema))
    if not said:
        return True
    return None if "Unsatisfiable" in said else False


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern is found in a name. False, too, for one that cannot be followed."""
    both = {"enum": [name], "anyOf": [{"type": "string", "pattern": pattern}]}
    return followed(both) is True


def are_apart(patterns: list[str]) -> bool:
    """Whether no name fits two of the patterns."""
    return followed({"type": "object", "patternProperties": {pattern: {} for pattern in patterns}}) is True


def _tokens(pattern: str) -> Iterator[str]:
    yield from (found[0] for found in _TOKEN.finditer(pattern))


def without_assertions(pattern: str) -> str:
    r"""Return a pattern without look-around, \b and \B: what it matches, and perhaps more."""
    kept, depth, skipped, at = list[str](), 0, 0, 0
    while at < len(pattern):
        found = _TOKEN.match(pattern, at)
        assert found is not None
        token, at = found[0], found.end()
        opens, closes = token.startswith("("), token == ")"
        depth += opens - closes
        if skipped:
            if closes and depth < skipped:
                skipped = 0
                quantifier = _QUANTIFIER.match(pattern, at)
                at = quantifier.end() if quantifier else at
        elif _LOOK.fullmatch(token):
            skipped = depth
        elif token not in (r"\b", r"\B"):
            kept.append(token)
    return "".join(kept)


def is_plain(pattern: str) -> bool:
    """Whether a pattern asserts nothing about what stands beside a match."""
    return not any(_LOOK.fullmatch(token) or token in (r"\b", r"\B") for token in _tokens(pattern))

"""The factor by which a tokenizer lengthens a text before it looks for tokens.

A tokenizer.json may say that each "a" becomes "aa", forty times over: of a word that is a terabyte. Only its longest
stretch counts here, so that the answer is a bound.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import msgspec

__all__ = ["MOST_GROWTH", "growth_of", "why_too_much"]

MOST_GROWTH = 64
"""Of tokenizers that are trusted: in Llama's a space becomes three bytes, and no published one makes ten of one."""

_MOST_LOADABLE = 10_000
"""Beyond this a tokenizer is not even loaded: the library normalizes added tokens then."""

_LONG = 64  # bytes that one character may become in Unicode's own tables, with room


def growth_of(part: Any) -> float:
    """Return the factor by which a part of a `tokenizers.Tokenizer` lengthens a text; 1 for None.

    The parts are normalizer, pre-tokenizer and decoder.
    """
    return 1.0 if part is None else _growth(json.loads(part.__getstate__()))


class _Parts(msgspec.Struct):
    """Of a tokenizer.json, without its vocabulary."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


def why_too_much(data: bytes) -> str | None:
    """Return why a tokenizer.json with these bytes must not be loaded; None when it may, or is none."""
    try:
        parts = msgspec.json.decode(data, type=_Parts)
    except (msgspec.MsgspecError, RecursionError):  # which the library says better
        return None
    for name in _Parts.__struct_fields__:
        growth = _growth(getattr(parts, name))
        if growth > _MOST_LOADABLE:
            return f"its {name} makes a text {growth:.3g} times as long, which is not supported"
    return None


def _growth(stated: Any) -> float:
    if isinstance(stated, list):
        product = 1.0
        for each in stated:
            product = min(product * _growth(each), 1e300)
        return product
    if not isinstance(stated, dict):
        return 1.0
    kind, own = stated.get("type"), 1.0
    if kind == "Replace":
        own = _replaced(stated.get("pattern"), stated.get("content"))
    elif kind == "Prepend":
        own = max(_bytes(stated.get("prepend")) / _LONG, 1.0)
    elif kind == "ByteLevel":
        own = 2.0  # half of all bytes are written as characters of two
    elif kind == "Precompiled":
        own = _precompiled(stated.get("precompiled_charsmap"))
    elif kind in ("Metaspace", "CTC", "WordPiece", "BPEDecoder"):
        names = ("replacement", "word_delimiter_token", "pad_token", "prefix", "suffix")
        own = max(*(_bytes(stated.get(name)) / _LONG for name in names), 1.0)
    parts = [value for value in stated.values() if isinstance(value, dict | list)]
    return min(own * _growth(parts), 1e300)


def _bytes(text: Any) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0


def _replaced(pattern: Any, content: Any) -> float:
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    if literal:
        return max(_bytes(content) / _bytes(literal), 1.0)
    return max(_bytes(content), 1) + float(literal == "" or _may_match_nothing(pattern))


_ZERO_WIDTH = re.compile(r"\(\?[=!<]|\\[bBAzZGK]|[\^$]")


def _may_match_nothing(pattern: Any) -> bool:
    """Whether a regular expression may match between any two characters, so that all of the text stays besides."""
    text = pattern.get("Regex") if isinstance(pattern, dict) else None
    if not isinstance(text, str) or _ZERO_WIDTH.search(text):
        return True
    try:
        return re.match(text, "") is not None
    except (re.error, RecursionError, OverflowError):
        return True


def _precompiled(charsmap: Any) -> float:
    """SentencePiece's table: a trie with its length in front, then what characters become, each followed by a NUL."""
    try:
        data = base64.b64decode(charsmap)
    except (TypeError, ValueError):
        return 1.0
    size = int.from_bytes(data[:4], "little")
    return max(max(map(len, data[4 + size :].split(b"\0"))) / _LONG, 1.0)

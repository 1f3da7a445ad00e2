"""Replaces halves of characters in text: lone surrogates, which JSON can spell and no tokenizer or file can take.

Programs that count in UTF-16 (JavaScript's) cut emoji in half where they shorten a text. Each half becomes U+FFFD, as
the Unicode standard and every decoder have it. Knows no fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

__all__ = ["is_whole", "may_have_halves", "whole_text", "with_whole_texts"]

_ESCAPED = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"  # a first half without a second one
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"  # the other way round
    rb"|\\\\u[dD][89a-fA-F]"  # behind a backslash, which decides what is a half of what
    rb"|\xed[\xa0-\xbf]"  # as bytes, which json.loads lets through
)

Path = tuple[str, ...]
"""Names of fields from the outermost one on; elements of lists that have a `type` are [TYPE], others have none."""


def may_have_halves(data: bytes) -> bool:
    """Whether a JSON text may hold lone surrogates; False: it holds none."""
    return _ESCAPED.search(data) is not None


def is_whole(text: str) -> bool:
    """Whether a text is Unicode, without lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def whole_text(text: str) -> str:
    """Return the text with U+FFFD for each lone surrogate; pairs of them are the character that they stand for."""
    return text if is_whole(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def with_whole_texts(value: Any, note: Callable[[Path], object], at: Path = ()) -> Any:
    """Return the same JSON-like value with whole texts, names of members included. Nothing in it is changed.

    note: called with the place of each text that was not whole. Members whose names become the same get different ones.
    """
    if isinstance(value, str):
        if is_whole(value):
            return value
        note(at)
        return whole_text(value)
    if isinstance(value, list):
        if not any(isinstance(one, str | list | dict) for one in value):
            return value
        return [with_whole_texts(one, note, (*at, *_type_of(one))) for one in value]
    if not isinstance(value, dict):
        return value
    made: dict[str, Any] = {}
    for key, one in value.items():
        name = whole_text(key)
        if name != key:
            note(at)
            while name in made or name in value:
                name += "\ufffd"
        made[name] = with_whole_texts(one, note, (*at, name))
    return made


def _type_of(value: Any) -> Path:
    kind = value.get("type") if isinstance(value, dict) else None
    return (f"[{kind}]",) if isinstance(kind, str) else ()

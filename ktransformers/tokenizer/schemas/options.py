"""Options of JSON in grammars: the ways in which it is written where a grammar says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = ["JSON_OPTIONS"]

JSON_OPTIONS: JsonCompileOptions = {
    "lenient": False,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""On one line, as most models write calls of tools. Any amount of whitespace would let a model write nothing else to
the end of its tokens, and llguidance repeats a whitespace_pattern."""

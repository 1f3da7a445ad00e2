"""Estimates how much memory an operation of a chat template would take, before it is done.

What runs in C cannot be interrupted: a list that holds another one twice, sixty times over, is a text of 2^60
characters, and one call makes it. Knows no Jinja.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["MAX_FORMAT_CHARS", "estimated_nbytes", "resident_nbytes", "text_size"]

MAX_FORMAT_CHARS = 1000
"""Of a format for a date: each directive takes microseconds in C."""

_PIECE_NBYTES = 64  # of a short text in a list
_POINTER_NBYTES = 8
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_STATM = Path("/proc/self/statm")


def text_size(value: Any, most: int) -> int:
    """Return the characters of a value as text, or elements that comparing it visits; more than `most`: too much.

    Of a list or mapping everything counts as often as it is reached. One that holds itself is too much.
    """
    return _size(value, most, {})


def _size(value: Any, most: int, known: dict[int, int | None]) -> int:
    """known: sizes of containers by id, None of those that are being measured."""
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, list | tuple | dict | set | frozenset):
        return 1
    if id(value) in known:
        found = known[id(value)]
        return most + 1 if found is None else found
    known[id(value)] = None
    total = 2
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    for part in parts:
        total += 2 + _size(part, most, known)
        if total > most:
            return most + 1
    known[id(value)] = total
    return total


def _nbytes(value: Any) -> int:
    return sys.getsizeof(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def estimated_nbytes(name: str, subject: Any, args: Sequence[Any]) -> int:
    """Estimate the bytes that a method or filter makes of `subject`, at least where they may be many; else 0."""
    if not isinstance(subject, str):
        return 0
    wide = max(sys.getsizeof(subject), 1)
    if name in ("split", "rsplit"):
        separator = args[0] if args and isinstance(args[0], str) and args[0] else None
        pieces = subject.count(separator) if separator is not None else len(subject) // 2
        return pieces * _PIECE_NBYTES
    if name in ("splitlines", "wordwrap", "wordcount", "title"):
        return len(subject) * _PIECE_NBYTES // 2
    if name in ("list", "sort", "batch", "slice", "map", "select", "reject", "unique", "groupby", "reverse", "tojson"):
        return len(subject) * _POINTER_NBYTES
    if name == "expandtabs":
        return subject.count("\t") * max((arg for arg in args if isinstance(arg, int)), default=8)
    if name in ("striptags", "urlize", "xmlattr", "pprint", "urlencode"):  # regular expressions over all of it
        return wide * 64
    if name in ("format", "format_map", "%"):
        given = [part for arg in args for part in (arg.values() if isinstance(arg, dict) else [arg])]
        given = [part for arg in given for part in (arg if isinstance(arg, list | tuple) else [arg])]
        return max(subject.count("{"), subject.count("%")) * max(map(_nbytes, given), default=0)
    return 0


def resident_nbytes() -> int | None:
    """Return the bytes of this process in RAM; None where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_NBYTES
    except (OSError, ValueError, IndexError):
        return None

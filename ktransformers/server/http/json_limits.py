"""Finds how large and how deep a JSON text is, without building anything from it. Knows no fields.

Parsing and checking a document holds the interpreter's lock, so the time it takes is the time that every stream waits,
on whatever thread it is done. The work is in proportion to the values, not to the bytes: they are counted first, with
numpy, in pieces between which other threads run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ktransformers.errors import ConfigError

__all__ = ["MAX_DEPTH", "JsonLimits", "JsonSize", "json_size"]

MAX_DEPTH = 100
"""Most lists and objects within each other. Chat templates and schemas recurse; Python gives up at some hundreds."""

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class JsonSize:
    """The size of a JSON text. depth: most lists and objects within each other. num_values: at least the elements of
    all lists and objects.

    num_nodes: strings (names of fields too), lists and objects.
    """

    depth: int = 0
    num_values: int = 0
    num_nodes: int = 0


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Limits of the JSON texts that a server takes; the meaning of each is JsonSize's. max_bytes: of the whole text."""

    max_bytes: int
    max_values: int
    max_nodes: int
    max_depth: int = MAX_DEPTH

    def check(self, data: bytes, what: str = "the body") -> None:
        """Raise ConfigError for a text that is larger or deeper, or not UTF-8 as far as its first bytes show."""
        if json.detect_encoding(data) not in ("utf-8", "utf-8-sig"):
            raise ConfigError(f"{what} is not valid JSON: send it as UTF-8")
        size = json_size(data)
        for found, limit, of in (
            (size.depth, self.max_depth, "lists and objects within each other"),
            (size.num_values, self.max_values, "values"),
            (size.num_nodes, self.max_nodes, "strings, lists and objects"),
        ):
            if found > limit:
                raise ConfigError(f"{what} has {found} {of}, and this server takes {limit}")


def json_size(data: bytes) -> JsonSize:
    """Return the size of what a parser makes of `data`; of text that is no JSON, of what comes before the mistake at
    least.
    """
    is_inside, is_odd = False, False  # within a string; behind an odd number of backslashes
    depth, max_depth, num_values, num_nodes = 0, 0, 1, 0
    whole = np.frombuffer(data, dtype=np.uint8)
    for start in range(0, len(data), _PIECE):
        piece = whole[start : start + _PIECE]
        quotes, is_odd = _plain_quotes(piece, is_odd)
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8))
        if is_inside:
            inside ^= 1
        is_inside = bool(inside[-1])
        outside = inside == 0
        folded = piece | 0x20  # [ and {, ] and } differ in this bit
        opens = outside & (folded == ord("{"))
        brackets = np.flatnonzero(opens | (outside & (folded == ord("}"))))
        if brackets.size:
            depths = depth + np.cumsum(np.where(opens[brackets], 1, -1))
            depth, max_depth = int(depths[-1]), max(max_depth, int(depths.max()))
        num_opens = int(np.count_nonzero(opens))
        num_values += int(np.count_nonzero(outside & (piece == ord(",")))) + num_opens
        num_nodes += int(np.count_nonzero(quotes & (inside == 1))) + num_opens
    return JsonSize(max_depth, num_values, num_nodes)


def _plain_quotes(piece: npt.NDArray[np.uint8], is_odd: bool) -> tuple[npt.NDArray[np.bool_], bool]:
    """Where `piece` has quotation marks that no backslash escapes, and whether its end is behind an odd number of them.

    is_odd: whether its beginning is.
    """
    quotes = piece == ord('"')
    slashes = np.flatnonzero(piece == ord("\\"))
    if not slashes.size:
        if is_odd:
            quotes[0] = False
        return quotes, False
    breaks = np.flatnonzero(np.diff(slashes) != 1)
    firsts = slashes[np.concatenate(([0], breaks + 1))]
    lasts = slashes[np.concatenate((breaks, [slashes.size - 1]))]
    lengths = lasts - firsts + 1
    if is_odd and firsts[0] == 0:
        lengths[0] += 1
    elif is_odd:
        quotes[0] = False
    escaped = lasts[lengths % 2 == 1] + 1
    ends_odd = bool(escaped.size) and int(escaped[-1]) == piece.size
    quotes[escaped[:-1] if ends_odd else escaped] = False
    return quotes, ends_odd

"""Reading NDJSON files that are too large to hold: a run of whole lines at a time, some fields of each.

Knows nothing of what the fields mean; see tables.py.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ktransformers.errors import ConfigError, reason_of
from ktransformers.profiling.records import SCHEMA_VERSION

__all__ = ["Integers", "check_version", "integers", "lines_of", "parts_of_file"]

_log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20


def parts_of_file(folder: Path, name: str) -> list[Path]:
    """Return the files of `name` ("tokens") in the order of writing.

    They are tokens.1.jsonl, tokens.2.jsonl, ..., and last the one that is not rotated yet, tokens.jsonl.
    """
    pattern = re.compile(re.escape(name) + r"\.(\d+)\.jsonl")
    rotated = [(int(found[1]), path) for path in folder.iterdir() if (found := pattern.fullmatch(path.name))]
    newest = folder / f"{name}.jsonl"
    return [path for _, path in sorted(rotated)] + ([newest] if newest.exists() else [])


def check_version(version: int, path: Path) -> None:
    """Raise ConfigError for a file of a later schema than this program knows."""
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has schema version {version}, and this ktransformers reads up to {SCHEMA_VERSION}: read it with "
            "the version that wrote it, or upgrade this one"
        )


class _Versioned(msgspec.Struct):
    v: int


def lines_of(files: Sequence[Path], fields: Sequence[tuple[str, Any, Any]]) -> Iterator[list[Any]]:
    """Yield lists of objects with the attributes `fields` (name, type, default), in the order of the files.

    A list is what a run of about CHUNK_BYTES holds, so memory does not grow with the files. A file's last line is
    left out, with one logged line, where its end was never written (the program was killed). Raises ConfigError with
    file and line for any other line that is not as it should be, and for a later schema.
    """
    line: Any = msgspec.defstruct("Line", list(fields), bases=(_Versioned,), kw_only=True)
    decoder = msgspec.json.Decoder(line)
    for path in files:
        number = 1
        for chunk in _chunks(path):
            try:
                found = decoder.decode_lines(chunk)
            except msgspec.MsgspecError:
                found = list(_one_by_one(decoder, chunk, path, number))
            number += len(found)
            if found:
                check_version(max(line.v for line in found), path)
                yield found


def _chunks(path: Path) -> Iterator[bytes]:
    """Runs of whole lines."""
    rest = b""
    with path.open("rb") as file:
        while block := file.read(CHUNK_BYTES):
            head, newline, tail = block.rpartition(b"\n")
            if not newline:
                rest += block
                continue
            yield rest + head + newline
            rest = tail
    if rest.strip(b"\0 "):
        _log.warning("%s: the last line is torn and left out: whoever wrote it was stopped", path)


def _one_by_one(decoder: msgspec.json.Decoder[Any], chunk: bytes, path: Path, number: int) -> Iterator[Any]:
    for offset, line in enumerate(chunk.split(b"\n")[:-1]):
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError as error:
            check_version(_version(line), path)
            raise ConfigError(f"{path}, line {number + offset} is no line of a profile: {reason_of(error)}") from None


def _version(line: bytes) -> int:
    """What a line that could not be read says of its schema: a later one may look different."""
    try:
        return msgspec.json.decode(line, type=_Versioned).v
    except msgspec.MsgspecError:
        return 0


@dataclass(frozen=True)
class Integers:
    """The integers of several JSON texts, in order: [n] each."""

    values: npt.NDArray[np.int64]
    before: npt.NDArray[np.uint8]
    """The byte before each number: `[`, `,`, `:`, or `"` where it is a key."""
    text: npt.NDArray[np.int64]
    """Which of the texts it is in."""


def integers(texts: Sequence[bytes]) -> Integers:
    """Parse all integers of JSON texts that hold no others than arrays, objects, integers and null.

    Vectorized, because a profile has a hundred million of them, and as Python objects each would take 30 bytes.
    """
    texts = [text.translate(None, b" \t\r\n") for text in texts]
    joined = np.frombuffer(b"[" + b"".join(texts) + b"]", np.uint8)
    is_digit = (joined - np.uint8(ord("0"))) < 10  # others wrap around
    edges = np.flatnonzero(is_digit[1:] != is_digit[:-1]) + 1
    begins, ends = edges[::2], edges[1::2]
    lengths = ends - begins
    values = (joined[begins] - np.uint8(ord("0"))).astype(np.int64)
    for digit in range(1, int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > digit)
        values[longer] = values[longer] * 10 + (joined[begins[longer] + digit] - np.uint8(ord("0")))
    before = joined[begins - 1]
    values[before == ord("-")] *= -1
    stops = np.cumsum([len(text) for text in texts])
    counts = np.diff(np.searchsorted(begins - 1, stops), prepend=0)
    return Integers(values, before, np.repeat(np.arange(len(texts)), counts))

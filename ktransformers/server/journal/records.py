"""Records of the journal: msgspec structs as msgpack. Any of its records, in order, give requests to go on with.

    Opened ── (Tokens | Noted)* ── Closed          of one request; those of others stand between them

A record that is missing costs time, not truth: tokens behind a gap are not taken, and are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from ktransformers.core import PastToken, SamplingParams
from ktransformers.media.picture import ReadPicture
from ktransformers.media.records import MediaItem

__all__ = [
    "Closed",
    "GenerationRecord",
    "JournalState",
    "Kept",
    "Noted",
    "Opened",
    "Record",
    "Tokens",
    "decoded",
    "encoded",
]


class GenerationRecord(msgspec.Struct, frozen=True, array_like=True):
    """Record of one answer of a request. prompt: index into Opened.prompts. params: with its seed, without stop
    strings: the body has them.
    """

    prompt: int
    params: SamplingParams
    priority: int
    cache_salt: str


class Opened(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="open"):
    """Record of a request whose stream is kept.

    id: of its answer; request_id: what x-request-id says. key: digest of the API key that it came with, or "".
    path, body: what was asked, where. created, deadline: seconds since 1970, None: it may take any time. beside: what
    it takes to read the body again, of other requests. media: where the pictures of the prompt are. pictures: what
    stands for each one of the body: read, or a text in its place.
    """

    id: str
    request_id: str
    key: str
    path: str
    body: bytes
    keep_seconds: float
    created: int
    deadline: float | None
    prompts: tuple[tuple[int, ...], ...]
    generations: tuple[GenerationRecord, ...]
    beside: bytes = b""
    media: tuple[MediaItem, ...] = ()
    pictures: tuple[ReadPicture | str, ...] = ()


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """Record of the next tokens of all answers of a request, in the order in which they came. first: how many came
    before.
    """

    id: str
    first: int
    tokens: tuple[PastToken, ...]


class Noted(msgspec.Struct, frozen=True, array_like=True, tag="note"):
    """Record of a request's suspension and restarts. is_suspended: whether it is, from now on. num_tries: starts of a
    server that took it up to run without another token.
    """

    id: str
    is_suspended: bool
    num_tries: int = 0


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Record that nobody can ask for a request any more."""

    id: str


Record = Opened | Tokens | Noted | Closed
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Record)


def encoded(record: Record) -> bytes:
    """Return the record's bytes, as they are sealed."""
    return _encoder.encode(record)


def decoded(payload: bytes) -> Record:
    """Return the record in these bytes. Raises msgspec.MsgspecError for what another version wrote."""
    record: Record = _decoder.decode(payload)
    return record


@dataclass(slots=True)
class Kept:
    """A request as far as the journal knows it. num_bytes: of its records."""

    opened: Opened
    tokens: list[PastToken] = field(default_factory=list)
    is_suspended: bool = False
    num_tries: int = 0
    num_bytes: int = 0

    def records(self) -> Iterator[Record]:
        """Yield the fewest records that say the same."""
        yield self.opened
        if self.tokens:
            yield Tokens(self.opened.id, 0, tuple(self.tokens))
        if self.is_suspended or self.num_tries:
            yield Noted(self.opened.id, self.is_suspended, self.num_tries)


class JournalState:
    """The requests that are open after some records. num_bytes: of those that are about them."""

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}
        self.num_bytes = 0

    def apply(self, record: Record, num_bytes: int) -> None:
        """Apply the next record, which has `num_bytes`. One of a request whose Opened was lost changes nothing."""
        if isinstance(record, Opened):
            self._close(record.id)
            self.kept[record.id] = Kept(record, num_bytes=num_bytes)
            self.num_bytes += num_bytes
            return
        one = self.kept.get(record.id)
        if one is None:
            return
        one.num_bytes += num_bytes
        self.num_bytes += num_bytes
        match record:
            case Tokens(_, first, tokens):
                if first == len(one.tokens):  # else some before it are lost
                    one.tokens += tokens
                    one.num_tries = 0
            case Noted(_, is_suspended, num_tries):
                one.is_suspended, one.num_tries = is_suspended, num_tries
            case Closed():
                self._close(record.id)

    def _close(self, id: str) -> None:
        one = self.kept.pop(id, None)
        self.num_bytes -= 0 if one is None else one.num_bytes

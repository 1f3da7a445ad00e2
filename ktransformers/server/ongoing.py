"""The ongoing requests for answers, by their ids: which of them are suspended, and which streams are kept.

A request has two ids: the one in x-request-id, which a client may have chosen, and that of its answer, which is ours.
Each is seen with the API key that it came with alone. Knows no HTTP; used on the event loop only.

    kept stream   reader attached ── left ──> timer ── over ──> ended, and forgotten
                        ^                       │
                        └── attached again <────┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ktransformers.errors import ConflictError, NotReadyError, QueueFullError, UnknownIdError, UnsupportedError
from ktransformers.server.backend.base import BackendInterfaceBase
from ktransformers.server.event_log import EventLog, LogBudget
from ktransformers.server.journal.journal import Journal
from ktransformers.server.telemetry.request_metrics import RequestMetrics

__all__ = ["KeptStream", "Ongoing", "OngoingRequests"]

MAX_ENDED = 1024
"""Streams that are kept although they have ended."""


@dataclass(slots=True)
class KeptStream:
    """A stream that goes on without its client, for `seconds`. media_type, ping: as its Writer has them."""

    log: EventLog
    seconds: float
    media_type: str
    ping: bytes
    num_readers: int = 0
    timer: asyncio.TimerHandle | None = None
    is_given_up: bool = False


@dataclass(slots=True, eq=False)
class Ongoing:
    """An ongoing request for answers. key: which API key it came with. generation_ids: of its answers, at the
    backend.

    is_journaled: the next server goes on with it. is_replayed: this one does, with what another has begun.
    is_set_aside: the next one shall, and nothing more is sent here.
    """

    id: str
    answer_id: str
    key: str
    generation_ids: Sequence[str]
    request_metrics: RequestMetrics
    stream: KeptStream | None = None
    is_suspended: bool = False
    is_ended: bool = False
    is_journaled: bool = False
    is_replayed: bool = False
    is_set_aside: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def state(self) -> str:
        """State of the request in one word: waiting (it has no token yet), running, suspended or ended."""
        if self.is_ended:
            return "ended"
        if self.is_suspended:
            return "suspended"
        return "waiting" if self.request_metrics.first_token_seconds is None else "running"

    def described(self) -> dict[str, Any]:
        """Return this request's state and counts as JSON, for the client that sent it."""
        total, stream = self.request_metrics.total, self.stream
        described: dict[str, Any] = {
            "object": "request",
            "id": self.id,
            "answer_id": self.answer_id,
            "state": self.state,
            "created": self.created,
            "answers": len(self.generation_ids),
            "prompt_tokens": self.request_metrics.prompt_len,
            "completion_tokens": total.completion_len,
            "stream": None,
        }
        if stream is not None:
            described["stream"] = {
                "keep_seconds": stream.seconds,
                "readers": stream.num_readers,
                "first_event": stream.log.first,
                "last_event": stream.log.last,
            }
        return described


class OngoingRequests:
    """All ongoing requests for answers. max_suspended: requests that may be suspended at once. max_suspended: how many
    may be suspended at once. kept_bytes: of all kept streams.

    tasks: those that write kept streams. journal: where they are written down. is_restoring: those of the server
    before are not all here yet.
    """

    def __init__(self, backend: BackendInterfaceBase, max_suspended: int, kept_bytes: int):
        self._backend, self._max_suspended = backend, max_suspended
        self._budget = LogBudget(kept_bytes)
        self.tasks: set[asyncio.Task[None]] = set()
        self.journal: Journal | None = None
        self.is_restoring = False
        self._requests: dict[str, Ongoing] = {}  # by answer_id, the oldest first

    def __iter__(self) -> Iterator[Ongoing]:
        return iter(self._requests.values())

    def of_key(self, key: str) -> list[Ongoing]:
        """Return the requests that came with this key, the oldest first. Raises NotReadyError while some may be
        missing.
        """
        if self.is_restoring:
            raise NotReadyError("the requests from before the server's restart are not all back: try again in a moment")
        return [one for one in self if one.key == key]

    def knows(self, key: str, id: str) -> bool:
        """Whether a request of this key has this id."""
        return any(one.key == key and id in (one.id, one.answer_id) for one in self)

    def get(self, key: str, id: str) -> Ongoing:
        """Return the request of this key with this id, its own or its answer's. Raises UnknownIdError, and
        ConflictError for an id that clients have chosen twice.
        """
        named = self._requests.get(id)
        if named is not None and named.key == key and not self.is_restoring:
            return named
        found = [one for one in self.of_key(key) if one.id == id]
        if not found:
            raise UnknownIdError(f"there is no request {id[:100]!r}: it has ended, or came with another API key")
        if len(found) > 1:
            raise ConflictError(
                f"{len(found)} requests are called {id[:100]!r}: use the id of the answer (answer_id in /v1/requests)"
            )
        return found[0]

    def add(self, one: Ongoing) -> None:
        """Add a request that has come in."""
        self._requests[one.answer_id] = one

    def ended(self, one: Ongoing) -> None:
        """Note that a request has its answers, or that nobody waits for them. Its stream may be kept still."""
        one.is_ended, one.is_suspended = True, False
        if one.request_metrics.error and self.journal is not None and one.is_journaled:
            self.journal.closed(one.answer_id)  # the next server would get into the same, or be too late
        if one.stream is None or one.stream.is_given_up:
            self._forget(one)
        ended = [other for other in self if other.is_ended]
        for other in ended[: max(len(ended) - MAX_ENDED, 0)]:
            self._forget(other)

    def _forget(self, one: Ongoing) -> None:
        known = self._requests.pop(one.answer_id, None)
        if known is not None and one.is_journaled and self.journal is not None:
            self.journal.closed(one.answer_id)
        if one.stream is not None:
            self._budget.forget(one.stream.log)
            if one.stream.timer is not None:
                one.stream.timer.cancel()

    # Suspending.

    def suspend(self, one: Ongoing) -> None:
        """Suspend all answers of a request. Raises UnsupportedError, ConflictError when ended, QueueFullError."""
        if not self._backend.can_suspend:
            raise UnsupportedError(self._backend.no_suspension)
        self._require_open(one)
        if one.is_suspended:
            return
        num_suspended = sum(other.is_suspended for other in self)
        if num_suspended >= self._max_suspended:
            raise QueueFullError(
                f"{num_suspended} requests are suspended, and no more may be (--max_suspended): resume or end one"
            )
        one.is_suspended = True
        self._write_down(one)
        for generation_id in one.generation_ids:  # those that begin later ask (GenerationRequest.is_suspended)
            self._backend.suspend(generation_id)

    def resume(self, one: Ongoing) -> None:
        """Resume all answers of a request. Raises ConflictError when it has ended."""
        self._require_open(one)
        if one.is_suspended:
            one.is_suspended = False
            self._write_down(one)
            for generation_id in one.generation_ids:
                self._backend.resume(generation_id)

    def end(self, one: Ongoing) -> None:
        """End a request's answers: whoever reads them receives ABORT. What is kept of them is forgotten."""
        if one.stream is not None:
            one.stream.is_given_up = True
        if one.is_ended:
            self._forget(one)
        for generation_id in one.generation_ids:
            self._backend.end(generation_id)

    def end_suspended(self) -> int:
        """End the suspended requests, and return how many there were. Those in the journal are the next server's."""
        suspended = [one for one in self if one.is_suspended]
        for one in suspended:
            if one.is_journaled:
                one.is_set_aside = True
                for generation_id in one.generation_ids:
                    self._backend.end(generation_id)
            else:
                self.end(one)
        return sum(not one.is_set_aside for one in suspended)

    def _write_down(self, one: Ongoing) -> None:
        if one.is_journaled and self.journal is not None:
            self.journal.suspended(one.answer_id, one.is_suspended)

    async def written_down(self, one: Ongoing) -> None:
        """Wait until what became of the request is in the journal, where there is one: no restart undoes what was
        reported.
        """
        if one.is_journaled and self.journal is not None:
            await self.journal.written()

    def _require_open(self, one: Ongoing) -> None:
        if one.is_ended:
            raise ConflictError(f"request {one.id[:100]!r} has ended")

    # Streams.

    def keep(self, one: Ongoing, seconds: float, media_type: str, ping: bytes) -> EventLog:
        """Keep the request's stream; return the log that it is to be written to."""
        one.stream = KeptStream(EventLog(one.key, self._budget), seconds, media_type, ping)
        return one.stream.log

    def attach(self, one: Ongoing) -> None:
        """Count a reader of the request's kept stream, who must `detach` once."""
        stream = one.stream
        assert stream is not None
        stream.num_readers += 1
        if stream.timer is not None:
            stream.timer.cancel()
            stream.timer = None

    def detach(self, one: Ongoing) -> None:
        """Count a reader of the request's kept stream out."""
        stream = one.stream
        assert stream is not None
        stream.num_readers -= 1
        if not stream.num_readers and one.answer_id in self._requests:
            stream.timer = asyncio.get_running_loop().call_later(stream.seconds, self.end, one)

"""Messages between an ingress and a replica: msgspec structs as msgpack. Ray carries them as bytes.

ingress ── Ask ──> replica          ingress ── Order ──> all replicas
        <─ Began, Told, Told, ... ──
        <─ Failed, in place of the last Told ──
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ktransformers.core import (
    EmbeddingForm,
    FinishReason,
    GenerationStats,
    PastToken,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from ktransformers.server.backend.balance_stats import BalanceStats
from ktransformers.server.balance.messages import decode, encode

__all__ = [
    "Ask",
    "Began",
    "Event",
    "Facts",
    "Message",
    "Order",
    "ReplicaReport",
    "RequestFailed",
    "Told",
    "decode",
    "encode",
]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is wanted, see GenerationRequest. Each try at one request has a request_id of its own.

    past: its tokens so far, all told by replicas before: their events are not told again. timeout: seconds from now.
    prediction_ids: see GenerationRequest.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    timeout: float | None = None
    cache_salt: str = ""
    past: list[PastToken] = []
    is_suspended: bool = False
    prediction_ids: tuple[int, ...] = ()


class Event(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A TokenEvent without its stats."""

    token_id: int | None
    text: str
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    embedding: bytes | None = None

    @classmethod
    def of(cls, event: TokenEvent) -> Event:
        """Make the message of an event."""
        return cls(
            event.token_id,
            event.text,
            event.logprobs,
            event.finish_reason,
            event.stop,
            event.prompt_logprobs,
            event.embedding,
        )

    def told(self, stats: GenerationStats) -> TokenEvent:
        """Make the event again, with `stats`."""
        return TokenEvent(
            self.token_id,
            self.text,
            stats,
            self.logprobs,
            self.finish_reason,
            self.stop,
            self.prompt_logprobs,
            self.embedding,
        )


class Began(msgspec.Struct, frozen=True, tag=True):
    """The message that the replica of this name has the request: orders reach it from now on."""

    replica: str


class Told(msgspec.Struct, frozen=True, tag=True):
    """New events, at least one, and the stats behind the last of them."""

    events: list[Event]
    stats: GenerationStats


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """The message that the answer ends with an error: the name of a class in errors.py. is_lost: the replica cannot go
    on with any."""

    error: str
    message: str
    is_lost: bool = False


Message = Began | Told | RequestFailed


class Order(msgspec.Struct, frozen=True):
    """An order for the replica that has the request; others ignore it. what: suspend, resume or end."""

    request_id: str
    what: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a replica's model: ModelInfo without its tokenizer, which each side opens itself. card: its fields.
    max_running: of a replica."""

    max_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_params: SamplingParams
    architecture: str | None
    description: str
    is_models_limit: bool
    embeddings: EmbeddingForm
    card: dict[str, Any]
    digest: bytes
    max_running: int
    max_drafts: int = 0
    drafter: str = "ngram"


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's figures of this moment. node: Ray's id of its machine, empty without one. pid: of its process there.

    pause: see BackendInterfaceBase.
    """

    replica: str
    stats: BalanceStats
    node: str = ""
    pid: int = 0
    pause: str | None = None

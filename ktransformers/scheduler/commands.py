"""Messages to and from whoever drives the scheduler: commands of those who have text, and the news that answer them.

Plain data, as scheduler/records.py: in one process they are passed as they are, between processes as msgpack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from ktransformers.core import FinishReason
from ktransformers.profiling.stored_counts import NOTHING_STORED, StoredCounts
from ktransformers.scheduler.records import Request, RequestUpdate, SchedulerStats

__all__ = [
    "Add",
    "ChunkTrace",
    "EngineLoss",
    "EngineTotals",
    "Finish",
    "News",
    "ProfileOff",
    "ProfileOn",
    "RequestCommand",
    "Resume",
    "Suspend",
    "Traces",
]


class Add(msgspec.Struct, frozen=True, tag=True):
    """Message with a new request. Its deadline is on the monotonic clock, which all processes of a machine share.

    twins: (request_id, seed) of others that differ in nothing else: their prompt and their fields are sent once.
    """

    request: Request
    twins: Sequence[tuple[str, int]] = ()

    def requests(self) -> Iterator[Request]:
        """Yield all requests of the message. They share their prompt and what is in their params."""
        yield self.request
        for request_id, seed in self.twins:
            params = replace(self.request.params, seed=seed)
            yield msgspec.structs.replace(self.request, request_id=request_id, params=params)


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Message that ends a request from outside: its text held a stop string, or its reader left.

    completion_len: tokens of the answer up to the stop string; the scheduler may know more by now.
    """

    request_id: str
    reason: FinishReason
    completion_len: int | None = None


class Suspend(msgspec.Struct, frozen=True, tag=True):
    """Message that suspends a request: it gives its pages back and waits for Resume. Its deadline goes on."""

    request_id: str


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Message that resumes a suspended request. Those that are not, or have ended, are left alone."""

    request_id: str


RequestCommand = Add | Finish | Suspend | Resume


class ProfileOn(msgspec.Struct, frozen=True, tag=True):
    """Message by which scheduler and engine record for the bridge that listens at this endpoint. The engines to come do
    so, too.
    """

    endpoint: str


class ProfileOff(msgspec.Struct, frozen=True, tag=True):
    """Message by which scheduler and engine stop recording."""


class EngineTotals(msgspec.Struct):
    """Counts of the engines' work from the start, over all epochs. The driver counts on in one; news have copies."""

    num_steps: int = 0
    num_tokens: int = 0  # rows computed, prompts and answers
    busy_seconds: float = 0.0
    num_poisoned: int = 0  # requests that were ended because they killed engines
    num_expert_rows: int = 0  # (token, expert) pairs
    num_expert_samples: int = 0  # layer calls
    num_touched_experts: int = 0  # distinct experts in those, added up
    num_hot_reads: int = 0  # experts that decode steps used, of layers with slots on a GPU
    num_hot_hits: int = 0  # of those, experts that had a slot
    num_hot_uploads: int = 0
    hot_upload_bytes: int = 0
    stored: StoredCounts = NOTHING_STORED  # of experts in files that steps used, each once a call
    stored_rows: StoredCounts = NOTHING_STORED  # of rows of tables in files
    num_tower_pictures: int = 0  # that the tower computed
    tower_seconds: float = 0.0  # that it took for them


class EngineLoss(msgspec.Struct, frozen=True):
    """Note of the scheduler that it knows that the engine of this epoch is gone.

    explained: epochs, this one perhaps among them, that died of a request which has now been found and ended.
    """

    epoch: int
    explained: tuple[int, ...] = ()


class ChunkTrace(msgspec.Struct, frozen=True, array_like=True):
    """Times of a part of a request's prompt that a step computed; see server/backend/timeline.py. Also when it is
    recomputed.
    """

    request_id: str
    began: float
    ended: float
    position: int
    num_tokens: int
    num_rows: int


class Traces(msgspec.Struct, frozen=True):
    """Times of requests and steps for traces. planned: requests whose run began, and when, in seconds on the monotonic
    clock. chunks: of steps that ended.
    """

    planned: Sequence[tuple[str, float]]
    chunks: Sequence[ChunkTrace]


class News(msgspec.Struct, frozen=True):
    """The scheduler's message about what happened since the last one. prefill_seconds: from admission to the first
    token, of requests that got it.

    losses: answers to EngineDown, one to each. hanging: the epoch of an engine whose step takes too long.
    expert_counts: of steps that ended, see StepResult. traces: with SchedulerOptions.has_traces only.
    """

    updates: list[RequestUpdate]
    stats: SchedulerStats
    totals: EngineTotals
    prefill_seconds: dict[str, float]
    losses: list[EngineLoss] = []
    hanging: int | None = None
    expert_counts: bytes = b""
    traces: Traces | None = None

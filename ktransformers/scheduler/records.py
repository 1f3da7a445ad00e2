"""Records that cross the borders of the scheduler. Plain data: msgspec encodes every record as msgpack without help.

    API process ── Request ──> scheduler ── StepPlan ──> engine
                <─ RequestUpdate ──      <─ RowResult per sampled row ──

Rules for the engine:

- Steps are run in the order of their step_id, each with all its writes before its reads. A page that loses its owner
  while a step is in flight may be given to another sequence at once: the new owner writes in a later step.
- A *run* is one stay of a request in the batch, from admission to preemption or end. NewSequence carries everything
  the engine has to know about it, also when the request has been here before; `ended` says which state may be dropped.
- A decode may be planned before its token is known. Then token_source names the sampled row of the step before
  (step_id - 1) whose token it is, counting that step's sampled rows only: the engine fills it in by itself.
- Results of rows whose run has ended meanwhile are still sent: the scheduler drops them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct

import msgspec

from ktransformers.core import FinishReason, SamplingParams, TokenLogprobs
from ktransformers.media.records import MediaItem, Sight, sight_salt
from ktransformers.profiling.stored_counts import NOTHING_STORED, StoredCounts
from ktransformers.scheduler.tier_records import TierPlan, TierResult, TierStats

__all__ = [
    "UNKNOWN",
    "NewSequence",
    "PromptLogprobs",
    "Request",
    "RequestUpdate",
    "RowResult",
    "ScheduledSequence",
    "SchedulerStats",
    "StepPlan",
    "StepResult",
    "counts_in",
    "salted",
]


UNKNOWN = -1
"""Stands in a plan for a draft token that the engine finds itself."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request, filled by the API process.

    request_id: empty until whoever numbers requests has it.
    priority: a smaller number is served earlier, as in vLLM; equal ones by arrival.
    deadline: seconds on the clock whose time `Scheduler.expire` is given; None: no limit.
    cache_salt: requests share pages only with requests of the same salt.
    answer_ids: of an answer that was begun before, its tokens so far: the first new one comes behind them.
    cached_len: of a request that another scheduler had before, what that one said of it.
    is_suspended: it comes as one that is: nothing of it is computed before `Scheduler.resume`.
    prediction_ids: tokens that its sender expects of the answer: draft tokens are looked for there, too. No answer
    depends on them, so whoever takes a request over may leave them out.
    media: the pictures of the prompt, in their order; positions that show them have pseudo-ids in prompt_ids.
    params.stop is not looked at: stop strings need text, so the API process finds them and calls `Scheduler.finish`.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    request_id: str = ""
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    answer_ids: Sequence[int] = ()
    cached_len: int | None = None
    is_suspended: bool = False
    prediction_ids: Sequence[int] = ()
    media: Sequence[MediaItem] = ()


def salted(request: Request, sight: Sight) -> Request:
    """Return a request that shares no pages with those whose pictures see other things, see `sight_salt`."""
    salt = sight_salt(request.prompt_ids, request.media, sight)
    return msgspec.structs.replace(request, cache_salt=f"{request.cache_salt} {salt}") if salt else request


class NewSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that comes with the first step of a run, filled by the scheduler.

    token_ids: all tokens known so far; the first prompt_len are the prompt, the rest is the answer so far, which counts
    for penalties. params.seed is always set, so that a token is drawn the same way in every run. media: see Request.
    """

    run_id: int
    request_id: str
    params: SamplingParams
    prompt_len: int
    token_ids: Sequence[int]
    media: Sequence[MediaItem] = ()


class ScheduledSequence(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one sequence in one step, filled by the scheduler.

    Token i of the row has position `start + i`, sees all positions up to its own, and is written to slot
    `block_table[position // page_size] * page_size + position % page_size`. The table covers the row's last position.
    block_table: the table from index first_page on; what comes before is as in the run's last row, which the engine
    keeps. So a step says what is new, not again what a long prompt has filled.
    token_ids: the tokens to run; empty when token_source is set, which stands for one token.
    is_sampled: the logits of the last token choose the sequence's next token.
    num_drafts: the row's last tokens, so many, are draft tokens. A token is then sampled behind each of the last 1 +
    num_drafts tokens, one after the other, for as long as the one before it is the next draft token. The states in
    front of these are in `saves`. Draft tokens that are UNKNOWN are found by the engine's drafter before the step.
    read_slot, write_slot, saves: of recurrent layers, -1 and empty without: the slot of the state before the first
    token (-1: none, it begins with zeros), the one for the state behind the last, and (token of the row, slot) for
    states behind others.
    """

    run_id: int
    start: int
    token_ids: Sequence[int]
    token_source: int | None
    block_table: Sequence[int]
    is_sampled: bool
    first_page: int = 0
    read_slot: int = -1
    write_slot: int = -1
    saves: Sequence[tuple[int, int]] = ()
    num_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        return 1 if self.token_source is not None else len(self.token_ids)


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The plan of one step, filled by the scheduler. step_id counts up by one and is never used twice.

    starts: runs whose first row is in this step. ended: runs that have no row in this step or any later one.
    tiers: what is to be copied before the rows; a step without rows has nothing else, and no other is in flight then.
    is_observed: whether the engine's drafter, if there is one, is shown what the step computes. is_long: whether memory
    is lent to it, as a step that may be longer than chunk_size; until a step is not.
    """

    step_id: int
    starts: Sequence[NewSequence]
    rows: Sequence[ScheduledSequence]
    ended: Sequence[int]
    tiers: TierPlan | None = None
    is_observed: bool = True
    is_long: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class RowResult(msgspec.Struct, frozen=True):
    """The result of one sampled row, filled by the engine. error: why this row, and only this one, has no token.
    is_refused: that is the request's own doing, which would end so again.

    more: the tokens behind it, one for each draft token that was accepted.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    embedding: bytes | None = None
    more: Sequence[RowResult] = ()
    is_refused: bool = False

    @property
    def tokens(self) -> Iterator[RowResult]:
        """All tokens of the row, in their order."""
        yield self
        yield from self.more


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The log probabilities of a stretch of a run's prompt, filled by the engine. entries[i] is of the token at start +
    i; None of a position that shows a part of a picture.

    They come again when a run is recomputed after a preemption: receivers overwrite by position.
    """

    run_id: int
    start: int
    entries: Sequence[TokenLogprobs | None]


_EXPERT_COUNT = Struct("<HHI")


def counts_in(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (layer, expert, rows) of each entry that ExpertCounts.take made."""
    return _EXPERT_COUNT.iter_unpack(data)


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a step, filled by the engine: one result per sampled row, in the order of the rows.

    seconds: how long the step took; draft_seconds: what of that went by finding its draft tokens, observe_seconds: by
    showing the drafter what was computed. experts: (token, expert) pairs computed, layer calls, distinct experts of
    each call, added up; of this step. expert_counts: the rows of each expert, see `counts_in`. hot: what is new of
    experts in slots of GPUs: those that decode steps used, those of them that had a slot, uploads, bytes of these.
    stored: what is new of experts in files, each of which counts once a call; stored_rows: of rows of tables in files.
    tower: pictures that the tower computed for the step, and the seconds that it took, which may be those of another
    step.
    failed: (run, why) of rows whose pictures or experts cannot be had: what was computed of them is of no use. tiers:
    None without any. recovering: True of no step: the engine has lost its cache and all steps that it was sent, and
    computes none until the same comes with False.
    """

    step_id: int
    results: Sequence[RowResult]
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    seconds: float = 0.0
    draft_seconds: float = 0.0
    observe_seconds: float = 0.0
    experts: tuple[int, int, int] = (0, 0, 0)
    expert_counts: bytes = b""
    hot: tuple[int, int, int, int] = (0, 0, 0, 0)
    stored: StoredCounts = NOTHING_STORED
    stored_rows: StoredCounts = NOTHING_STORED
    tower: tuple[int, float] = (0, 0.0)
    failed: Sequence[tuple[int, str]] = ()
    tiers: TierResult | None = None
    recovering: bool | None = None

    @property
    def had_rows(self) -> bool:
        """Whether the step had rows, and was not there for the tiers alone."""
        return self.tiers is None or self.tiers.row_seconds > 0

    @property
    def row_seconds(self) -> float:
        """Seconds that the step took without copies of tiers."""
        return self.seconds if self.tiers is None else self.tiers.row_seconds


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """News of one request, filled by the scheduler. After the one with a finish_reason there is no other.

    token_id: the next token of the answer; None when the answer ended without one. With finish_reason STOP it is the
    end token. finish_reason ABORT comes with the cause: error says what went wrong, and is_refused that the request is
    at fault; is_expired that the deadline passed; neither: the caller asked for it.
    cached_len: prompt tokens found in the prefix cache when the request was first admitted.
    completion_len: tokens of the answer so far, this one included.
    prompt_logprobs: of a stretch of the prompt; such an update may carry nothing else.
    embedding: with the first token, see TokenEvent.
    num_drafted, num_accepted: draft tokens that were run for the answer so far, and those that were accepted.
    """

    request_id: str
    token_id: int | None
    prompt_len: int
    cached_len: int
    completion_len: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    is_expired: bool = False
    is_refused: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    embedding: bytes | None = None
    num_drafted: int = 0
    num_accepted: int = 0


class SchedulerStats(msgspec.Struct, kw_only=True):
    """The scheduler's figures for metrics. The first five and num_suspended are of this moment, the others count from
    the start: `Scheduler` adds to its own, and gives copies.

    num_used_pages: held by running sequences. num_idle_pages: held by nobody, kept for prefix hits, free when needed.
    prefix_query_len, prefix_hit_len: prompt tokens looked up at first admissions, and those found.
    num_drafted, num_accepted: draft tokens that steps ran, and those that were accepted.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_used_pages: int = 0
    num_idle_pages: int = 0
    num_preemptions: int = 0
    num_expired: int = 0
    num_engine_losses: int = 0
    prefix_query_len: int = 0
    prefix_hit_len: int = 0
    tiers: TierStats | None = None
    num_suspended: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

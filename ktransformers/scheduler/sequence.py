"""A request inside the scheduler: its tokens, and its run while it has one. Does not decide anything.

tokens  0 ......... computed_len ......... planned_len ......... known_len ......... total_len
        K/V written | steps in flight write | nobody yet          | to be sampled by steps in flight

num_published * page_size <= computed_len <= planned_len < total_len <= limit_len
len(block_table) * page_size just covers planned_len
total_len - planned_len == 1: the next row is a decode; > 1: a prefill chunk
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from ktransformers.core import AnswerEnd, FinishReason, SamplingParams
from ktransformers.scheduler.records import PromptLogprobs, Request, RequestUpdate, RowResult

__all__ = ["Drafter", "RunningState", "Sequence"]


class Drafter(Protocol):
    """Proposes the next tokens of one sequence from its text, see scheduler/drafting."""

    def __len__(self) -> int:
        """Return how many tokens of the sequence it has seen."""
        ...

    def extend(self, token_ids: Seq[int]) -> None:
        """Take the sequence's next tokens, one or more, and learn whether they were as drafted."""
        ...

    def chances(self, most: int) -> tuple[float, ...]:
        """Return the chances that its first 1, 2, ... draft tokens, up to `most`, are all right; empty: it has none."""
        ...

    def later(self, most: int) -> tuple[float, tuple[float, ...]]:
        """Return the chance that there are draft tokens behind the next token, which is not known yet, and their
        chances then; none: it is not worth waiting for."""
        ...

    def draft(self, most: int) -> list[int]:
        """Return up to `most` tokens that may come next."""
        ...


@dataclass(eq=False, slots=True)
class RunningState:
    """The state of a sequence while it is in the batch. Thrown away at preemption or end, which is how results of steps
    in flight become stale.

    block_table[i] is the page of positions i * page_size ..; its first num_published pages are in the prefix tree.
    num_told: leading pages of the table that the engine knows from the rows planned so far.
    sampled_index: where the latest planned step lists this run's sampled token, among its sampled rows.
    num_drafted: draft tokens that a step in flight runs behind the known one: none is planned behind it.

    Of recurrent layers: state_slot, its own; read_slot, what its next row continues (-1: zeros); draft_slots, others of
    its own, for states in front of draft tokens; border, see scheduler.snapshots; saves, slots by length that steps in
    flight write; rolled: the page with its answer's snapshot; held: that with the snapshot which its first row reads.
    """

    run_id: int
    block_table: list[int]
    computed_len: int
    planned_len: int
    num_published: int
    num_told: int = 0
    num_pending: int = 0  # tokens that steps in flight will sample, at most
    num_drafted: int = 0
    sampled_index: int = -1
    is_started: bool = False  # its NewSequence has been sent
    state_slot: int = -1
    read_slot: int = -1
    draft_slots: list[int] = field(default_factory=list)
    border: int = 0
    saves: dict[int, int] = field(default_factory=dict)
    rolled: int | None = None
    held: int | None = None


def _common_len(one: Seq[int], other: Seq[int]) -> int:
    """Leading items that both have. Compares slices, which is C, and halves what differs."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(eq=False, slots=True)
class Sequence:
    """A request that is waiting or suspended (run is None) or running. params.seed is set.

    rank: served in ascending order, preempted in descending order. limit_len: the most tokens of prompt and answer
    together. These, the id and prompt_len are asked for in every step and never change.
    drafter: what drafts its next tokens from the text, once that was looked at; it has seen the tokens up to then.
    streak: draft tokens of the engine that were right since the last wrong one.
    num_drafted, num_accepted: draft tokens that were run, and those of them that are the answer's.
    """

    request: Request
    arrival: int
    params: SamplingParams
    end: AnswerEnd
    token_ids: list[int] = field(default_factory=list)  # prompt, then the answer so far
    cached_len: int | None = None  # None until first admitted
    run: RunningState | None = None
    drafter: Drafter | None = None
    streak: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    stretches: Seq[tuple[int, int]] = ()  # of the prompt, (first, last + 1), that one step has to compute
    common: dict[int, int] = field(default_factory=dict)  # by another's arrival: leading tokens that both prompts have
    request_id: str = field(init=False)
    rank: tuple[int, int] = field(init=False)
    prompt_len: int = field(init=False)
    limit_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.request_id, self.rank = self.request.request_id, (self.request.priority, self.arrival)
        self.prompt_len = len(self.request.prompt_ids)
        self.limit_len = self.prompt_len + self.end.max_len

    @property
    def num_unplanned(self) -> int:
        """Number of tokens of a running sequence that no step in flight has."""
        assert self.run is not None, "it does not run"
        return self.known_len + self.run.num_pending - self.run.planned_len

    def whole_tokens(self, start: int, num_tokens: int, most: int) -> int:
        """Return how many tokens from `start` on a step runs, `num_tokens` or fewer, so that it ends inside of no
        stretch; of one that `start` is in all that is left, if that is no more than `most`, else 0."""
        end = start + num_tokens
        for first, last in self.stretches:
            if first < end < last:
                left = last - start
                return first - start if first > start else left if left <= most else 0
        return num_tokens

    @property
    def least_tokens(self) -> int:
        """The fewest tokens with which a step gets a running sequence on."""
        assert self.run is not None, "it does not run"
        return self.whole_tokens(self.run.planned_len, 1, self.prompt_len) if self.stretches else 1

    def common_len(self, other: Sequence) -> int:
        """Count the leading tokens that its prompt and another's have in common; found once."""
        known = self.common.get(other.arrival)
        if known is None:
            known = self.common[other.arrival] = _common_len(self.request.prompt_ids, other.request.prompt_ids)
        return known

    @property
    def known_len(self) -> int:
        return len(self.token_ids)

    @property
    def completion_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    def update(
        self,
        result: RowResult | None = None,
        *,
        finish_reason: FinishReason | None,
        error: str | None = None,
        is_expired: bool = False,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> RequestUpdate:
        """Make the news of the request, with what the engine sent of its token."""
        return RequestUpdate(
            request_id=self.request_id,
            token_id=None if result is None else result.token_id,
            prompt_len=self.prompt_len,
            cached_len=self.cached_len or 0,
            completion_len=self.completion_len,
            logprobs=None if result is None else result.logprobs,
            finish_reason=finish_reason,
            error=error,
            is_expired=is_expired,
            is_refused=result is not None and result.is_refused,
            prompt_logprobs=prompt_logprobs,
            embedding=None if result is None else result.embedding,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
        )

"""Makes the updates that the scheduler sends of a request."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from ktransformers.core import FinishReason
from ktransformers.scheduler.records import PromptLogprobs, RequestUpdate, RowResult
from ktransformers.scheduler.sequence import Sequence

__all__ = ["scored_updates", "update_of"]


def update_of(
    seq: Sequence,
    result: RowResult | None = None,
    *,
    finish_reason: FinishReason | None,
    error: str | None = None,
    is_expired: bool = False,
    prompt_logprobs: PromptLogprobs | None = None,
) -> RequestUpdate:
    """Make the update of `seq`, with what the engine sent of its token."""
    return RequestUpdate(
        request_id=seq.request_id,
        token_id=None if result is None else result.token_id,
        prompt_len=seq.prompt_len,
        cached_len=seq.cached_len or 0,
        completion_len=seq.completion_len,
        logprobs=None if result is None else result.logprobs,
        finish_reason=finish_reason,
        error=error,
        is_expired=is_expired,
        prompt_logprobs=prompt_logprobs,
        embedding=None if result is None else result.embedding,
        num_drafted=seq.num_drafted,
        num_accepted=seq.num_accepted,
    )


def scored_updates(seqs: Mapping[int, Sequence], prompt_logprobs: Seq[PromptLogprobs]) -> list[RequestUpdate]:
    """Make the updates that hand prompt logprobs on. seqs: by the ids of their runs; those of others are dropped."""
    return [
        update_of(seqs[one.run_id], finish_reason=None, prompt_logprobs=one)
        for one in prompt_logprobs
        if one.run_id in seqs
    ]

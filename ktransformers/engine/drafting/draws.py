"""Draws draft tokens from a draft model's logits. Knows requests, not models.

Where a request samples, the target draws its token by one number that depends on the seed and the position alone
(engine/sampling/sampler.py). The same number, on logits that are alike, mostly picks the same token: that is why
answers with a temperature accept drafts, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ktransformers.engine.sampling.logits_request import StepLogits
from ktransformers.engine.sampling.sampler import RequestSampler, SampledToken, sample_requested
from ktransformers.errors import KTransformersError
from ktransformers.kernels.cpu import WorkerPool, sampling

__all__ = ["draw_drafts"]


def draw_drafts(
    logits: StepLogits,
    samplers: Sequence[RequestSampler],
    positions: Sequence[int],
    pool: WorkerPool,
    *,
    is_first: bool,
) -> list[int]:
    """Return a draft token for each sampler from fp32 logits [N, V] on the CPU, or from as much of them as choosing a
    token takes, to take its place at positions[n].

    Penalties, biases and allowed tokens are as for the sequence's next token: what draft tokens before this one would
    change is left out. Grammars hold for the next token, is_first, alone: what they allow behind it is not known.
    Nothing is committed. Where nothing can be drawn (logits that are no numbers, say) the token is 0.
    """

    def from_rows(
        rows: torch.Tensor, samplers: Sequence[RequestSampler], positions: Sequence[int], pool: WorkerPool
    ) -> list[SampledToken]:
        return [SampledToken(one, None) for one in _drawn(rows.contiguous(), samplers, positions, pool, is_first)]

    if isinstance(logits, torch.Tensor):
        return _drawn(logits.contiguous(), samplers, positions, pool, is_first)
    found = sample_requested(logits, samplers, positions, pool, from_rows)
    return [one.token_id if isinstance(one, SampledToken) else 0 for one in found]


def _drawn(
    rows: torch.Tensor,
    samplers: Sequence[RequestSampler],
    positions: Sequence[int],
    pool: WorkerPool,
    is_first: bool,
) -> list[int]:
    """`draw_drafts` from whole rows."""
    numbers = [0.0] * len(samplers)
    if not all(sampler.params.is_greedy for sampler in samplers):
        numbers = sampling.uniforms([sampler.seed for sampler in samplers], positions)
    changed = [_adjusted(sampler, rows[i]) for i, sampler in enumerate(samplers)]
    masks = [_masked(sampler) if is_first else None for sampler in samplers]
    picks = sampling.sample_rows(rows, [sampler.params for sampler in samplers], numbers, pool, changed, masks)
    return [pick.token_id if pick.bad_id < 0 else 0 for pick in picks]


def _adjusted(sampler: RequestSampler, row: torch.Tensor) -> torch.Tensor | None:
    if not sampler.changes_logits:
        return None
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            changed = sampler.adjusted(row.numpy())
    except KTransformersError:  # no token may come next: the target's own row says so
        return None
    return None if changed is None else torch.from_numpy(changed)


def _masked(sampler: RequestSampler) -> torch.Tensor | None:
    try:
        words = sampler.masked()
    except KTransformersError:  # as above
        return None
    return None if words is None else torch.from_numpy(words.view(np.int32))

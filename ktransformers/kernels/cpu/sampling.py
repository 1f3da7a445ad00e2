"""Native sampling: one token from each row of logits, and how likely tokens are. Parameters of requests are given per
row.

Knows rows of numbers; does not know requests, penalties, masks or where the logits come from. The passes are written
in `csrc/kernels/common/sampling.inl`, what is made of them in `csrc/ops/sampling/sampling.cpp`. Results are the same in
every tier, for any number of threads and whatever other rows a call holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ktransformers.core import SamplingParams
from ktransformers.kernels.cpu.base import WorkerPool, check_tensor
from ktransformers.kernels.extension import extension

__all__ = ["Pick", "RowLogprobs", "philox4x32", "sample_candidates", "sample_rows", "token_logprobs", "uniforms"]


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Compute Philox4x32-10 of 32-bit words.

    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    a, b, c, d = extension.philox4x32(counter, key)
    return a, b, c, d


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> list[float]:
    """Return a number in [0, 1) with 53 random bits for each (seed, position). Seeds count modulo 2**64."""
    return [extension.uniform_at(seed & (2**64 - 1), position) for seed, position in zip(seeds, positions, strict=True)]


class Pick(NamedTuple):
    """The result of sampling one row of logits.

    token_id: the choice, or -1 where there is none because of a logit that is no number: bad_id is its token, else -1.
    """

    token_id: int
    bad_id: int


def sample_rows(
    logits: Tensor,
    params: Sequence[SamplingParams],
    numbers: Sequence[float],
    pool: WorkerPool,
    adjusted: Sequence[Tensor | None] | None = None,
    allowed: Sequence[Tensor | None] | None = None,
) -> list[Pick]:
    """Choose a token in each row of fp32 logits [B, V], with temperature, top_k, top_p and min_p of its params.

    numbers: one in [0, 1) per row, at which the inverse of the cumulative distribution, in the order of ids, is taken.
    adjusted: fp32 [V] to choose from instead of a row, or None; -infinity for tokens that must not be chosen.
    allowed: int32 [ceil(V / 32)], bits of the tokens that may be chosen, token 0 the lowest of the first; or None: all.
    Rows run side by side on the threads of the pool. Temperature 0 takes the greatest logit, of equals the lowest id.
    Otherwise a token's weight is exp((logit - greatest) / temperature), in fp64; tokens with less than 2**-64 are never
    chosen. top_k keeps all that are as good as the k-th. top_p keeps the smallest set of most likely tokens that has
    this share of what top_k left; of equally likely tokens the lowest ids. min_p is the least weight of what remains.
    A row with a logit that is not finite (adjusted: NaN, +infinity, or nothing but -infinity) has no choice,
    nor has one without allowed tokens.
    """
    check_tensor("logits", logits, (len(params), None))
    num_rows, vocab = logits.shape
    if any(one is not None and len(one) != num_rows for one in (numbers, adjusted, allowed)):
        raise ValueError(f"numbers, adjusted and allowed must be one per row of logits, which has {num_rows}")
    if num_rows and not 1 <= vocab < 2**31:
        raise ValueError(f"logits must have 1 to 2**31 - 1 columns, got {vocab}")
    first, size = logits.data_ptr(), logits.element_size() * vocab
    addresses = [(first + i * size, first + i * size, 0) for i in range(num_rows)]
    for i, row in enumerate(adjusted or ()):
        if row is not None:
            check_tensor(f"adjusted[{i}]", row, (vocab,))
            addresses[i] = (addresses[i][0], row.data_ptr(), 0)
    for i, row in enumerate(allowed or ()):
        if row is not None:
            check_tensor(f"allowed[{i}]", row, (-(-vocab // 32),), torch.int32)
            addresses[i] = (*addresses[i][:2], row.data_ptr())
    picks = extension.sample_rows(
        pool.handle, addresses, _settings(params, numbers), [one.top_k for one in params], vocab
    )
    return [Pick(*pick) for pick in picks]


def _settings(params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[tuple[float, float, float, float]]:
    return [(one.temperature, one.top_p, one.min_p, number) for one, number in zip(params, numbers, strict=True)]


def sample_candidates(
    ids: Tensor,
    logits: Tensor,
    counts: Sequence[int],
    vocab: int,
    params: Sequence[SamplingParams],
    numbers: Sequence[float],
    pool: WorkerPool,
) -> list[int]:
    """Choose the tokens that `sample_rows` would choose in whole rows of `vocab` finite logits, from the best of each.

    ids: int32 [N, R], of which the first counts[n] are row n's candidates, ascending; logits: fp32 [N, R], theirs. Both
    may have any row stride. Candidates are all tokens as good as the row's top_k-th, and may be some more of the best.
    """
    num_rows, room = ids.shape
    for name, tensor, dtype in (("ids", ids, torch.int32), ("logits", logits, torch.float32)):
        is_fit = tensor.shape == (num_rows, room) and (room < 2 or tensor.stride(1) == 1)
        if tensor.dtype != dtype or not is_fit or tensor.device.type != "cpu":
            raise ValueError(f"{name} must be {dtype} rows [{num_rows}, {room}] on the CPU")
    if not len(counts) == len(params) == len(numbers) == num_rows:
        raise ValueError(f"counts, params and numbers must be one per row, of which there are {num_rows}")
    if any(count > room for count in counts):
        raise ValueError(f"counts must be at most {room}, got {max(counts)}")
    places = [(tensor.data_ptr(), 4 * tensor.stride(0)) for tensor in (ids, logits)]
    (first_id, id_row), (first_logit, logit_row) = places
    rows = [(first_id + i * id_row, first_logit + i * logit_row, count) for i, count in enumerate(counts)]
    top_k = [one.top_k for one in params]
    return extension.sample_candidates(pool.handle, rows, _settings(params, numbers), top_k, vocab)


class RowLogprobs(NamedTuple):
    """Log probabilities of N rows. chosen: fp32 [N]. top_ids: int64 [N, count]; top: fp32 [N, count], descending."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def token_logprobs(logits: Tensor, token_ids: Sequence[int], count: int, pool: WorkerPool) -> RowLogprobs:
    """Compute log probabilities from raw fp32 logits [N, V]: of one token per row, and of the `count` (at most V) most
    likely ones of each.

    Computed in fp64 and rounded to fp32 once. Of equal logits the lowest ids come first. All NaN for a row with a NaN,
    +infinity or nothing but -infinity. Raises IndexError for a token outside of the vocabulary.
    """
    check_tensor("logits", logits, (len(token_ids), None))
    num_rows, vocab = logits.shape
    count = min(count, vocab)
    for i, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab:
            raise IndexError(f"token_ids[{i}] is {token_id}, but the logits are of {vocab} tokens")
    ids = torch.tensor(list(token_ids), dtype=torch.int64)
    chosen = torch.empty(num_rows)
    top_ids, top = torch.empty((num_rows, count), dtype=torch.int64), torch.empty((num_rows, count))
    extension.token_logprobs(
        pool.handle,
        logits.data_ptr(),
        num_rows,
        vocab,
        ids.data_ptr(),
        count,
        chosen.data_ptr(),
        top_ids.data_ptr(),
        top.data_ptr(),
    )
    return RowLogprobs(chosen, top_ids, top)

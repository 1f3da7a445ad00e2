"""Chooses the next token from a row of logits. Knows requests one at a time; never the batch around them.

The order of operations, on fp32 logits [V]:

    1. repetition penalty (tokens of prompt and answer), then frequency and presence penalty (tokens of the answer)
    2. logit bias; then tokens that the request may not use become impossible
    3. temperature; 0 ends here with the argmax, the lowest id among equals
    4. top_k (tokens as good as the k-th stay), 5. top_p, 6. min_p
    7. one uniform number picks from what is left, by the inverse of the cumulative distribution in id order

The truncations follow Hugging Face's order (temperature, top_k, top_p, min_p); vLLM applies min_p before top_k and
top_p, which differs only when top_p is used with it. Penalties and bias are vLLM's and OpenAI's, before temperature.
Which token was likely (logprobs) is reported from the raw logits, as both do.

The uniform number is Philox4x32-10 of (key = the request's seed, counter = the position of the token in its sequence):
a token depends on nothing but (logits, parameters, seed, position), not on the batch, earlier draws or a restart.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.config import physical_cores
from ktransformers.core import SamplingParams, TokenLogprobs
from ktransformers.errors import ConfigError, KTransformersError

__all__ = [
    "RequestSampler",
    "SampledToken",
    "TokenMask",
    "draw_seed",
    "philox4x32",
    "sample_batch",
    "sample_each",
    "token_logprobs",
    "uniforms",
]

_F32 = npt.NDArray[np.float32]
_F64 = npt.NDArray[np.float64]
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_PARALLEL_VOCAB = 1 << 14  # tokens from which a row is worth a thread: exponentials of 152,000 take 2 ms
_TOP_P_SIZES = (1024, 16384)  # candidates that top_p sorts before it sorts the whole vocabulary


def philox4x32(counters: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 of N counters [N, 4] under N keys [N, 2], all of them 32-bit words held in uint64. Returns [N, 4].

    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    a, b, c, d = (counters[:, i] for i in range(4))
    key0, key1 = keys[:, 0], keys[:, 1]
    for _ in range(10):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (second >> _HALF) ^ b ^ key0, second & _MASK, (first >> _HALF) ^ d ^ key1, first & _MASK
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return np.stack([a, b, c, d], axis=1)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> _F64:
    """One number in [0, 1) with 53 random bits for each (seed, position). Seeds count modulo 2**64."""
    keys = np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64)
    places = np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(places)
    counters = np.stack([places & _MASK, places >> _HALF, zero, zero], axis=1)
    words = philox4x32(counters, np.stack([keys & _MASK, keys >> _HALF], axis=1))
    bits = (words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53


def draw_seed() -> int:
    """A seed from the operating system, for requests that name none."""
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one row of logits led to. logprobs is None unless the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


class TokenMask(Protocol):
    """A grammar, say: which tokens may come next."""

    def __call__(self, answer_ids: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """Mask [V] of the tokens that may follow the answer so far; None: all."""
        ...


class RequestSampler:
    """The sampling state of one request: its parameters, its seed and what its penalties count.

    mask: asked before each token, with the tokens of the answer so far, and applied after bias and penalties.

    prompt_ids are the request's original prompt. Raises ConfigError for a logit bias outside of the vocabulary or of
    [-100, 100], and for allowed tokens outside of the vocabulary.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, mask: TokenMask | None = None
    ):
        for token_id, bias in params.logit_bias.items():
            if not 0 <= token_id < vocab_size:
                raise ConfigError(f"logit_bias names token {token_id}; this model's ids are 0 to {vocab_size - 1}")
            if not -100.0 <= bias <= 100.0:
                raise ConfigError(f"logit_bias of token {token_id} must be in [-100, 100], got {bias}")
        self.params = params
        self.seed = draw_seed() if params.seed is None else params.seed
        self._vocab_size = vocab_size
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._barred = _barred(params, vocab_size)
        self._mask = mask
        self._answer: list[int] = []  # for the mask
        self._counts: dict[int, int] = {}
        self._seen: dict[int, None] = dict.fromkeys(prompt_ids) if params.repetition_penalty != 1.0 else {}

    def commit(self, token_id: int) -> None:
        """Count a token as part of the answer. Call once per token, also for tokens of an answer that is continued."""
        if self._mask is not None:
            self._answer.append(token_id)
        if self.params.frequency_penalty or self.params.presence_penalty:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
        if self.params.repetition_penalty != 1.0:
            self._seen[token_id] = None

    def choose(self, logits: _F32, uniform: float) -> int:
        """The token for raw logits [V] and a number in [0, 1). See the module's docstring for the order."""
        adjusted = self._adjusted(logits)
        if self.params.is_greedy:
            return int(np.argmax(adjusted))
        ids, weights = self._weights(adjusted)
        cumulative = np.cumsum(weights)
        last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
        index = min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), last)
        return index if ids is None else int(ids[index])

    def _adjusted(self, logits: _F32) -> _F32:
        """Logits after penalties and bias; the input is not changed."""
        params = self.params
        barred = self._barred_now()
        if not (self._seen or self._counts or self._bias.size) and barred is None:
            return logits
        adjusted = logits.copy()
        if self._seen:
            ids = np.fromiter(self._seen, dtype=np.int64)
            seen, penalty = adjusted[ids], np.float32(params.repetition_penalty)
            adjusted[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts:
            ids = np.fromiter(self._counts, dtype=np.int64)
            counts = np.fromiter(self._counts.values(), dtype=np.float32)
            adjusted[ids] -= counts * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty)
        adjusted[self._bias_ids] += self._bias
        if barred is not None:
            adjusted[barred] = -np.inf
        return adjusted

    def _barred_now(self) -> npt.NDArray[np.bool_] | None:
        """The mask [V] of tokens that must not come next. Raises KTransformersError when none is left."""
        allowed = None if self._mask is None else self._mask(self._answer)
        if allowed is None:
            return self._barred
        barred = ~allowed if self._barred is None else self._barred | ~allowed
        if barred.all():
            raise KTransformersError("no token may come next: the request's constraints exclude each other")
        return barred

    def _weights(self, logits: _F32) -> tuple[npt.NDArray[np.int64] | None, _F64]:
        """Candidate ids, ascending (None: all of them), and their unnormalized probabilities; the best has 1.0."""
        params, ids = self.params, None
        top = logits.max()
        if 0 < params.top_k < logits.size:
            threshold = np.partition(logits, logits.size - params.top_k)[logits.size - params.top_k]
            ids = np.flatnonzero(logits >= threshold)
            logits = logits[ids]
        with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends all but the best to exp(-inf) = 0
            weights = np.exp((logits.astype(np.float64) - float(top)) / params.temperature)
        keep = None
        if params.top_p < 1.0:
            keep = _nucleus(weights, params.top_p)
        if params.min_p > 0.0:
            likely = weights >= params.min_p
            keep = np.flatnonzero(likely) if keep is None else keep[likely[keep]]
        if keep is None:
            return ids, weights
        return keep if ids is None else ids[keep], weights[keep]


def _barred(params: SamplingParams, vocab_size: int) -> npt.NDArray[np.bool_] | None:
    """The mask [V] of tokens that the request may not use."""
    if params.allowed_token_ids is None:
        return None
    wrong = [token_id for token_id in params.allowed_token_ids if not 0 <= token_id < vocab_size]
    if wrong:
        raise ConfigError(f"allowed_token_ids names token {wrong[0]}; this model's ids are 0 to {vocab_size - 1}")
    barred = np.ones(vocab_size, dtype=np.bool_)
    barred[list(params.allowed_token_ids)] = False
    return barred


def _nucleus(weights: _F64, top_p: float) -> npt.NDArray[np.int64]:
    """Ascending indices of the smallest set of most likely tokens that holds top_p of the probability.

    Of equally likely tokens the lowest ids come first. Sorts few candidates when they suffice, which changes nothing:
    the leading sums are the same.
    """
    goal = top_p * weights.sum()
    for size in (*_TOP_P_SIZES, weights.size):
        if size < weights.size:
            candidates = np.flatnonzero(weights >= np.partition(weights, weights.size - size)[weights.size - size])
        else:
            candidates = np.arange(weights.size)
        order = candidates[np.argsort(-weights[candidates], kind="stable")]
        cumulative = np.cumsum(weights[order])
        if cumulative[-1] >= goal:
            break
    count = min(int(np.searchsorted(cumulative, goal, side="left")) + 1, order.size)
    return np.sort(order[:count])


def token_logprobs(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    """What raw fp32 logits [V] say of `token_id` and of the `count` most likely tokens."""
    values = torch.log_softmax(logits, dim=-1).numpy()
    count = min(count, values.size)
    top: list[tuple[int, float]] = []
    if count:
        candidates = np.flatnonzero(values >= np.partition(values, values.size - count)[values.size - count])
        best = candidates[np.argsort(-values[candidates], kind="stable")][:count]
        top = [(int(i), float(values[i])) for i in best]
    return TokenLogprobs(float(values[token_id]), tuple(top))


def sample_batch(
    logits: torch.Tensor, requests: Sequence[RequestSampler], positions: Sequence[int]
) -> list[SampledToken]:
    """One token per request from fp32 logits [B, V]. positions[b] is the place the token takes in its sequence.

    Does not commit the tokens. Raises KTransformersError when a logit is not a finite number.
    """
    sampled = []
    for token in sample_each(logits, requests, positions):
        if isinstance(token, KTransformersError):
            raise token
        sampled.append(token)
    return sampled


def sample_each(
    logits: torch.Tensor, requests: Sequence[RequestSampler], positions: Sequence[int]
) -> list[SampledToken | KTransformersError]:
    """As `sample_batch`, but a request whose logits are no numbers gets its error in the place of its token."""
    if logits.ndim != 2 or not logits.shape[0] == len(requests) == len(positions):
        raise ValueError(
            f"logits {tuple(logits.shape)} do not fit {len(requests)} requests, {len(positions)} positions"
        )
    rows = logits.detach().to("cpu", torch.float32).contiguous()
    num_random = sum(not request.params.is_greedy for request in requests)
    numbers = uniforms([request.seed for request in requests], positions).tolist() if num_random else [0.0] * len(rows)
    each = list(zip(rows, requests, positions, numbers, strict=True))
    is_long = num_random > 1 and logits.shape[1] >= _PARALLEL_VOCAB
    if not is_long:
        return [_sample_one(*one) for one in each]
    return list(_threads().map(lambda one: _sample_one(*one), each))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Threads for rows of one step: numpy lets go of the interpreter while it computes."""
    return ThreadPoolExecutor(max_workers=physical_cores(), thread_name_prefix="sampler")


def _sample_one(
    row: torch.Tensor, request: RequestSampler, position: int, uniform: float
) -> SampledToken | KTransformersError:
    values = row.numpy()
    if not np.isfinite(values.min()) or not np.isfinite(values.max()):  # both pass NaN on; faster than asking each
        bad = int(np.argmin(np.isfinite(values)))
        return KTransformersError(
            f"the model computed {values[bad]} as the logit of token {bad} at position {position}: "
            "its weights are damaged, or they do not fit its config"
        )
    try:
        token_id = request.choose(values, uniform)
    except KTransformersError as error:
        return error
    wanted = request.params.logprobs
    return SampledToken(token_id, None if wanted is None else token_logprobs(row, token_id, wanted))

"""Chooses the next token from a row of logits. Knows requests one at a time; never the batch around them.

The order of operations, on fp32 logits [V]:

    1. repetition penalty (tokens of prompt and answer), then frequency and presence penalty (tokens of the answer)
    2. logit bias; then tokens that the request may not use become impossible, end tokens before min_tokens too
    3. temperature; 0 ends here with the argmax, the lowest id among equals
    4. top_k (tokens as good as the k-th stay), 5. top_p, 6. min_p
    7. one uniform number picks from what is left, by the inverse of the cumulative distribution in id order

Steps 1 and 2 change few logits and are done here, on a copy of the row, for requests that ask for them; the others and
masks are native (`kernels.cpu.sampling`), rows side by side on a worker pool. Probabilities are computed in fp64, and
tokens that are less likely than 2**-64 times the best one count as impossible.

The truncations follow Hugging Face's order (temperature, top_k, top_p, min_p); vLLM applies min_p before top_k and
top_p, which differs only when top_p is used with it. Penalties and bias are vLLM's and OpenAI's, before temperature.
Which token was likely (logprobs) is reported from the raw logits, as both do.

The uniform number is Philox4x32-10 of (key = the request's seed, counter = the position of the token in its sequence):
a token depends on nothing but (logits, parameters, seed, position), not on the batch, earlier draws or a restart.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.core import SamplingParams, TokenLogprobs
from ktransformers.engine.damage.errors import NotFiniteError
from ktransformers.engine.sampling.logits_request import BEST_TOKEN, MAX_TOP_K, WHOLE_ROW, RequestedLogits, StepLogits
from ktransformers.errors import ConfigError, KTransformersError
from ktransformers.kernels.cpu import WorkerPool, sampling

__all__ = [
    "RequestSampler",
    "SampledToken",
    "TokenMask",
    "draw_seed",
    "sample_batch",
    "sample_each",
    "sample_requested",
    "token_logprobs",
]

_F32 = npt.NDArray[np.float32]


def draw_seed() -> int:
    """Draw a seed from the operating system, for requests that name none."""
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token that one row of logits led to. logprobs is None unless the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


class TokenMask(Protocol):
    """Rules of one answer: which tokens may come next. Is told the answer's tokens in their order."""

    def commit(self, token_id: int) -> None:
        """Take in the next token of the answer."""
        ...

    def begin(self) -> None:
        """Start to find out which tokens may come next, where that takes time, and return at once."""
        ...

    def allowed(self) -> npt.NDArray[np.uint32] | None:
        """Return bits [ceil(V / 32)] of the tokens that may come next, token 0 the lowest bit; None: all.

        Raises KTransformersError when that cannot be told.
        """
        ...


class _Counts:
    """How often tokens occurred: a token more is one number more, whatever was counted before. Empty: false."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._places: npt.NDArray[np.int32] | None = None  # [V]: 1 + where a token stands in the others; 0: nowhere
        self._ids, self._values, self._num = np.empty(0, np.int64), np.empty(0, np.float32), 0

    def __bool__(self) -> bool:
        return self._num > 0

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens that occurred, each once."""
        return self._ids[: self._num]

    @property
    def values(self) -> _F32:
        """How often each token occurred, in the order of ids."""
        return self._values[: self._num]

    def add(self, token_id: int) -> None:
        places = self._placed()
        at = int(places[token_id]) - 1
        if at < 0:
            at = self._num
            if at == self._ids.size:
                self._grow(max(2 * at, 16))
            self._ids[at], self._values[at], places[token_id] = token_id, 0.0, at + 1
            self._num += 1
        self._values[at] += 1.0

    def add_all(self, token_ids: Sequence[int]) -> None:
        """Count tokens for the first time: only on an empty object."""
        assert not self._num
        ids, counts = np.unique(np.array(token_ids, dtype=np.int64), return_counts=True)
        self._ids, self._values, self._num = ids, counts.astype(np.float32), ids.size
        self._placed()[ids] = np.arange(1, ids.size + 1, dtype=np.int32)

    def _placed(self) -> npt.NDArray[np.int32]:
        if self._places is None:
            self._places = np.zeros(self._vocab_size, dtype=np.int32)
        return self._places

    def _grow(self, size: int) -> None:
        more = size - self._ids.size
        self._ids = np.concatenate((self._ids, np.empty(more, np.int64)))
        self._values = np.concatenate((self._values, np.empty(more, np.float32)))


class RequestSampler:
    """The sampling state of one request: its parameters, its seed and what its penalties count.

    mask: told each token, and asked before the next one; applied after bias and penalties.
    eos_token_ids: with params.stop_token_ids, they are impossible before params.min_tokens.

    prompt_ids are the request's original prompt. is_plain: nothing ever changes its logits, bars a token or asks for
    their probabilities. Raises ConfigError for a logit bias outside of the vocabulary or of
    [-100, 100], and for allowed tokens outside of the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        mask: TokenMask | None = None,
        *,
        eos_token_ids: Sequence[int] = (),
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
        self._num_answered = 0
        self._held_ends = _held_ends(params, eos_token_ids, vocab_size)
        self._counts = _Counts(vocab_size)
        self._seen = _Counts(vocab_size)
        if params.repetition_penalty != 1.0:
            self._seen.add_all(prompt_ids)
        self._penalizes_answer = bool(params.frequency_penalty or params.presence_penalty)
        is_changed = self._penalizes_answer or params.repetition_penalty != 1.0 or self.changes_logits
        self.is_plain = mask is None and params.logprobs is None and not is_changed and not self._held_ends.size
        self._plain_request = _plain_request(params)

    def commit(self, token_id: int) -> None:
        """Count a token as part of the answer. Call once per token, also for tokens of an answer that is continued."""
        self._num_answered += 1
        if self.is_plain:
            return
        if self._mask is not None:
            self._mask.commit(token_id)
        if self._penalizes_answer:
            self._counts.add(token_id)
        if self.params.repetition_penalty != 1.0:
            self._seen.add(token_id)

    def begin(self) -> None:
        """Start to make ready what the next token needs, beside whatever the caller does. To be called when a token has
        been committed and another one is to come."""
        if self._mask is not None:
            self._mask.begin()

    @property
    def changes_logits(self) -> bool:
        """Whether steps 1 and 2 may have anything to do, masks excepted."""
        has_barred = self._barred is not None or self._holds_ends
        return bool(self._seen or self._counts or self._bias.size or has_barred)

    @property
    def logits_request(self) -> int:
        """The part of a row that choosing the next token takes, see sampling/logits_request.py: less than all where
        nothing looks at all."""
        if self.is_plain:
            return self._plain_request
        if self._mask is not None or self.params.logprobs is not None or self.changes_logits:
            return WHOLE_ROW
        return self._plain_request

    @property
    def later_request(self) -> int:
        """The part of a row that choosing a token behind the next one takes, as `logits_request`: penalties may change
        logits by then that they do not change yet."""
        params = self.params
        has_penalty = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
        return WHOLE_ROW if has_penalty else self.logits_request

    @property
    def _holds_ends(self) -> bool:
        """Whether the answer is too short to end."""
        return self._num_answered < self.params.min_tokens and bool(self._held_ends.size)

    def adjusted(self, logits: _F32) -> _F32 | None:
        """Return raw logits [V] after penalties, bias and allowed_token_ids (steps 1 and 2): a copy, or None for no
        change."""
        params = self.params
        if not self.changes_logits:
            return None
        adjusted = logits.copy()
        if self._seen:
            ids = self._seen.ids
            seen, penalty = adjusted[ids], np.float32(params.repetition_penalty)
            adjusted[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts:
            adjusted[self._counts.ids] -= self._counts.values * np.float32(params.frequency_penalty) + np.float32(
                params.presence_penalty
            )
        adjusted[self._bias_ids] += self._bias
        if self._barred is not None:
            adjusted[self._barred] = -np.inf
        if self._holds_ends:
            adjusted[self._held_ends] = -np.inf
            if not np.isfinite(adjusted).any():
                raise ConfigError("no token may come next: min_tokens forbids the only ones that are allowed")
        return adjusted

    def masked(self) -> npt.NDArray[np.uint32] | None:
        """Return bits of the tokens that the mask lets come next, see TokenMask; None: all. Waits until they are known.

        Raises KTransformersError when no token may come next.
        """
        words = None if self._mask is None else self._mask.allowed()
        if words is None:
            return None
        left = words
        if self._barred is not None:
            left = words & self._free
        if not left.any():
            raise ConfigError("no token may come next: the request's constraints exclude each other")
        return words

    @functools.cached_property
    def _free(self) -> npt.NDArray[np.uint32]:
        """Bits of the tokens that allowed_token_ids names."""
        assert self._barred is not None
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.bool_)
        bits[: self._vocab_size] = ~self._barred
        return np.packbits(bits, bitorder="little").view(np.uint32)


def _plain_request(params: SamplingParams) -> int:
    """What choosing a token from logits as they are takes of them."""
    if params.is_greedy:
        return BEST_TOKEN
    return params.top_k if 0 < params.top_k <= MAX_TOP_K else WHOLE_ROW


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


def _held_ends(params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    """Ids that would end the answer, for one that has a least length. ignore_eos makes end tokens ordinary ones."""
    if not params.min_tokens or params.constraint is not None:  # whose mask knows where ends may come
        return np.empty(0, np.int64)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    return np.array(sorted(end for end in ends if 0 <= end < vocab_size), dtype=np.int64)


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], count: int, pool: WorkerPool | None = None
) -> list[TokenLogprobs]:
    """Compute log probabilities from raw fp32 logits [N, V] on the CPU: of one token per row, and of the `count` most
    likely ones of each row.

    pool: whose threads compute rows side by side; the calling thread alone when None.
    """
    found = sampling.token_logprobs(logits.detach().contiguous(), token_ids, count, pool or _alone(os.getpid()))
    tops = zip(found.top_ids.tolist(), found.top.tolist(), strict=True)
    return [
        TokenLogprobs(chosen, tuple(zip(ids, values, strict=True)))
        for chosen, (ids, values) in zip(found.chosen.tolist(), tops, strict=True)
    ]


def sample_batch(
    logits: StepLogits,
    requests: Sequence[RequestSampler],
    positions: Sequence[int],
    pool: WorkerPool | None = None,
) -> list[SampledToken]:
    """Sample one token per request from fp32 logits [B, V]. positions[b] is the place the token takes in its sequence.

    Where less than whole rows came back, each has what RequestSampler.logits_request said before; tokens are the same.
    Does not commit the tokens. pool: see `token_logprobs`. Raises KTransformersError when a logit is not finite.
    """
    sampled = []
    for token in sample_each(logits, requests, positions, pool):
        if isinstance(token, KTransformersError):
            raise token
        sampled.append(token)
    return sampled


def sample_each(
    logits: StepLogits,
    requests: Sequence[RequestSampler],
    positions: Sequence[int],
    pool: WorkerPool | None = None,
) -> list[SampledToken | KTransformersError]:
    """Sample as `sample_batch`, but give a request whose logits are no numbers its error in the place of its token."""
    num_rows = logits.shape[0] if isinstance(logits, torch.Tensor) else len(logits)  # len() of a tensor is slow Python
    if not num_rows == len(requests) == len(positions):
        raise ValueError(f"{num_rows} rows do not fit {len(requests)} requests, {len(positions)} positions")
    pool = pool or _alone(os.getpid())
    if isinstance(logits, RequestedLogits):
        return sample_requested(logits, requests, positions, pool, sample_each)
    if logits.dim() != 2:
        raise ValueError(f"logits must be rows, got {tuple(logits.shape)}")
    rows = _cpu_rows(logits)
    if all(request.is_plain for request in requests):
        return _sample_plain(rows, requests, positions, pool)
    masks = [_masked(request) for request in requests]
    changed = [_adjusted(request, rows[i]) if request.changes_logits else None for i, request in enumerate(requests)]
    picks = sampling.sample_rows(
        rows,
        [request.params for request in requests],
        _numbers(requests, positions),
        pool,
        [row if isinstance(row, torch.Tensor) else None for row in changed],
        [mask if isinstance(mask, torch.Tensor) else None for mask in masks],
    )
    results: list[SampledToken | KTransformersError] = []
    for i, (pick, mask, row) in enumerate(zip(picks, masks, changed, strict=True)):
        if isinstance(mask, KTransformersError):
            results.append(mask)
        elif isinstance(row, KTransformersError):
            results.append(row)
        elif pick.bad_id >= 0:
            results.append(_bad_logit(rows[i], pick.bad_id, positions[i]))
        else:
            results.append(SampledToken(pick.token_id, None))
    return _with_logprobs(results, rows, requests, pool)


def _cpu_rows(logits: torch.Tensor) -> torch.Tensor:
    """The same as contiguous fp32 on the CPU; themselves where they are, for asking torch for that takes longer than
    choosing a token."""
    if logits.dtype is torch.float32 and logits.is_cpu and logits.is_contiguous() and not logits.requires_grad:
        return logits
    return logits.detach().to("cpu", torch.float32).contiguous()


def _sample_plain(
    rows: torch.Tensor, requests: Sequence[RequestSampler], positions: Sequence[int], pool: WorkerPool
) -> list[SampledToken | KTransformersError]:
    """`sample_each` of requests that take logits as they are."""
    params = [request.params for request in requests]
    picks = sampling.sample_rows(rows, params, _numbers(requests, positions), pool)
    return [
        SampledToken(pick.token_id, None) if pick.bad_id < 0 else _bad_logit(rows[i], pick.bad_id, positions[i])
        for i, pick in enumerate(picks)
    ]


def _numbers(requests: Sequence[RequestSampler], positions: Sequence[int]) -> list[float]:
    if all(request.params.is_greedy for request in requests):
        return [0.0] * len(requests)  # nothing is drawn
    return sampling.uniforms([request.seed for request in requests], positions)


def sample_requested(
    logits: RequestedLogits,
    requests: Sequence[RequestSampler],
    positions: Sequence[int],
    pool: WorkerPool,
    from_rows: Callable[
        [torch.Tensor, Sequence[RequestSampler], Sequence[int], WorkerPool], Sequence[SampledToken | KTransformersError]
    ],
) -> list[SampledToken | KTransformersError]:
    """Sample as `sample_each` from rows each of which has what its request needs. from_rows: chooses from those that
    came as a whole."""
    results: list[SampledToken | KTransformersError] = [
        SampledToken(token_id, None) for token_id in logits.table[:, 0].tolist()
    ]
    few = [i for i, (need, place) in enumerate(zip(logits.requests, logits.places, strict=True)) if need > 0 > place]
    if few:
        numbers = sampling.uniforms([requests[i].seed for i in few], [positions[i] for i in few])
        params = [requests[i].params for i in few]
        found = sampling.sample_candidates(*logits.candidates(few), logits.vocab_size, params, numbers, pool)
        for i, token_id in zip(few, found, strict=True):
            results[i] = SampledToken(token_id, None)
    whole = [i for i, place in enumerate(logits.places) if place >= 0]
    if whole:
        places = [logits.places[i] for i in whole]
        rows = logits.whole if places == list(range(len(logits.whole))) else logits.whole[places]
        chosen = from_rows(rows, [requests[i] for i in whole], [positions[i] for i in whole], pool)
        for i, result in zip(whole, chosen, strict=True):
            results[i] = result
    return results


@functools.cache
def _alone(process: int) -> WorkerPool:
    """The calling thread, for callers without a pool. A pool is of no use to another process."""
    return WorkerPool(1)


def _adjusted(request: RequestSampler, row: torch.Tensor) -> torch.Tensor | KTransformersError | None:
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is checked with the choice
            changed = request.adjusted(row.numpy())
    except KTransformersError as error:
        return error
    return None if changed is None else torch.from_numpy(changed)


def _masked(request: RequestSampler) -> torch.Tensor | KTransformersError | None:
    try:
        words = request.masked()
    except KTransformersError as error:
        return error
    return None if words is None else torch.from_numpy(words.view(np.int32))


def _bad_logit(row: torch.Tensor, bad_id: int, position: int) -> KTransformersError:
    value = float(row[bad_id])
    if np.isfinite(value):
        return KTransformersError(
            f"penalties turn the logit {value} of token {bad_id} at position {position} into something that is no "
            "number: use a repetition_penalty closer to 1"
        )
    return NotFiniteError(value, f"the logit of token {bad_id} at position {position}")


def _with_logprobs(
    results: list[SampledToken | KTransformersError],
    rows: torch.Tensor,
    requests: Sequence[RequestSampler],
    pool: WorkerPool,
) -> list[SampledToken | KTransformersError]:
    """The same with logprobs for the tokens whose requests ask for them."""
    wanted: list[tuple[int, int, int]] = []  # row, token, how many of the most likely ones
    for i, (token, request) in enumerate(zip(results, requests, strict=True)):
        if isinstance(token, SampledToken) and request.params.logprobs is not None:
            wanted.append((i, token.token_id, request.params.logprobs))
    if not wanted:
        return results
    indices, ids, counts = (list(each) for each in zip(*wanted, strict=True))
    chosen = rows if len(wanted) == len(rows) else rows[indices]
    for i, token_id, count, found in zip(
        indices, ids, counts, token_logprobs(chosen, ids, max(counts), pool), strict=True
    ):
        results[i] = SampledToken(token_id, TokenLogprobs(found.logprob, found.top[:count]))
    return results

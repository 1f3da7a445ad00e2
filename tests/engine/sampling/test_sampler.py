"""The sampler: order of operations, exactness, distribution."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from ktransformers.core import SamplingParams
from ktransformers.engine.sampling.sampler import RequestSampler, draw_seed, sample_batch, sample_each, token_logprobs
from ktransformers.errors import ConfigError, KTransformersError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.sampling import sample_rows, uniforms
from ktransformers.tokenizer.grammars import pack_ids


def test_uniforms_depend_on_seed_and_position_only() -> None:
    seeds, positions = [0, 1, -1, 2**64 - 1, 2**70 + 1], [0, 5, 7, 7, 5]
    together = uniforms(seeds, positions)
    assert together == [uniforms([s], [p])[0] for s, p in zip(seeds, positions, strict=True)]
    assert together[2] == together[3]
    assert together[1] == together[4]
    assert len(set(together)) == 3
    many = np.array(uniforms([3] * 20000, range(20000)))
    assert 0.0 <= many.min() < many.max() < 1.0
    assert abs(many.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 20000)  # five standard errors


class _Idle:
    """A mask that allows all tokens."""

    def commit(self, token_id: int) -> None: ...

    def begin(self) -> None: ...

    def allowed(self) -> None: ...


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.0])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_requests_that_change_nothing_get_what_they_get_among_others(bad: float, is_contiguous: bool) -> None:
    """A request with a mask, though of all tokens, goes the way of those that change logits."""
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(3)) * 3
    logits[2, 7] = bad
    if not is_contiguous:
        logits = logits.T.contiguous().T
    params = [SamplingParams(temperature=0.0, seed=1), *(SamplingParams(temperature=t, seed=2) for t in (0.7, 2.0))]
    all_params = [*params, SamplingParams(temperature=0.9, top_k=3, seed=4), params[0]]
    positions = [3, 4, 5, 6, 7]
    plain, masked = ([RequestSampler(one, [1], 40, mask) for one in all_params] for mask in (None, _Idle()))
    assert [one.is_plain for one in plain + masked] == [True] * 5 + [False] * 5
    got, want = (sample_each(logits, samplers, positions) for samplers in (plain, masked))
    assert list(map(str, got)) == list(map(str, want))
    assert isinstance(got[2], KTransformersError) == (bad != 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": 0}, {"frequency_penalty": 0.1}, {"presence_penalty": 0.1}, {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}}, {"allowed_token_ids": (3,)}, {"min_tokens": 2, "stop_token_ids": (3,)},
    ],
)  # fmt: skip
def test_requests_that_change_or_ask_for_something_are_not_plain(changes: dict[str, object]) -> None:
    assert not RequestSampler(SamplingParams(**changes), [], 40).is_plain  # type: ignore[arg-type]


def choose(sampler: RequestSampler, logits: np.ndarray, numbers: list[float]) -> list[int]:
    """The tokens for raw logits [V] and each of the numbers."""
    rows, adjusted = torch.from_numpy(logits).repeat(len(numbers), 1), sampler.adjusted(logits)
    changed = None if adjusted is None else torch.from_numpy(adjusted)
    picks = sample_rows(rows, [sampler.params] * len(numbers), numbers, one_thread(), [changed] * len(numbers))
    return [found.token_id for found in picks]


@functools.cache
def one_thread() -> WorkerPool:
    return WorkerPool(1)


def pick(
    logits: list[float], uniform: float = 0.5, prompt: tuple[int, ...] = (), answer: tuple[int, ...] = (), **params
) -> int:
    sampler = RequestSampler(SamplingParams(**params), prompt, len(logits))
    for token in answer:
        sampler.commit(token)
    return choose(sampler, np.array(logits, dtype=np.float32), [uniform])[0]


def assert_support(logits: np.ndarray, expected: list[int], **params) -> None:
    """Numbers in the middle of what each expected token has of [0, 1) lead to these tokens, one after the other."""
    sampler = RequestSampler(SamplingParams(**params), (), logits.size)
    wide = logits[expected].astype(np.float64)
    ends = np.cumsum(np.exp((wide - wide.max()) / sampler.params.temperature))
    middles = (ends + np.concatenate([[0.0], ends[:-1]])) / 2 / ends[-1]
    assert choose(sampler, logits, middles.tolist()) == expected


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert pick([1.0, 3.0, 3.0, 2.0], temperature=0) == 1


def test_inverse_cdf_in_id_order() -> None:
    logits = np.log([0.5, 0.25, 0.25]).tolist()
    assert [pick(logits, u) for u in (0.0, 0.49, 0.51, 0.74, 0.76, 1 - 2**-53)] == [0, 0, 1, 1, 2, 2]


def test_impossible_tokens_are_never_chosen() -> None:
    """Weights that underflow to zero at either end of the vocabulary stay unreachable for every uniform number."""
    assert {pick([-1e4, 0.0, -1e4], u) for u in (0.0, 0.5, 1 - 2**-53)} == {1}


def test_tiny_and_huge_temperatures() -> None:
    assert pick([1.0, 1.5, 1.2], 0.999, temperature=1e-300) == 1
    assert pick([1.0, 90.0], 0.49, temperature=1e300) == 0


def test_penalties_by_hand() -> None:
    assert pick([2.0, 1.5], temperature=0, prompt=(0,), repetition_penalty=2.0) == 1  # 2 / 2 < 1.5
    assert pick([-1.0, -1.5], temperature=0, prompt=(0,), repetition_penalty=2.0) == 1  # -1 * 2 < -1.5
    assert pick([2.0, 1.5], temperature=0, answer=(0,), repetition_penalty=2.0) == 1
    assert pick([2.0, 1.5], temperature=0, prompt=(0,), frequency_penalty=2.0, presence_penalty=2.0) == 0  # answer only
    assert pick([2.0, 1.5], temperature=0, answer=(0, 0), frequency_penalty=0.25) == 0  # 2 - 0.5 = 1.5, lowest id
    assert pick([2.0, 1.5], temperature=0, answer=(0, 0, 0), frequency_penalty=0.25) == 1
    assert pick([2.0, 1.5], temperature=0, answer=(0, 0), presence_penalty=0.5) == 0
    assert pick([2.0, 1.5], temperature=0, answer=(0,), presence_penalty=0.75) == 1


@given(
    st.lists(st.integers(0, 39), max_size=60),
    st.lists(st.integers(0, 39), max_size=60),
    st.sampled_from([1.0, 1.3]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, -0.25]),
)
def test_penalties_count_as_tokens_come(
    prompt: list[int], answer: list[int], repetition: float, frequency: float, presence: float
) -> None:
    """Against counting everything anew after each token."""
    params = SamplingParams(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
    sampler, logits = RequestSampler(params, prompt, 40), np.linspace(-3, 5, 40, dtype=np.float32)
    for length in range(len(answer) + 1):
        wanted = logits.copy()
        for token in range(40):
            if repetition != 1.0 and token in [*prompt, *answer[:length]]:
                wanted[token] = (
                    wanted[token] / np.float32(repetition)
                    if wanted[token] > 0
                    else (wanted[token] * np.float32(repetition))
                )
            if count := answer[:length].count(token):
                wanted[token] -= np.float32(count) * np.float32(frequency) + np.float32(presence)
        adjusted = sampler.adjusted(logits)
        assert ((logits if adjusted is None else adjusted) == wanted).all()
        if length < len(answer):
            sampler.commit(answer[length])


def test_bias_comes_after_penalties_and_before_temperature() -> None:
    assert pick([2.0, 1.0], temperature=0, prompt=(0,), repetition_penalty=2.0, logit_bias={0: 0.5}) == 0  # 2/2 + .5
    assert pick([2.0, 1.0], 0.999, temperature=0.01, logit_bias={0: -1.5}) == 1
    assert pick([2.0, 1.0], temperature=0, logit_bias={0: -100}) == 1


def test_bias_is_checked() -> None:
    for bias in ({2: 1.0}, {-1: 1.0}, {0: 101.0}, {0: math.nan}):
        with pytest.raises(ConfigError, match="logit_bias"):
            pick([1.0, 2.0], logit_bias=bias)


@settings(deadline=None, derandomize=True)  # fp32 against fp64: another day, another rounding
@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=30),
    st.integers(-1, 8),
    st.sampled_from([0.1, 0.5, 0.8, 0.95, 1.0]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_truncations_equal_hugging_face(
    values: list[int], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = np.array(values, dtype=np.float32) / 2 + np.linspace(0, 0.1, len(values), dtype=np.float32)  # no ties
    scores = torch.from_numpy(logits)[None] / temperature
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0.0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    expected = torch.isfinite(scores[0]).nonzero().flatten().tolist()
    assert_support(logits, expected, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)


def test_repetition_penalty_equals_hugging_face() -> None:
    logits = np.random.default_rng(0).normal(0, 2, 50).astype(np.float32)
    ids = [3, 3, 7, 49]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([ids]), torch.from_numpy(logits)[None].clone())
    sampler = RequestSampler(SamplingParams(repetition_penalty=1.3), ids[:2], 50)
    sampler.commit(7)
    sampler.commit(49)
    assert torch.equal(torch.from_numpy(sampler.adjusted(logits)), expected[0])


def test_ties_at_the_edge_of_top_k_and_top_p() -> None:
    logits = np.zeros(5, dtype=np.float32)
    assert_support(logits, [0, 1, 2, 3, 4], top_k=2)
    assert_support(logits, [0, 1, 2], top_p=0.5)


def test_batch_composition_does_not_matter() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 300) * 3
    kinds = [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3, top_k=5, logprobs=3),
        SamplingParams(seed=4, top_p=0.7, min_p=0.01),
        SamplingParams(seed=5, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={7: 3.0}),
        SamplingParams(seed=6, temperature=0.3, logprobs=0),
    ]
    positions = [10, 11, 12, 13, 14, 15]
    requests = [RequestSampler(params, [1, 2, 3], 300) for params in kinds]
    together = sample_batch(logits, requests, positions)
    alone = [sample_batch(logits[i : i + 1], [requests[i]], [positions[i]])[0] for i in range(6)]
    backwards = sample_batch(logits.flip(0), requests[::-1], positions[::-1])[::-1]
    assert together == alone == backwards


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    request = RequestSampler(SamplingParams(temperature=0.0, logprobs=3, logit_bias={0: 50.0}), (), 4)
    (sampled,) = sample_batch(logits, [request], [0])
    raw = torch.log_softmax(logits[0].double(), -1).float().tolist()
    assert sampled.token_id == 0
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == raw[0]
    assert sampled.logprobs.top == ((1, raw[1]), (3, raw[3]), (2, raw[2]))
    (none,) = sample_batch(logits, [RequestSampler(SamplingParams(temperature=0.0), (), 4)], [0])
    assert none.logprobs is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers(bad: float, temperature: float) -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4] = bad
    with pytest.raises(KTransformersError, match="logit of token 4 at position 9"):
        sample_batch(logits, [RequestSampler(SamplingParams(temperature=temperature, seed=0), (), 10)], [9])


def test_shapes_are_checked() -> None:
    request = RequestSampler(SamplingParams(seed=0), (), 4)
    with pytest.raises(ValueError, match="do not fit"):
        sample_batch(torch.zeros(2, 4), [request], [0])


def test_distribution() -> None:
    """Chi-square over 20,000 draws; 24.32 is the 0.999 quantile for 7 degrees of freedom. The seed is fixed."""
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -0.5, 0.2], dtype=np.float32)
    probabilities = np.exp(logits / 0.8) / np.exp(logits / 0.8).sum()
    sampler, count = RequestSampler(SamplingParams(temperature=0.8), (), 8), 20000
    found = np.bincount(choose(sampler, logits, uniforms([42] * count, range(count))), minlength=8)
    expected = probabilities * count
    assert ((found - expected) ** 2 / expected).sum() < 24.32


def test_seeds() -> None:
    assert draw_seed() != draw_seed()
    assert RequestSampler(SamplingParams(seed=None), (), 4).seed >= 0
    assert RequestSampler(SamplingParams(seed=-5), (), 4).seed == -5


def test_rows_on_the_threads_of_a_pool_are_the_same() -> None:
    """Every kind of request in one step, errors of some among them, on 1 and 3 threads."""
    logits = torch.randn(6, 1 << 15, generator=torch.Generator().manual_seed(0)) * 2
    logits[4, 77] = math.nan
    kinds = [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(seed=3, top_k=5, logprobs=20),
        SamplingParams(seed=4, top_p=0.7, min_p=0.01, presence_penalty=1.0),
        SamplingParams(seed=5),
        SamplingParams(seed=6, allowed_token_ids=(8, 30_000)),
    ]
    requests = [RequestSampler(params, [], 1 << 15) for params in kinds]
    requests[3].commit(5)
    positions = list(range(10, 16))
    pool = WorkerPool(3)
    together, alone = sample_each(logits, requests, positions, pool), sample_each(logits, requests, positions)
    pool.close()
    assert "logit of token 77 at position 14" in str(together[4])
    assert str(alone[4]) == str(together[4])
    assert together[:4] + together[5:] == alone[:4] + alone[5:]
    assert together[2].logprobs is not None
    assert len(together[2].logprobs.top) == 20
    assert together[5].token_id in (8, 30_000)


class OnlyToken:
    def __init__(self, token_id: int):
        self.words = pack_ids([token_id], 4)

    def commit(self, token_id: int) -> None: ...

    def begin(self) -> None: ...

    def allowed(self) -> np.ndarray:
        return self.words


def test_no_token_left_is_an_error_of_the_request() -> None:
    request = RequestSampler(SamplingParams(seed=0, allowed_token_ids=[2]), (), 4, OnlyToken(3))
    (found,) = sample_each(torch.zeros(1, 4), [request], [0])
    assert isinstance(found, ConfigError)
    assert "exclude each other" in str(found)


def test_a_penalty_beyond_numbers_is_named() -> None:
    request = RequestSampler(SamplingParams(seed=0, repetition_penalty=1e-30), (1,), 4)
    with pytest.raises(KTransformersError, match=r"penalties turn the logit .* of token 1 at position 3"):
        sample_batch(torch.full((1, 4), 1e20), [request], [3])


def test_logprobs_of_many_rows() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0], [2.0, 0.0, 0.0]])
    found = token_logprobs(logits, [1, 2], 2)
    wanted = torch.log_softmax(logits.double(), -1).float().tolist()
    assert [each.logprob for each in found] == [wanted[0][1], wanted[1][2]]
    assert [each.top for each in found] == [
        ((1, wanted[0][1]), (2, wanted[0][2])),
        ((0, wanted[1][0]), (1, wanted[1][1])),
    ]


def test_min_tokens_bars_the_ends_until_it_is_reached() -> None:
    logits = [0.0, 1.0, 5.0, 4.0]  # token 2 ends answers, 3 is the request's own end
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(3,))
    sampler = RequestSampler(params, (), 4, eos_token_ids=(2, 99))
    found = []
    for _ in range(3):
        (token,) = sample_batch(torch.tensor([logits]), [sampler], [5])
        sampler.commit(token.token_id)
        found.append(token.token_id)
    assert found == [1, 1, 2]
    ignoring = SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True)
    assert choose(RequestSampler(ignoring, (), 4, eos_token_ids=(2,)), np.array(logits, np.float32), [0.5]) == [2]


def test_min_tokens_that_leave_nothing_are_an_error() -> None:
    params = SamplingParams(min_tokens=1, allowed_token_ids=(2,))
    sampler = RequestSampler(params, (), 4, eos_token_ids=(2,))
    (found,) = sample_each(torch.zeros(1, 4), [sampler], [0])
    assert isinstance(found, ConfigError)
    assert "min_tokens" in str(found)
    with pytest.raises(ConfigError, match="at most max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)

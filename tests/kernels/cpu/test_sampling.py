"""Native sampling: == with an oracle in numpy and fp64, over tiers, threads and the company of a row."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ktransformers.core import SamplingParams
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.sampling import (
    Pick,
    philox4x32,
    sample_candidates,
    sample_rows,
    token_logprobs,
    uniforms,
)
from ktransformers.kernels.extension import extension
from tests.support.checks import sampling_oracle as oracle

TEMPERATURES = (0.0, 1e-300, 0.05, 0.6, 1.0, 3.0, 1e300)
TOP_K = (-1, 0, 1, 2, 20, 150, 700, 10**9)
TOP_P = (1.0, 1e-9, 0.3, 0.8, 0.95, 0.999, 1 - 1e-12)
MIN_P = (0.0, 0.0, 1e-6, 0.05, 0.5, 1.0)


def token_weights(logits: torch.Tensor, temperature: float, pool: WorkerPool) -> torch.Tensor:
    """The weights that `sample_rows` counts with, fp64 [V]: exp((logit - greatest) / temperature), 0 below 2**-64."""
    out = torch.empty(logits.shape[0], dtype=torch.float64)
    extension._row_weights(pool.handle, logits.data_ptr(), logits.shape[0], float(temperature), out.data_ptr())
    return out


def make_logits(kind: str, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """One row as a model, or an unkind tester, makes them."""
    if kind == "peaked":
        logits = rng.normal(2, 2.5, vocab)
        logits[rng.integers(0, vocab, 5)] += rng.uniform(8, 25, 5)
    elif kind == "flat":
        logits = rng.normal(0, 0.3, vocab)
    elif kind == "wide":
        logits = rng.normal(0, 3, vocab)
    elif kind == "equal":
        logits = np.full(vocab, rng.normal())
    elif kind == "ties":
        logits = rng.integers(-6, 3, vocab) / 2
    else:
        logits = rng.normal(0, 1, vocab) * 10.0 ** rng.integers(-30, 37, vocab)
    return logits.astype(np.float32)


KINDS = ("peaked", "flat", "wide", "equal", "ties", "huge")


def draw_params(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice(TEMPERATURES)),
        top_k=int(rng.choice(TOP_K)),
        top_p=float(rng.choice(TOP_P)),
        min_p=float(rng.choice(MIN_P)),
    )


def bar_some(logits: np.ndarray, rng: np.random.Generator) -> torch.Tensor | None:
    """Every other row: a copy of which tokens, few or nearly all, must not be chosen; the last token may be."""
    if rng.random() < 0.5:
        return None
    barred = logits.copy()
    barred[rng.random(logits.size) < rng.choice([0.1, 0.5, 0.999])] = -np.inf
    barred[-1] = logits[-1]
    return torch.from_numpy(barred)


def bits_of(barred: np.ndarray) -> torch.Tensor:
    """The tokens that may be chosen, and bits behind the last one, which mean nothing."""
    bits = np.ones(-(-barred.size // 32) * 32, np.bool_)
    bits[: barred.size] = barred != -np.inf
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "num_rows"), [(1, 20), (7, 200), (160, 200), (257, 100), (5000, 60), (151_936, 24)])
def test_the_same_token_as_the_oracle(kind: str, vocab: int, num_rows: int, pools: list[WorkerPool]) -> None:
    rng = np.random.default_rng([KINDS.index(kind), vocab])
    logits = np.stack([make_logits(kind, vocab, rng) for _ in range(num_rows)])
    params = [draw_params(rng) for _ in range(num_rows)]
    # Not closer to 1 than rounding, in another order of summing, may move the end of the last token but one.
    numbers = [float(rng.choice([0.0, rng.random(), rng.random(), rng.random(), 1 - 2.0**-30])) for _ in params]
    adjusted = [bar_some(row, rng) for row in logits]
    chosen_from = [row if other is None else other.numpy() for row, other in zip(logits, adjusted, strict=True)]
    expected = [
        Pick(oracle.choose(row, one, number), -1) for row, one, number in zip(chosen_from, params, numbers, strict=True)
    ]
    for pool in pools:
        assert sample_rows(torch.from_numpy(logits), params, numbers, pool, adjusted) == expected
        masks = [None if one is None else bits_of(one.numpy()) for one in adjusted]
        assert sample_rows(torch.from_numpy(logits), params, numbers, pool, None, masks) == expected
        assert sample_rows(torch.from_numpy(logits), params, numbers, pool, adjusted, masks) == expected


@pytest.mark.parametrize("kind", ["peaked", "ties", "wide"])
def test_every_candidate_has_its_share(kind: str, pools: list[WorkerPool]) -> None:
    """The number in the middle of each candidate's part of [0, 1) leads to it: no token too many, and none too few."""
    rng = np.random.default_rng(5)
    for vocab in (160, 3000):
        row = make_logits(kind, vocab, rng)
        for _ in range(20):
            params = draw_params(rng)
            if params.is_greedy:
                continue
            ids, weights = oracle.candidates(row, params)
            ends = np.cumsum(weights) / weights.sum()
            middles = (ends + np.concatenate([[0.0], ends[:-1]])) / 2
            some = rng.permutation(ids.size)[:100]
            wide = [i for i in some if weights[i] / weights.sum() > 1e-9]  # far above what rounding moves
            logits = torch.from_numpy(row).repeat(len(wide), 1)
            for pool in (pools[0], pools[-1]):
                picks = sample_rows(logits, [params] * len(wide), [float(middles[i]) for i in wide], pool)
                assert [pick.token_id for pick in picks] == [int(ids[i]) for i in wide]


def test_the_greatest_number_leads_to_a_token_that_is_possible(pools: list[WorkerPool]) -> None:
    rng = np.random.default_rng(9)
    for kind in KINDS:
        row = make_logits(kind, 1000, rng)
        row[-300:] = row.min() - 1000  # whole blocks without weight behind the last possible token
        params = [draw_params(rng) for _ in range(40)]
        logits = torch.from_numpy(row).repeat(len(params), 1)
        for pool in (pools[0], pools[-1]):
            for one, found in zip(params, sample_rows(logits, params, [1 - 2.0**-53] * 40, pool), strict=True):
                ids = [int(np.argmax(row))] if one.is_greedy else oracle.candidates(row, one)[0]
                assert found.token_id in ids


def test_rows_do_not_depend_on_their_company(pool: WorkerPool) -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(np.stack([make_logits(kind, 40_000, rng) for kind in KINDS]))
    params = [draw_params(rng) for _ in KINDS]
    numbers = [0.7] * len(params)
    together = sample_rows(logits, params, numbers, pool)
    alone = [sample_rows(logits[i : i + 1], [params[i]], [0.7], pool)[0] for i in range(len(params))]
    assert together == alone


def numbers_at_edges(row: np.ndarray, params: SamplingParams, rng: np.random.Generator) -> list[float]:
    """Where one token ends and the next begins, and the numbers next to that: the last bit of every sum shows there."""
    if params.is_greedy:
        return [0.5]
    _, weights = oracle.candidates(row, params)
    ends = np.cumsum(weights)[rng.permutation(weights.size)[:6]] / weights.sum()
    near = [float(x) for end in ends for x in (end, np.nextafter(end, 0), np.nextafter(end, 1), end - 3e-16)]
    return [min(max(x, 0.0), 1 - 2.0**-53) for x in (0.0, rng.random(), 1.0, *near)]


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "num_rows"), [(1, 5), (7, 30), (257, 30), (5000, 40), (151_936, 6)])
def test_candidates_lead_to_the_token_of_the_whole_row(
    kind: str, vocab: int, num_rows: int, pools: list[WorkerPool]
) -> None:
    """Also those of more tokens than top_k wants."""
    rng = np.random.default_rng([3, KINDS.index(kind), vocab])
    for _ in range(num_rows):
        row = make_logits(kind, vocab, rng)
        params = replace(draw_params(rng), top_k=int(rng.choice([1, 2, 20, 150, 700])))
        least = np.sort(row)[-min(params.top_k + int(rng.choice([0, 0, 9, 200])), vocab)]
        ids = np.flatnonzero(row >= least)
        numbers = numbers_at_edges(row, params, rng)
        many, count = [params] * len(numbers), len(ids)
        table = torch.zeros(len(numbers), 2 * (count + 1), dtype=torch.int32)
        few = table[:, : count + 1], table.view(torch.float32)[:, count + 1 :]
        few[0][:, :count], few[1][:, :count] = torch.from_numpy(ids), torch.from_numpy(row[ids])
        whole = torch.from_numpy(row).repeat(len(numbers), 1)
        for pool in (pools[0], pools[-1]):
            found = sample_candidates(*few, [count] * len(numbers), vocab, many, numbers, pool)
            assert found == [pick.token_id for pick in sample_rows(whole, many, numbers, pool)]


def test_candidates_are_checked(pool: WorkerPool) -> None:
    ids, logits, one = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3), [SamplingParams(top_k=2)]
    for count in (0, 1):
        with pytest.raises(ValueError, match="fewer candidates than its top_k"):
            sample_candidates(ids, logits, [count], 9, one, [0.5], pool)
    with pytest.raises(ValueError, match="fewer candidates"):  # of a row without top_k all tokens are
        sample_candidates(ids, logits, [3], 9, [SamplingParams(top_k=0)], [0.5], pool)
    with pytest.raises(ValueError, match="at most 3"):
        sample_candidates(ids, logits, [4], 9, one, [0.5], pool)
    with pytest.raises(ValueError, match="one per row"):
        sample_candidates(ids, logits, [2], 9, one, [], pool)
    with pytest.raises(ValueError, match="ids must be"):
        sample_candidates(ids.long(), logits, [2], 9, one, [0.5], pool)
    with pytest.raises(ValueError, match="logits must be"):
        sample_candidates(ids, logits[:, :2], [2], 9, one, [0.5], pool)
    assert sample_candidates(ids[:0], logits[:0], [], 9, [], [], pool) == []


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_error_and_bits_of_weights(temperature: float, pools: list[WorkerPool]) -> None:
    """2^(x scale) against the same in 80 bits, for the factors that the kernel sees: below 1.5 ulp; 1 for the best."""
    logits = torch.linspace(-44 * temperature, 0, 100_003)
    scale = 1.4426950408889634 / temperature
    exact = np.exp2(logits.numpy().astype(np.longdouble) * np.longdouble(scale))
    found = token_weights(logits, temperature, pools[0])
    assert found[-1] == 1.0
    assert float(np.abs((found.numpy() - exact) / np.spacing(exact.astype(np.float64))).max()) < 1.5
    for each in pools:
        assert torch.equal(token_weights(logits, temperature, each), found)


def test_weights_below_two_to_the_minus_64_are_none(pool: WorkerPool) -> None:
    weights = token_weights(torch.tensor([0.0, -63.99 * math.log(2), -64.01 * math.log(2), -1e30]), 1.0, pool)
    assert (weights > 0).tolist() == [True, True, False, False]


def test_reads_no_byte_behind_the_last_logit(guarded, pools: list[WorkerPool]) -> None:
    for vocab in (1, 15, 17, 255, 257, 300):
        logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
        row = guarded.copy_to_end(logits.view(torch.uint8)).view(torch.float32)[None]
        for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3, top_p=0.5)):
            for pool in pools:
                assert sample_rows(row, [params], [0.5], pool) == sample_rows(logits[None], [params], [0.5], pools[0])
        found, same = token_logprobs(row, [0], 2, pools[-1]), token_logprobs(logits[None], [0], 2, pools[0])
        assert torch.equal(found.top, same.top)


@pytest.mark.parametrize("vocab", [3, 40, 1000])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers(vocab: int, bad: float, pools: list[WorkerPool]) -> None:
    logits = torch.zeros(3, vocab)
    logits[0, vocab - 1] = logits[0, 1] = logits[2, 2] = bad
    params, barred = [SamplingParams()] * 3, torch.full((vocab,), -math.inf)
    barred[1] = 0.0
    for pool in pools:
        assert sample_rows(logits, params, [0.0] * 3, pool) == [Pick(-1, 1), Pick(0, -1), Pick(-1, 2)]
        picks = sample_rows(logits, params, [0.0] * 3, pool, [barred] * 3)
        assert picks == [Pick(-1, 1), Pick(1, -1), Pick(-1, 2)]
    adjusted = torch.zeros(vocab)
    adjusted[2] = bad
    expected = Pick(0, -1) if bad == -math.inf else Pick(-1, 2)
    assert sample_rows(torch.zeros(1, vocab), params[:1], [0.0], pools[-1], [adjusted]) == [expected]
    nothing = [torch.full((vocab,), -math.inf)]
    assert sample_rows(torch.zeros(1, vocab), params[:1], [0.0], pools[-1], nothing) == [Pick(-1, 0)]


@pytest.mark.parametrize("vocab", [1, 20, 300, 151_936])
def test_logprobs(vocab: int, pools: list[WorkerPool]) -> None:
    rng = np.random.default_rng(vocab)
    rows = np.stack([make_logits(kind, vocab, rng) for kind in ("peaked", "flat", "ties", "equal", "huge")])
    wide = rows.astype(np.float64)
    top = wide.max(axis=1, keepdims=True)
    exact = wide - top - np.log(np.exp(wide - top).sum(axis=1, keepdims=True))
    ids, count = [vocab // 2] * len(rows), min(20, vocab)
    found = token_logprobs(torch.from_numpy(rows), ids, 20, pools[0])
    order = np.argsort(-rows, axis=1, kind="stable")[:, :count]
    assert found.top_ids.tolist() == order.tolist()
    # One rounding to fp32, and sums whose errors are below V 2^-53 of them.
    for values, places in ((found.chosen[:, None], np.array(ids)[:, None]), (found.top, order)):
        wanted = np.take_along_axis(exact, places, axis=1)
        error = np.abs(values.numpy().astype(np.float64) - wanted)
        assert (error <= np.abs(wanted) * 2.0**-24 + vocab * 2.0**-52).all()
    for pool in pools:
        again = token_logprobs(torch.from_numpy(rows), ids, 20, pool)
        assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


def test_logprobs_of_infinities(pool: WorkerPool) -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0], [0.0, math.nan, 1.0], [1.0, math.inf, 0.0], [-math.inf] * 3])
    chosen, top_ids, top = token_logprobs(logits, [1, 0, 0, 0], 3, pool)
    assert chosen[0] == -math.inf
    assert top_ids[0].tolist() == [0, 2, 1]
    assert bool(chosen[1:].isnan().all())
    assert bool(top[1:].isnan().all())


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's kat_vectors for philox4x32 with 10 rounds
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    assert philox4x32(words(counter), words(key)) == words(expected)
    found = oracle.philox4x32(np.array([words(counter)], dtype=np.uint64), np.array([words(key)], dtype=np.uint64))
    assert tuple(found[0].tolist()) == words(expected)


def test_uniforms() -> None:
    seeds, positions = [0, 1, -1, 2**64 - 1, 2**70 + 1], [0, 5, 7, 7, 2**40 + 5]
    found = uniforms(seeds, positions)
    low, half = 2**32 - 1, 32
    counters = [[place & low, place >> half, 0, 0] for place in positions]
    keys = [[seed & low, seed >> half & low] for seed in seeds]
    bits = oracle.philox4x32(np.array(counters, dtype=np.uint64), np.array(keys, dtype=np.uint64))
    assert found == [((int(a) << 21) | (int(b) >> 11)) * 2.0**-53 for a, b, _, _ in bits]
    assert found[2] == found[3]
    assert len(set(found)) == 4


def test_arguments_are_checked(pool: WorkerPool) -> None:
    logits = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="logits must have shape"):
        sample_rows(logits, [SamplingParams()], [0.5], pool)
    with pytest.raises(ValueError, match="one per row"):
        sample_rows(logits, [SamplingParams()] * 2, [0.5], pool)
    with pytest.raises(ValueError, match=r"adjusted\[1\] must have shape"):
        sample_rows(logits, [SamplingParams()] * 2, [0.5] * 2, pool, [None, torch.zeros(5)])
    with pytest.raises(ValueError, match="columns"):
        sample_rows(torch.zeros(1, 0), [SamplingParams()], [0.5], pool)
    with pytest.raises(IndexError, match=r"token_ids\[1\] is 4"):
        token_logprobs(logits, [0, 4], 1, pool)
    assert sample_rows(torch.zeros(0, 4), [], [], pool) == []
    assert token_logprobs(torch.zeros(0, 4), [], 1, pool).top.shape == (0, 1)


def test_a_row_without_allowed_tokens_has_no_choice(pools: list[WorkerPool]) -> None:
    logits = torch.randn(2, 40)
    allowed = torch.zeros(2, dtype=torch.int32)
    params = [SamplingParams(temperature=0), SamplingParams()]
    picks = sample_rows(logits, params, [0.5, 0.5], pools[-1], None, [allowed, allowed])
    assert [pick.token_id for pick in picks] == [-1, -1]
    logits[0, 3] = float("nan")  # is found although it may not be chosen
    allowed[0] = 1
    assert sample_rows(logits, params, [0.5, 0.5], pools[-1], None, [allowed, allowed]) == [Pick(-1, 3), Pick(0, -1)]
    with pytest.raises(ValueError, match=r"allowed\[0\] must have shape"):
        sample_rows(logits, params, [0.5, 0.5], pools[-1], None, [allowed[:1], None])

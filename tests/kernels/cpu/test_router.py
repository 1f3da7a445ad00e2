"""Routing against the routers of transformers, and equal bits over tiers, threads and rows."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch.nn import functional

from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.router import RouterSpec, Scoring, route
from ktransformers.kernels.extension import extension


def logits_of(tokens: int, experts: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) * 3


def softmax_oracle(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As Qwen3-MoE and Mixtral route, in fp64."""
    weights, ids = torch.softmax(logits.double(), -1).topk(top_k, -1)
    return ids, weights / weights.sum(-1, keepdim=True) if renormalize else weights


@pytest.mark.parametrize("experts", [7, 64, 128, 160])
@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_top_k(pools: list[WorkerPool], experts: int, renormalize: bool) -> None:
    logits = logits_of(19, experts)
    ids, weights = softmax_oracle(logits, 6, renormalize)
    expected = None
    for pool in pools:
        got_ids, got = route(logits, RouterSpec(6, renormalize=renormalize), pool)
        assert torch.equal(got_ids, ids)
        # exp is good to 1.5 ulp and the sum has at most 160 roundings of numbers that add up to 1.
        assert (got - weights).abs().max() <= 200 * 2.0**-24
        expected = got if expected is None else expected
        assert torch.equal(got, expected)
        assert torch.equal(route(logits[5:6], RouterSpec(6, renormalize=renormalize), pool)[1], expected[5:6])


def test_groups_bias_and_scaling_as_deepseek_v3(pools: list[WorkerPool]) -> None:
    tokens, experts, groups, kept, top_k = 33, 64, 8, 3, 6
    logits = logits_of(tokens, experts, 1)
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(2)) * 0.1
    scores = torch.sigmoid(logits)
    choice = scores + bias
    group_scores = choice.view(tokens, groups, -1).topk(2, -1)[0].sum(-1)
    mask = torch.zeros(tokens, groups).scatter_(1, group_scores.topk(kept, -1)[1], 1.0)
    allowed = mask.bool().repeat_interleave(experts // groups, 1)
    ids = choice.masked_fill(~allowed, float("-inf")).topk(top_k, -1)[1]
    chosen = scores.gather(1, ids)
    weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * 2.5
    spec = RouterSpec(top_k, Scoring.SIGMOID, groups, kept, "top2", True, 2.5)
    for pool in pools:
        got_ids, got = route(logits, spec, pool, bias)
        assert torch.equal(got_ids, ids)
        assert torch.allclose(got, weights, rtol=1e-6)


def test_the_best_expert_of_a_group_as_deepseek_v2(pools: list[WorkerPool]) -> None:
    logits = logits_of(9, 16, 3)
    scores = functional.softmax(logits, -1)
    best = scores.view(9, 4, 4).amax(-1).topk(2, -1)[1]
    allowed = torch.zeros(9, 4).scatter_(1, best, 1.0).bool().repeat_interleave(4, 1)
    ids = scores.masked_fill(~allowed, 0).topk(3, -1)[1]
    got_ids, got = route(logits, RouterSpec(3, Scoring.SOFTMAX, 4, 2, "max", False, 16.0), pools[-1])
    assert torch.equal(got_ids, ids)
    assert torch.allclose(got, scores.gather(1, ids) * 16, rtol=1e-5)


def test_ties_go_to_the_lower_index_and_nan_breaks_nothing(pools: list[WorkerPool]) -> None:
    ids, weights = route(torch.zeros(1, 8), RouterSpec(3), pools[0])
    assert ids.tolist() == [[0, 1, 2]]
    assert torch.allclose(weights, torch.full((1, 3), 1 / 3))
    ids, _ = route(torch.full((1, 8), float("nan")), RouterSpec(3), pools[0])
    assert sorted(set(ids[0].tolist())) == sorted(ids[0].tolist())
    assert all(0 <= number < 8 for number in ids[0].tolist())


def test_specs_that_do_not_fit(pools: list[WorkerPool]) -> None:
    with pytest.raises(ValueError, match="cannot be chosen"):
        route(torch.zeros(1, 8), RouterSpec(5, num_groups=4, topk_groups=2), pools[0])
    with pytest.raises(ValueError, match="do not fit"):
        RouterSpec(0)
    with pytest.raises(ValueError, match=r"must be a Scoring .* got 'softmax'"):
        RouterSpec(2, "softmax")  # type: ignore[arg-type]


def test_python_has_the_kinds_of_the_extension() -> None:
    assert {kind.name: kind.value for kind in Scoring} == extension.scoring_kinds()


def test_the_extension_takes_a_spec_by_name_alone() -> None:
    """Neighbours of one type could change places without an error."""
    fields = {
        "top_k": 2,
        "scoring": int(Scoring.SIGMOID),
        "num_groups": 4,
        "topk_groups": 2,
        "is_top2": True,
        "is_renormalized": False,
        "scaling": 2.5,
    }
    make: Any = extension.RouterSpec
    make(**fields)
    with pytest.raises(TypeError):
        make(*fields.values())
    for name in fields:
        with pytest.raises(TypeError):
            make(**{key: value for key, value in fields.items() if key != name})
    with pytest.raises(TypeError):
        make(**fields, is_sigmoid=True)
    for number in (-1, len(Scoring)):
        with pytest.raises(ValueError, match=f"unknown scoring {number}"):
            make(**{**fields, "scoring": number})


@pytest.mark.parametrize("group_score", ["max", "top2"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_each_field_of_a_spec_reaches_its_own_place(
    group_score: Literal["max", "top2"], renormalize: bool, pools: list[WorkerPool]
) -> None:
    """By what it does: the best expert is alone in its group, the best two are in the other."""
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]])
    spec = RouterSpec(2, Scoring.SIGMOID, 2, 1, group_score, renormalize, 4.0)
    ids, weights = route(logits, spec, pools[0])
    assert ids.tolist() == [[0, 1] if group_score == "max" else [2, 3]]
    scores = torch.sigmoid(logits)[0, ids[0]]
    want = 4 * scores / scores.sum() if renormalize else 4 * scores
    assert torch.allclose(weights[0], want, rtol=1e-6)

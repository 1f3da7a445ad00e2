"""The router of the GPU against plain torch in fp64, as the model code of transformers has it."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.cpu.router import RouterSpec, Scoring
from ktransformers.kernels.triton.experts import router
from ktransformers.kernels.triton.experts.router import MAX_ROUTED_ROWS, Chosen, SlotSplit, route_rows, topk_router
from ktransformers.kernels.triton.experts.slot_map import split_pairs

SCORES = {Scoring.SOFTMAX: lambda logits: torch.softmax(logits, -1), Scoring.SIGMOID: torch.sigmoid}


def oracle(logits, spec, bias=None):
    """Stable sorts, so that the lower index wins between equals."""
    wide = logits.double()
    scores = SCORES[spec.scoring](wide)
    choice = scores if bias is None else scores + bias.double()
    if spec.topk_groups < spec.num_groups:
        groups = choice.view(len(logits), spec.num_groups, -1)
        best = groups.amax(-1) if spec.group_score == "max" else groups.topk(2, dim=-1)[0].sum(-1)
        chosen = best.sort(dim=-1, descending=True, stable=True)[1][:, : spec.topk_groups]
        keep = torch.zeros_like(best).scatter_(1, chosen, 1).bool()
        choice = groups.masked_fill(~keep[:, :, None], float("-inf")).reshape(choice.shape)
    ids = choice.sort(dim=-1, descending=True, stable=True)[1][:, : spec.top_k]
    weights = scores.gather(1, ids)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, (weights * spec.scaling).float()


SPECS = {
    "qwen3": (128, RouterSpec(8)),
    "qwen2": (60, RouterSpec(4, renormalize=False)),
    "mixtral": (8, RouterSpec(2)),
    "deepseek_v2": (
        160,
        RouterSpec(6, num_groups=8, topk_groups=3, group_score="max", renormalize=False, scaling=16.0),
    ),
    "deepseek_v3": (256, RouterSpec(8, Scoring.SIGMOID, num_groups=8, topk_groups=4, scaling=2.5)),
    "glm4": (96, RouterSpec(8, Scoring.SIGMOID, scaling=1.5)),
    "one": (7, RouterSpec(1)),
    "all": (5, RouterSpec(5)),
    "ernie": (64, RouterSpec(6)),
}
BIASED = ("deepseek_v3", "glm4", "ernie")  # have a bias that moves the choice


def choice_bias(name, num_experts, generator):
    return 0.1 * torch.randn(num_experts, generator=generator) if name in BIASED else None


@pytest.mark.parametrize("name", SPECS)
def test_families(name, device):
    num_experts, spec = SPECS[name]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, num_experts, generator=generator)
    bias = choice_bias(name, num_experts, generator)
    ids, weights = topk_router(logits.to(device), spec, None if bias is None else bias.to(device))
    want_ids, want_weights = oracle(logits, spec, bias)
    assert torch.equal(ids.cpu(), want_ids)
    torch.testing.assert_close(weights.cpu(), want_weights, rtol=1e-5, atol=1e-6)  # fp32 sums of up to 256 terms


def test_ties_go_to_the_lower_index(device):
    logits = torch.zeros(3, 12)
    logits[1, 5:9] = 1.0
    logits[2] = torch.tensor([0.0, 2.0] * 6)
    ids, weights = topk_router(logits.to(device), RouterSpec(3))
    assert ids.tolist() == [[0, 1, 2], [5, 6, 7], [1, 3, 5]]
    torch.testing.assert_close(weights.cpu(), torch.full((3, 3), 1 / 3))
    grouped = RouterSpec(3, Scoring.SIGMOID, num_groups=4, topk_groups=2)
    assert topk_router(logits.to(device), grouped)[0].tolist() == [[0, 1, 2], [5, 6, 7], [3, 5, 9]]


def test_half_precision_given_memory_and_strides(device):
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(1)).half()
    memory = torch.full((4, 6), -1, dtype=torch.int32, device=device)
    scores = torch.full((4, 6), -1.0, device=device)
    ids, weights = topk_router(logits.to(device)[:, :24], RouterSpec(4), ids=memory[:, :4], weights=scores[:, :4])
    want_ids, want_weights = oracle(logits[:, :24], RouterSpec(4))
    assert torch.equal(ids.long().cpu(), want_ids)
    torch.testing.assert_close(weights.cpu(), want_weights, rtol=1e-5, atol=1e-6)
    assert bool((memory[:, 4:] == -1).all())
    assert bool((scores[:, 4:] == -1).all())
    assert topk_router(logits[:0].to(device), RouterSpec(4))[0].shape == (0, 4)


@pytest.mark.parametrize("spec", [RouterSpec(4), RouterSpec(4, Scoring.SIGMOID, num_groups=4, topk_groups=2)], ids=str)
def test_ids_stay_distinct_and_in_range_whatever_the_logits_are(spec, device):
    logits = torch.zeros(3, 16)
    logits[0, 3], logits[1], logits[2, :14] = float("nan"), float("-inf"), float("-inf")
    ids, _ = topk_router(logits.to(device), spec)
    for row in ids.tolist():
        assert len(set(row)) == 4
        assert set(row) <= set(range(16))


def test_a_scoring_without_a_formula_is_an_error(device, monkeypatch):
    """As one would be that the kernels forget."""
    logits, choice_of = torch.zeros(2, 8, device=device), router._Choice.of
    monkeypatch.setattr(router._Choice, "of", lambda *args: choice_of(*args)._replace(scoring="OTHER"))
    with pytest.raises(Exception) as raised:  # noqa: PT011 -- a compiler's, which has the reason behind it
        topk_router(logits, RouterSpec(2))
    reasons, error = list[str](), raised.value
    while error is not None:
        reasons.append(str(error))
        error = error.__cause__ or error.__context__
    assert any("no formula for this scoring" in reason for reason in reasons)


def test_bad_arguments_are_named(device):
    logits = torch.zeros(2, 12, device=device)
    with pytest.raises(ValueError, match="12 experts do not make 5 groups"):
        topk_router(logits, RouterSpec(2, num_groups=5))
    with pytest.raises(ValueError, match="exceeds the 3 experts"):
        topk_router(logits, RouterSpec(4, num_groups=4))
    with pytest.raises(ValueError, match="topk_groups 3 of 2"):
        RouterSpec(2, num_groups=2, topk_groups=3)
    with pytest.raises(ValueError, match="ids must have shape"):
        topk_router(logits, RouterSpec(2), ids=torch.zeros(2, 3, dtype=torch.int64, device=device))
    with pytest.raises(TypeError, match="weights fp32"):
        topk_router(logits, RouterSpec(2), weights=torch.zeros(2, 2, dtype=torch.float16, device=device))
    with pytest.raises(ValueError, match="bias must have shape"):
        topk_router(logits, RouterSpec(2), logits[0, :3])


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "num_rows"), [("deepseek_v3", 1), ("qwen3", 2), ("mixtral", 3), ("one", 9)])
def test_product_and_choice_in_one_launch(name, num_rows, device):
    num_experts, spec = SPECS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, 1100, generator=generator).half()
    weight = torch.randn(num_experts, 1100, generator=generator) / 1100**0.5
    bias = choice_bias(name, num_experts, generator)
    counters = torch.zeros(MAX_ROUTED_ROWS, dtype=torch.int32, device=device)
    on_device = None if bias is None else bias.to(device)
    shift = torch.randn(num_experts, generator=generator) if name in ("qwen3", "one") else torch.zeros(num_experts)
    extra = (on_device, shift.to(device) if shift.any() else None)
    logits, ids, weights = route_rows(x.to(device), weight.to(device), spec, counters, *extra)
    # fp32 sums of 1,100 products: the order moves them by some ulps of sum |x w|.
    size = x.double().abs() @ weight.double().abs().T + shift.abs()
    assert ((logits.cpu().double() - x.double() @ weight.double().T - shift).abs() <= 2**-20 * size).all()
    want_ids, want_weights = oracle(logits.cpu(), spec, bias)
    assert ids.dtype is torch.int32
    assert torch.equal(ids.cpu().long(), want_ids)
    torch.testing.assert_close(weights.cpu(), want_weights, rtol=1e-5, atol=1e-6)
    assert not counters.any()
    alone = route_rows(x[-1:].to(device), weight.to(device), spec, counters, *extra)
    assert torch.equal(alone[0][0], logits[-1])  # of one row or of many: the same sum


@pytest.mark.every(3)
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_choices_are_counted_where_rows_hold_tokens(num_rows, device):
    num_experts, spec = SPECS["qwen3"]
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(num_rows, 64, generator=generator), torch.randn(num_experts, 64, generator=generator)
    counts = torch.arange(num_experts, dtype=torch.int64, device=device)  # what steps before have left
    slots = torch.tensor([-1 if row % 3 == 2 else row for row in range(num_rows)])
    memory = torch.full((num_rows, spec.top_k), -7, dtype=torch.int32, device=device)
    chosen = Chosen(counts, slots.to(device), memory)
    if num_rows <= MAX_ROUTED_ROWS:
        counters = torch.zeros(MAX_ROUTED_ROWS, dtype=torch.int32, device=device)
        _, ids, _ = route_rows(x.to(device), weight.to(device), spec, counters, chosen=chosen)
    else:
        ids, _ = topk_router((x @ weight.T).to(device), spec, ids=memory, chosen=chosen)
    assert ids.data_ptr() == memory.data_ptr()
    want = torch.arange(num_experts) + ids.cpu()[slots >= 0].flatten().bincount(minlength=num_experts)
    assert torch.equal(counts.cpu(), want)
    assert bool((ids.cpu()[slots < 0] == -1).all())
    alone, _ = topk_router((x @ weight.T).to(device), spec)
    assert torch.equal(ids.cpu()[slots >= 0], alone.cpu()[slots >= 0].to(torch.int32))


@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_a_choice_is_divided_by_slots(num_rows, device):
    """As split_pairs divides what a router has chosen, but that padding is nobody's."""
    num_experts, spec = SPECS["qwen3"]
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(num_rows, 64, generator=generator), torch.randn(num_experts, 64, generator=generator)
    slots = torch.tensor([-1 if row % 3 == 1 else row for row in range(num_rows)], device=device)
    slot_of = torch.where(torch.rand(num_experts, generator=generator) < 0.4, 5, -1).to(device, torch.int32)
    hits, picks = (torch.full((num_experts,), 3, dtype=torch.int64, device=device) for _ in range(2))
    elsewhere = torch.full((num_rows, spec.top_k), -7, dtype=torch.int32, device=device)
    chosen = Chosen(hits, slots, None, SlotSplit(slot_of, picks, elsewhere))
    if num_rows <= MAX_ROUTED_ROWS:
        counters = torch.zeros(MAX_ROUTED_ROWS, dtype=torch.int32, device=device)
        _, here, weights = route_rows(x.to(device), weight.to(device), spec, counters, chosen=chosen)
    else:
        here, weights = topk_router((x @ weight.T).to(device), spec, chosen=chosen)
    ids, want_weights = topk_router((x @ weight.T).to(device), spec)
    want_hits, want_picks = (torch.full_like(hits, 3) for _ in range(2))
    want = split_pairs(ids, slot_of, Chosen(want_hits, slots), want_picks)
    is_token = slots >= 0
    assert torch.equal(here[is_token].int(), want[0][is_token])
    assert torch.equal(elsewhere[is_token], want[1][is_token])
    assert bool((here[~is_token] == -1).all())
    assert bool((elsewhere[~is_token] == num_experts).all())
    assert torch.equal(hits, want_hits)
    assert torch.equal(picks, want_picks)
    assert 3 * num_experts < int(hits.sum()) < int(picks.sum())
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-6)


def test_slots_that_do_not_fit_are_refused(device):
    logits = torch.zeros(4, 8, device=device)
    counts, slots = torch.zeros(8, dtype=torch.int64, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    ids = torch.zeros(4, 2, dtype=torch.int32, device=device)
    for split, error in (
        (SlotSplit(counts, counts, ids), TypeError),
        (SlotSplit(counts[:7].int(), counts, ids), ValueError),
        (SlotSplit(counts.int(), counts, ids[:3]), ValueError),
    ):
        with pytest.raises(error, match=r"slot_of|elsewhere"):
            topk_router(logits, RouterSpec(2), chosen=Chosen(counts, slots, None, split))


def test_what_is_to_be_counted_must_fit(device):
    logits = torch.zeros(4, 8, device=device)
    counts, slots = torch.zeros(8, dtype=torch.int64, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(TypeError, match="int64"):
        topk_router(logits, RouterSpec(2), chosen=Chosen(counts.int(), slots))
    with pytest.raises(ValueError, match=r"\[8\] and slots \[4\]"):
        topk_router(logits, RouterSpec(2), chosen=Chosen(counts, slots[:3]))

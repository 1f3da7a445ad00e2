"""Top-k router on the GPU: from logits to expert ids and weights in one kernel. Knows numbers, not experts.

Families differ in a few switches, all of them here: softmax or sigmoid scores; a bias that moves the choice and not
the weight (DeepSeek-V3, arXiv 2412.19437); experts in groups of which the best few may be chosen from; weights that
sum to 1; a scaling factor. Between equal scores the lower index wins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.routing import RouterSpec
from ktransformers.kernels.triton.elementwise import check_float
from ktransformers.kernels.triton.runtime import jit, tl

__all__ = ["RouterSpec", "topk_router"]


@jit
def _best_groups(
    choice, exists, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, G_P2: tl.constexpr, TOP2: tl.constexpr
):
    """`choice` [G_P2, groups' experts] with all but the best TOPK_GROUPS groups at minus infinity."""
    best = tl.max(choice, 1)
    if TOP2:
        where = tl.argmax(choice, 1)
        columns = tl.arange(0, choice.shape[1])
        others = tl.where(columns[None, :] == where[:, None], float("-inf"), choice)
        best += tl.max(others, 1)
    groups = tl.arange(0, G_P2)
    best = tl.where(groups < NUM_GROUPS, best, float("-inf"))
    chosen = tl.zeros([G_P2], tl.int32)
    for _ in tl.static_range(TOPK_GROUPS):
        open_groups = tl.where(chosen > 0, float("-inf"), best)
        chosen = tl.where(groups == tl.argmax(open_groups, 0), 1, chosen)
    return tl.where((chosen > 0)[:, None] & exists, choice, float("-inf"))


@jit
def _router_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, logits_row, ids_row, weights_row, scaling,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, K_P2: tl.constexpr, NUM_GROUPS: tl.constexpr, G_P2: tl.constexpr,
    PER_GROUP: tl.constexpr, PER_P2: tl.constexpr, TOPK_GROUPS: tl.constexpr, SIGMOID: tl.constexpr,
    TOP2: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): one row, its experts as [G_P2 groups, PER_P2 experts of a group]."""
    row = tl.program_id(0).to(tl.int64)
    groups, members = tl.arange(0, G_P2), tl.arange(0, PER_P2)
    experts = groups[:, None] * PER_GROUP + members[None, :]
    exists = (groups[:, None] < NUM_GROUPS) & (members[None, :] < PER_GROUP)
    x = tl.load(logits_ptr + row * logits_row + experts, mask=exists, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(x)
    else:
        top = tl.max(tl.max(x, 1), 0)
        e = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(tl.sum(e, 1), 0)
        scores = e / tl.where(total == 0.0, 1.0, total)  # a row of minus infinities
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + experts, mask=exists, other=0.0).to(tl.float32)
    # A score that is no number must not leave the row without ids: it loses to every number.
    choice = tl.where(exists & (choice == choice), choice, float("-inf"))
    if TOPK_GROUPS < NUM_GROUPS:
        choice = _best_groups(choice, exists, NUM_GROUPS, TOPK_GROUPS, G_P2, TOP2)
    flat_choice = tl.reshape(choice, [G_P2 * PER_P2])
    flat_scores = tl.reshape(scores, [G_P2 * PER_P2])
    flat_exists = tl.reshape(exists, [G_P2 * PER_P2])
    places = tl.arange(0, G_P2 * PER_P2)
    # Ranks below every number keep the places left, so that ids stay distinct and in range whatever the scores are.
    flat_choice = tl.where(flat_exists, tl.maximum(flat_choice, -3.0e38), float("-inf"))
    slots = tl.arange(0, K_P2)
    ids = tl.zeros([K_P2], tl.int32)
    weights = tl.zeros([K_P2], tl.float32)
    for k in tl.static_range(TOP_K):
        place = tl.argmax(flat_choice, 0)
        weight = tl.sum(tl.where(places == place, flat_scores, 0.0), 0)
        flat_choice = tl.where(places == place, float("-inf"), flat_choice)
        ids = tl.where(slots == k, place // PER_P2 * PER_GROUP + place % PER_P2, ids)
        weights = tl.where(slots == k, weight, weights)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(ids_ptr + row * ids_row + slots, ids.to(ids_ptr.dtype.element_ty), mask=slots < TOP_K)
    tl.store(weights_ptr + row * weights_row + slots, weights * scaling, mask=slots < TOP_K)


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def topk_router(
    logits: Tensor,
    spec: RouterSpec,
    bias: Tensor | None = None,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids [T, K], fp32 weights [T, K]) of the experts each row goes to, best first.

    logits: fp16, bf16 or fp32 [T, E]; the arithmetic is fp32. bias: [E], added to the scores for the choice alone.
    ids: int32 or int64, int64 when made here. weights: fp32. Memory may be given for both, e.g. pinned-side buffers
    of a graph. Raises TypeError or ValueError for arguments that do not fit.
    """
    check_float("logits", logits, (None, None))
    num_rows, num_experts = logits.shape
    if num_experts % spec.num_groups:
        raise ValueError(f"{num_experts} experts do not make {spec.num_groups} groups")
    per_group = num_experts // spec.num_groups
    if spec.top_k > spec.topk_groups * per_group:
        raise ValueError(f"top_k {spec.top_k} exceeds the {spec.topk_groups * per_group} experts to choose from")
    if spec.group_score == "top2" and per_group < 2 and spec.topk_groups < spec.num_groups:
        raise ValueError("group_score 'top2' needs groups of two experts or more")
    if bias is not None:
        check_float("bias", bias, (num_experts,))
    shape = (num_rows, spec.top_k)
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device) if ids is None else ids
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device) if weights is None else weights
    if ids.dtype not in (torch.int32, torch.int64) or weights.dtype != torch.float32:
        raise TypeError(f"ids must be int32 or int64 and weights fp32, got {ids.dtype} and {weights.dtype}")
    for name, tensor in (("ids", ids), ("weights", weights)):
        if tuple(tensor.shape) != shape or (spec.top_k > 1 and tensor.stride(1) != 1):
            raise ValueError(f"{name} must have shape {list(shape)} with contiguous rows, got {list(tensor.shape)}")
    if num_rows == 0:
        return ids, weights
    g_p2, per_p2 = _power_of_two(spec.num_groups), _power_of_two(per_group)
    _router_kernel[(num_rows,)](
        logits, bias, ids, weights, logits.stride(0), ids.stride(0), weights.stride(0), float(spec.scaling),
        NUM_EXPERTS=num_experts, TOP_K=spec.top_k, K_P2=_power_of_two(spec.top_k), NUM_GROUPS=spec.num_groups,
        G_P2=g_p2, PER_GROUP=per_group, PER_P2=per_p2, TOPK_GROUPS=spec.topk_groups,
        SIGMOID=spec.scoring == "sigmoid", TOP2=spec.group_score == "top2", HAS_BIAS=bias is not None,
        RENORMALIZE=spec.renormalize, num_warps=1 if g_p2 * per_p2 <= 512 else 4,
    )  # fmt: skip
    return ids, weights

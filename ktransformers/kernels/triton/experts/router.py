"""Top-k router on the GPU: from hidden states or logits to expert ids and weights in one kernel. Knows no experts.

Families differ in a few switches, all of them here: how logits become scores (`Scoring`); a bias that moves the choice
and not the weight (DeepSeek-V3, arXiv 2412.19437); experts in groups of which the best few may be chosen from; weights
that sum to 1; a scaling factor. Between equal scores the lower index wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ktransformers.kernels.cpu.router import RouterSpec
from ktransformers.kernels.triton.common.arrival import arrive_last
from ktransformers.kernels.triton.common.elementwise import check_float
from ktransformers.kernels.triton.common.runtime import jit, power_of_two, tl

__all__ = ["MAX_ROUTED_ROWS", "Chosen", "SlotSplit", "route_rows", "topk_router"]


@dataclass(frozen=True, slots=True)
class SlotSplit:
    """Division of a router's choice between experts that have a slot on the GPU and others, see `hot.split_pairs`.

    slot_of: int32 [E], negative for an expert without a slot. picks: int64 [E], counts all experts that are chosen.
    elsewhere: int32 [T, K], contiguous, gets the ids of experts without a slot, E in the places of others.
    """

    slot_of: Tensor
    picks: Tensor
    elsewhere: Tensor

    def check(self, num_rows: int, num_experts: int) -> None:
        """Raise TypeError or ValueError for tensors that do not fit so many rows and experts."""
        types = self.slot_of.dtype, self.picks.dtype, self.elsewhere.dtype
        if types != (torch.int32, torch.int64, torch.int32):
            raise TypeError(f"slot_of, picks and elsewhere must be int32, int64 and int32, got {types}")
        if self.slot_of.shape != (num_experts,) or self.picks.shape != (num_experts,):
            raise ValueError(f"slot_of and picks must be [{num_experts}]")
        if len(self.elsewhere) != num_rows or not self.elsewhere.is_contiguous():
            raise ValueError(f"elsewhere must be contiguous and have {num_rows} rows")


@dataclass(frozen=True, slots=True)
class Chosen:
    """Memory in which a router leaves its choice for others, beside its results.

    counts: int64 [E], to which each row adds 1 for each of its experts. slots: int64 [T], the cache's slots of the
    rows: a row without one is padding, which is not counted and has no experts: its ids are -1. ids: int32 [T, K],
    memory for the ids, or None. split: where it is given, the router's ids are -1 for experts without a slot as well,
    which counts leave out.
    """

    counts: Tensor
    slots: Tensor
    ids: Tensor | None = None
    split: SlotSplit | None = None

    def check(self, num_rows: int, num_experts: int) -> None:
        """Raise TypeError or ValueError for tensors that do not fit so many rows and experts."""
        if self.counts.dtype != torch.int64 or self.slots.dtype != torch.int64:
            raise TypeError(f"counts and slots must be int64, got {self.counts.dtype} and {self.slots.dtype}")
        if self.counts.shape != (num_experts,) or self.slots.shape != (num_rows,) or not self.slots.is_contiguous():
            raise ValueError(f"counts must be [{num_experts}] and slots [{num_rows}]")
        if self.split is not None:
            self.split.check(num_rows, num_experts)


class _Choice(NamedTuple):
    """What kernels are compiled for, beside their sizes: a spec, and the experts it chooses from.

    One constexpr, so that its fields are listed once. `_p2`: the next power of two. scoring: name of a Scoring. A field
    is a plain value inside a kernel. tl.static_range, tl.zeros and other kernels take a constexpr made of it.
    """

    top_k: int
    k_p2: int
    num_groups: int
    groups_p2: int
    group_size: int
    size_p2: int
    topk_groups: int
    scoring: str
    is_top2: bool
    has_bias: bool
    is_renormalized: bool
    is_counted: bool
    is_split: bool

    @classmethod
    def of(cls, spec: RouterSpec, num_experts: int, bias: Tensor | None, chosen: Chosen | None) -> _Choice:
        """Return the constants for a spec. Raises TypeError or ValueError for what does not fit so many experts."""
        if num_experts % spec.num_groups:
            raise ValueError(f"{num_experts} experts do not make {spec.num_groups} groups")
        size = num_experts // spec.num_groups
        if spec.top_k > spec.topk_groups * size:
            raise ValueError(f"top_k {spec.top_k} exceeds the {spec.topk_groups * size} experts to choose from")
        if spec.group_score == "top2" and size < 2 and spec.topk_groups < spec.num_groups:
            raise ValueError("group_score 'top2' needs groups of two experts or more")
        if bias is not None:
            check_float("bias", bias, (num_experts,))
        return cls(
            top_k=spec.top_k,
            k_p2=power_of_two(spec.top_k),
            num_groups=spec.num_groups,
            groups_p2=power_of_two(spec.num_groups),
            group_size=size,
            size_p2=power_of_two(size),
            topk_groups=spec.topk_groups,
            scoring=spec.scoring.name,
            is_top2=spec.group_score == "top2",
            has_bias=bias is not None,
            is_renormalized=spec.renormalize,
            is_counted=chosen is not None,
            is_split=chosen is not None and chosen.split is not None,
        )


@jit
def _best_groups(scores, exists, CHOICE: tl.constexpr):
    """`scores` [R, groups_p2, size_p2] with all but the best groups at minus infinity."""
    best = tl.max(scores, 2)
    if CHOICE.is_top2:
        where = tl.argmax(scores, 2)
        columns = tl.arange(0, scores.shape[2])
        others = tl.where(columns[None, None, :] == where[:, :, None], float("-inf"), scores)
        best += tl.max(others, 2)
    GROUPS_P2: tl.constexpr = CHOICE.groups_p2
    TOPK_GROUPS: tl.constexpr = CHOICE.topk_groups
    groups = tl.arange(0, GROUPS_P2)[None, :]
    best = tl.where(groups < CHOICE.num_groups, best, float("-inf"))
    chosen = tl.zeros([best.shape[0], GROUPS_P2], tl.int32)
    for _ in tl.static_range(TOPK_GROUPS):
        open_groups = tl.where(chosen > 0, float("-inf"), best)
        chosen = tl.where(groups == tl.argmax(open_groups, 1)[:, None], 1, chosen)
    return tl.where((chosen > 0)[:, :, None] & exists, scores, float("-inf"))


@jit
def _softmax(x):
    top = tl.max(tl.max(x, 2), 1)
    e = tl.exp(x - tl.where(top == float("-inf"), 0.0, top)[:, None, None])
    total = tl.sum(tl.sum(e, 2), 1)
    return e / tl.where(total == 0.0, 1.0, total)[:, None, None]  # a row of minus infinities


@jit
def _scores(x, CHOICE: tl.constexpr):
    """Of logits [R, groups_p2, size_p2], minus infinity where there is no expert."""
    if CHOICE.scoring == "SOFTMAX":
        scores = _softmax(x)
    elif CHOICE.scoring == "SIGMOID":
        scores = tl.sigmoid(x)
    else:
        tl.static_assert(False, "no formula for this scoring")
    return scores


@jit
def _choose(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, counts_ptr, slots_ptr, slot_of_ptr, picks_ptr, elsewhere_ptr,
    logits_row, ids_row, weights_row, scaling, rows, num_rows, CHOICE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Ids and weights of R rows [R], their experts as [groups_p2 groups, size_p2 experts of a group]."""
    groups, members = tl.arange(0, CHOICE.groups_p2)[None, :, None], tl.arange(0, CHOICE.size_p2)[None, None, :]
    experts = groups * CHOICE.group_size + members
    exists = (groups < CHOICE.num_groups) & (members < CHOICE.group_size)
    there = (rows < num_rows)[:, None, None]
    at = logits_ptr + (rows * logits_row)[:, None, None] + experts
    # Other programs of this launch may have written the logits: not from L1.
    x = tl.load(at, mask=exists & there, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    scores = _scores(x, CHOICE)
    choice = scores
    if CHOICE.has_bias:
        choice += tl.load(bias_ptr + experts, mask=exists, other=0.0).to(tl.float32)
    # A score that is no number must not leave the row without ids: it loses to every number.
    choice = tl.where(exists & (choice == choice), choice, float("-inf"))
    if CHOICE.topk_groups < CHOICE.num_groups:
        choice = _best_groups(choice, exists, CHOICE)
    flat_choice = tl.reshape(choice, [R, CHOICE.groups_p2 * CHOICE.size_p2])
    flat_scores = tl.reshape(scores, [R, CHOICE.groups_p2 * CHOICE.size_p2])
    places = tl.arange(0, CHOICE.groups_p2 * CHOICE.size_p2)[None, :]
    place_groups, place_members = places // CHOICE.size_p2, places % CHOICE.size_p2
    flat_exists = (place_groups < CHOICE.num_groups) & (place_members < CHOICE.group_size)
    # Ranks below every number keep the places left, so that ids stay distinct and in range whatever the scores are.
    flat_choice = tl.where(flat_exists, tl.maximum(flat_choice, -3.0e38), float("-inf"))
    TOP_K: tl.constexpr = CHOICE.top_k
    K_P2: tl.constexpr = CHOICE.k_p2
    slots = tl.arange(0, K_P2)[None, :]
    ids = tl.zeros([R, K_P2], tl.int32)
    weights = tl.zeros([R, K_P2], tl.float32)
    for k in tl.static_range(TOP_K):
        place = tl.argmax(flat_choice, 1)[:, None]
        weight = tl.sum(tl.where(places == place, flat_scores, 0.0), 1)[:, None]
        flat_choice = tl.where(places == place, float("-inf"), flat_choice)
        ids = tl.where(slots == k, place // CHOICE.size_p2 * CHOICE.group_size + place % CHOICE.size_p2, ids)
        weights = tl.where(slots == k, weight, weights)
    if CHOICE.is_renormalized:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    mask = (rows < num_rows)[:, None] & (slots < TOP_K)
    if CHOICE.is_counted:
        is_token = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)[:, None] >= 0
        if CHOICE.is_split:
            NUM_EXPERTS: tl.constexpr = CHOICE.num_groups * CHOICE.group_size
            has_slot = tl.load(slot_of_ptr + ids, mask=mask & is_token, other=-1) >= 0
            tl.atomic_add(picks_ptr + ids, 1, mask=mask & is_token, sem="relaxed")
            elsewhere = tl.where(is_token & (has_slot == 0), ids, NUM_EXPERTS)
            tl.store(elsewhere_ptr + (rows * TOP_K)[:, None] + slots, elsewhere, mask=mask)
            is_token = has_slot
        tl.atomic_add(counts_ptr + ids, 1, mask=mask & is_token, sem="relaxed")
        ids = tl.where(is_token, ids, -1)
    tl.store(ids_ptr + (rows * ids_row)[:, None] + slots, ids.to(ids_ptr.dtype.element_ty), mask=mask)
    tl.store(weights_ptr + (rows * weights_row)[:, None] + slots, weights * scaling, mask=mask)


# Counts of one layer lie behind those of another: where they begin is no reason for another variant.
@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["counts_ptr", "slot_of_ptr", "picks_ptr"])
def _router_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, counts_ptr, slots_ptr, slot_of_ptr, picks_ptr, elsewhere_ptr,
    logits_row, ids_row, weights_row, scaling, num_rows, CHOICE: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): one row."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    _choose(
        logits_ptr, bias_ptr, ids_ptr, weights_ptr, counts_ptr, slots_ptr, slot_of_ptr, picks_ptr, elsewhere_ptr,
        logits_row, ids_row, weights_row, scaling, rows, num_rows, CHOICE, 1,
    )  # fmt: skip


@jit
def _row_product(x_ptr, x_row, row, num_rows, columns, w, acc, WIDTH: tl.constexpr):
    mask = columns < tl.where(row < num_rows, WIDTH, 0)
    x = tl.load(x_ptr + row * x_row + columns, mask=mask, other=0.0).to(tl.float32)
    return acc + x[None, :] * w


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["counts_ptr", "slot_of_ptr", "picks_ptr"])
def _product_kernel(
    x_ptr, w_ptr, logit_bias_ptr, bias_ptr, logits_ptr, ids_ptr, weights_ptr, counts_ptr, slots_ptr, slot_of_ptr,
    picks_ptr, elsewhere_ptr, counters, x_row, w_row, logits_row, ids_row, weights_row, scaling, num_rows,
    NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr,
    HAS_LOGIT_BIAS: tl.constexpr, CHOICE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid (PROGRAMS, groups of R <= 4 rows): logits of BE experts for R rows; the last program of the rows chooses."""
    experts = tl.program_id(0) * BE + tl.arange(0, BE)
    first = tl.program_id(1).to(tl.int64) * R
    a0 = tl.zeros((BE, BK), tl.float32)
    a1, a2, a3 = a0, a0, a0
    for start in range(0, WIDTH, BK):
        columns = start + tl.arange(0, BK)
        mask = (experts < NUM_EXPERTS)[:, None] & (columns < WIDTH)[None, :]
        w = tl.load(w_ptr + experts[:, None].to(tl.int64) * w_row + columns[None, :], mask=mask, other=0.0)
        w = w.to(tl.float32)
        a0 = _row_product(x_ptr, x_row, first, num_rows, columns, w, a0, WIDTH)
        if R > 1:
            a1 = _row_product(x_ptr, x_row, first + 1, num_rows, columns, w, a1, WIDTH)
        if R > 2:
            a2 = _row_product(x_ptr, x_row, first + 2, num_rows, columns, w, a2, WIDTH)
            a3 = _row_product(x_ptr, x_row, first + 3, num_rows, columns, w, a3, WIDTH)
    at = logits_ptr + first * logits_row + experts
    shift = tl.zeros((BE,), tl.float32)
    if HAS_LOGIT_BIAS:
        shift += tl.load(logit_bias_ptr + experts, mask=experts < NUM_EXPERTS, other=0.0).to(tl.float32)
    tl.store(at, tl.sum(a0, 1) + shift, mask=experts < tl.where(first < num_rows, NUM_EXPERTS, 0))
    if R > 1:
        tl.store(at + logits_row, tl.sum(a1, 1) + shift, mask=experts < tl.where(first + 1 < num_rows, NUM_EXPERTS, 0))
    if R > 2:
        mask = experts < tl.where(first + 2 < num_rows, NUM_EXPERTS, 0)
        tl.store(at + 2 * logits_row, tl.sum(a2, 1) + shift, mask=mask)
        mask = experts < tl.where(first + 3 < num_rows, NUM_EXPERTS, 0)
        tl.store(at + 3 * logits_row, tl.sum(a3, 1) + shift, mask=mask)
    if arrive_last(counters + tl.program_id(1), PROGRAMS):
        _choose(
            logits_ptr, bias_ptr, ids_ptr, weights_ptr, counts_ptr, slots_ptr, slot_of_ptr, picks_ptr, elsewhere_ptr,
            logits_row, ids_row, weights_row, scaling, first + tl.arange(0, R), num_rows, CHOICE, R,
        )  # fmt: skip


def _results(
    shape: tuple[int, int], ids: Tensor | None, weights: Tensor | None, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Ids and weights as given, checked, or new; dtype: of new ids."""
    ids = torch.empty(shape, dtype=dtype, device=device) if ids is None else ids
    weights = torch.empty(shape, dtype=torch.float32, device=device) if weights is None else weights
    if ids.dtype not in (torch.int32, torch.int64) or weights.dtype != torch.float32:
        raise TypeError(f"ids must be int32 or int64 and weights fp32, got {ids.dtype} and {weights.dtype}")
    for name, tensor in (("ids", ids), ("weights", weights)):
        if tuple(tensor.shape) != shape or (shape[1] > 1 and tensor.stride(1) != 1):
            raise ValueError(f"{name} must have shape {list(shape)} with contiguous rows, got {list(tensor.shape)}")
    return ids, weights


def _seen(chosen: Chosen | None, num_rows: int, num_experts: int) -> tuple[Tensor | None, ...]:
    """counts and slots, then slot_of, picks and elsewhere, checked."""
    if chosen is None:
        return (None,) * 5
    chosen.check(num_rows, num_experts)
    split = chosen.split
    return (
        chosen.counts,
        chosen.slots,
        *((None,) * 3 if split is None else (split.slot_of, split.picks, split.elsewhere)),
    )


def topk_router(
    logits: Tensor,
    spec: RouterSpec,
    bias: Tensor | None = None,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    chosen: Chosen | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose (ids [T, K], fp32 weights [T, K]) of the experts each row goes to, best first.

    logits: fp16, bf16 or fp32 [T, E]; the arithmetic is fp32. bias: [E], added to the scores for the choice alone.
    ids: int32 or int64, int64 when made here. weights: fp32. Memory may be given for both, e.g. pinned-side buffers
    of a graph. chosen: without ids. Raises TypeError or ValueError for arguments that do not fit.
    """
    check_float("logits", logits, (None, None))
    num_rows, num_experts = logits.shape
    choice = _Choice.of(spec, num_experts, bias, chosen)
    ids, weights = _results((num_rows, spec.top_k), ids, weights, logits.device, torch.int64)
    if num_rows:
        _router_kernel[(num_rows,)](
            logits, bias, ids, weights, *_seen(chosen, num_rows, num_experts), logits.stride(0), ids.stride(0),
            weights.stride(0), float(spec.scaling), num_rows, CHOICE=choice, num_warps=1 if num_experts <= 512 else 4,
        )  # fmt: skip
    return ids, weights


MAX_ROUTED_ROWS = 64
"""Rows that `route_rows` takes: with more of them a product on its own reads the weights less often."""


def route_rows(
    x: Tensor,
    weight: Tensor,
    spec: RouterSpec,
    counters: Tensor,
    bias: Tensor | None = None,
    logit_bias: Tensor | None = None,
    chosen: Chosen | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (logits fp32 [T, E], ids int32 [T, K], weights fp32 [T, K]): product and choice in one launch.

    x: [T, H], T <= MAX_ROUTED_ROWS, of any float type; weight: [E, H], contiguous rows; the product is fp32 throughout,
    summed in an order that depends on H alone. logit_bias: [E], added to the logits; bias: as in `topk_router`.
    counters: int32, MAX_ROUTED_ROWS of them, all 0 before and after; calls that share them must run one after another
    on one stream. Raises TypeError or ValueError for arguments that do not fit.
    """
    num_rows, width = x.shape
    num_experts = weight.shape[0]
    check_float("x", x, (None, None))
    check_float("weight", weight, (None, width))
    if logit_bias is not None:
        check_float("logit_bias", logit_bias, (num_experts,))
    choice = _Choice.of(spec, num_experts, bias, chosen)
    if num_rows > MAX_ROUTED_ROWS or counters.dtype != torch.int32 or counters.numel() < MAX_ROUTED_ROWS:
        raise ValueError(f"{num_rows} rows and {counters.numel()} counters, at most and at least {MAX_ROUTED_ROWS}")
    logits = torch.empty(num_rows, num_experts, dtype=torch.float32, device=x.device)
    memory = None if chosen is None else chosen.ids
    ids, weights = _results((num_rows, spec.top_k), memory, None, x.device, torch.int32)
    if num_rows == 0:
        return logits, ids, weights
    at_once = 1 if num_rows == 1 else 2 if num_rows == 2 else 4
    experts = 1 if num_experts <= 192 else 2
    seen = _seen(chosen, num_rows, num_experts)
    programs = -(-num_experts // experts)
    _product_kernel[(programs, -(-num_rows // at_once))](
        x, weight, logit_bias, bias, logits, ids, weights, *seen, counters, x.stride(0), weight.stride(0),
        logits.stride(0), ids.stride(0), weights.stride(0), float(spec.scaling), num_rows, NUM_EXPERTS=num_experts,
        WIDTH=width, BE=experts, BK=min(1024, max(16, power_of_two(width))), PROGRAMS=programs,
        HAS_LOGIT_BIAS=logit_bias is not None, CHOICE=choice, R=at_once, num_warps=4,
    )  # fmt: skip
    return logits, ids, weights

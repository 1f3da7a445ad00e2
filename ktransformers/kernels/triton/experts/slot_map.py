"""Experts of which some lie in slots of a GPU, by a map on the device that changes between steps.

    split_pairs    ids ── slot_of ──┬─ ids of experts that have a slot, -1 for others     ── tiles over slots ─┐
                                    └─ ids of the others, E for those that have a slot    ── the CPU           │
    sum_onto       the CPU's sum of a token, then the parts of its other experts, in the order of its top-k list

The map is read when the kernels run, so that a captured graph sees what was written to it before a replay. Knows
ids, slots and parts; not who fills the slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.triton.common.runtime import jit, tl, triton
from ktransformers.kernels.triton.experts.align import known_expert
from ktransformers.kernels.triton.experts.router import Chosen

__all__ = ["split_pairs", "sum_onto"]

_CHUNK = 128


# Maps and counts of one layer lie behind those of another: where they begin is no reason for another variant.
@jit(do_not_specialize=["P"], do_not_specialize_on_alignment=["slot_of", "picks", "hits"])
def _split_kernel(ids, slot_of, rows, picks, hits, there, elsewhere, P, E: tl.constexpr, TOP_K: tl.constexpr,
                  COUNTS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    p = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = p < P
    id = tl.load(ids + p, mask=mask, other=-1).to(tl.int32)
    expert = known_expert(id, E)
    is_there = tl.load(slot_of + expert, mask=expert >= 0, other=-1) >= 0
    tl.store(there + p, tl.where(is_there, expert, -1), mask=mask)
    tl.store(elsewhere + p, tl.where(is_there, E, id), mask=mask)
    if COUNTS:
        is_token = tl.load(rows + p // TOP_K, mask=mask, other=-1) >= 0
        is_pick = is_token & (expert >= 0)
        tl.atomic_add(picks + expert, 1, mask=is_pick, sem="relaxed")
        tl.atomic_add(hits + expert, 1, mask=is_pick & is_there, sem="relaxed")


@jit
def _sum_onto_kernel(parts, ids, base, out, N: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.load(base + token * N + n, mask=n < N, other=0.0).to(tl.float32)
    for j in range(TOP_K):
        p = token * TOP_K + j
        expert = known_expert(tl.load(ids + p), E)
        total += tl.load(parts + p * N + n, mask=n < tl.where(expert >= 0, N, 0), other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)


def split_pairs(
    topk_ids: Tensor, slot_of: Tensor, chosen: Chosen | None, picks: Tensor, there: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Divide pairs between the GPU's slots and the CPU: ids int32 [T, K] for each.

    topk_ids: int32 or int64 [T, K]. slot_of: int32 [E], negative for an expert without a slot. chosen: where pairs that
    have a slot are counted, and which rows hold tokens; None: nothing is counted. picks: int64 [E], counts all pairs.
    there: memory for the first result. The first has -1 for what is not there; the second E, which the CPU's kernels
    skip, for what is, and ids out of range as they are. Raises TypeError or ValueError for arguments that do not fit.
    """
    if topk_ids.dtype not in (torch.int32, torch.int64) or slot_of.dtype != torch.int32 or picks.dtype != torch.int64:
        raise TypeError(
            f"ids must be integers, slot_of int32, picks int64; got {topk_ids.dtype}, {slot_of.dtype}, {picks.dtype}"
        )
    num_experts = len(slot_of)
    if topk_ids.dim() != 2 or not topk_ids.is_contiguous() or picks.shape != slot_of.shape:
        raise ValueError("topk_ids must be contiguous [T, K], slot_of and picks of one length")
    if chosen is not None:
        chosen.check(len(topk_ids), num_experts)
    if there is None:
        there = torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device)
    if there.shape != topk_ids.shape or there.dtype != torch.int32 or not there.is_contiguous():
        raise ValueError(f"there must be contiguous int32 {list(topk_ids.shape)}")
    elsewhere = torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device)
    pairs, (rows, hits) = topk_ids.numel(), (picks, picks) if chosen is None else (chosen.slots, chosen.counts)
    if pairs:
        _split_kernel[(triton.cdiv(pairs, _CHUNK),)](
            topk_ids, slot_of, rows, picks, hits, there, elsewhere, pairs, E=num_experts, TOP_K=topk_ids.shape[1],
            COUNTS=chosen is not None, CHUNK=_CHUNK, num_warps=4,
        )  # fmt: skip
    return there, elsewhere


def sum_onto(base: Tensor, parts: Tensor, topk_ids: Tensor, num_experts: int, out: Tensor) -> Tensor:
    """Compute out[t] = base[t] + the parts of token t, in the order of its top-k list, added in fp32 and rounded once.

    base, out: [T, H] of any float type. parts: [T * K, H]. topk_ids: int32 [T, K]; ids outside 0 .. num_experts - 1
    have no part. Raises ValueError for shapes that do not fit.
    """
    (tokens, top_k), width = topk_ids.shape, parts.shape[1]
    if parts.shape[0] != tokens * top_k or base.shape != (tokens, width) or out.shape != base.shape:
        raise ValueError(f"base and out must be [{tokens}, {width}], and parts have {tokens * top_k} rows")
    if not (base.is_contiguous() and parts.is_contiguous() and topk_ids.is_contiguous() and out.is_contiguous()):
        raise ValueError("base, parts, topk_ids and out must be contiguous")
    if tokens:
        _sum_onto_kernel[(tokens, triton.cdiv(width, 1024))](
            parts, topk_ids, base, out, N=width, E=num_experts, TOP_K=top_k, BN=1024, num_warps=4,
        )  # fmt: skip
    return out

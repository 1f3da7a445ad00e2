"""Sorts token-expert pairs by expert into blocks of one expert each, on the device and in fixed-size arrays.

The order is stable (pairs of an expert keep the order of tokens), so results do not depend on timing. Nothing is read
by the host. Knows ids; does not know weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.kernels.triton.common.runtime import jit, tl, triton

__all__ = ["SMALL_PAIRS", "AlignedPairs", "known_expert", "max_blocks", "moe_align"]


SMALL_PAIRS = 8192
"""More pairs than that are sorted in larger steps."""


@dataclass(frozen=True, slots=True)
class AlignedPairs:
    """Blocks of (token, expert) pairs of one expert each. Pair p is slot p % k of token p // k.

    pair_ids: int32 [max_blocks * block], pairs in the order of their experts, the number of pairs where there is none.
    block_slots: int32 [max_blocks], where the weights of a block's expert are; -1 after the last block.
    counts: int32 [num_experts], pairs of each expert.
    """

    pair_ids: Tensor
    block_slots: Tensor
    counts: Tensor

    @classmethod
    def allocate(cls, pairs: int, num_experts: int, block: int, device: torch.device) -> AlignedPairs:
        """Allocate room for `pairs` (token, expert) pairs in blocks of `block` rows."""
        blocks = max_blocks(pairs, num_experts, block)
        sizes = (blocks * block, blocks, num_experts)
        return cls(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))


def max_blocks(pairs: int, num_experts: int, block: int) -> int:
    """Return the blocks that suffice for any routing: at most one block of each expert that has pairs is not full."""
    partial = min(num_experts, pairs)
    return partial + (pairs - partial) // block


@jit
def known_expert(expert, E: tl.constexpr):
    """Return the expert, -1 for an id outside 0 .. E - 1."""
    return tl.where((expert >= 0) & (expert < E), expert, -1)


@jit
def expert_slot(slots, expert, E: tl.constexpr, HAS_SLOTS: tl.constexpr):
    """Return the slot of an expert's weights, -1 for none (an id outside 0 .. E - 1, or one that the map leaves
    out).
    """
    slot = known_expert(expert, E)
    if HAS_SLOTS:
        slot = tl.load(slots + slot, mask=slot >= 0, other=-1)
    return slot


@jit(do_not_specialize=["P"])
def _count_kernel(ids, slots, counts, P, E: tl.constexpr, HAS_SLOTS: tl.constexpr, CHUNK: tl.constexpr):
    expert = tl.program_id(0)
    total = tl.zeros((CHUNK,), tl.int32)
    if expert_slot(slots, expert, E, HAS_SLOTS) >= 0:
        for start in range(0, P, CHUNK):
            p = start + tl.arange(0, CHUNK)
            total += (tl.load(ids + p, mask=p < P, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, axis=0))


@jit(do_not_specialize=["P", "blocks"])
def _place_kernel(ids, slots, counts, pair_ids, block_slots, P, blocks, E: tl.constexpr, E2: tl.constexpr,
                  HAS_SLOTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Program e writes the blocks of expert e; program E what comes after the last block."""
    expert = tl.program_id(0)
    experts = tl.arange(0, E2)
    needed = (tl.load(counts + experts, mask=experts < E, other=0) + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(experts < expert, needed, 0), axis=0)
    chunk = tl.arange(0, CHUNK)
    if expert == E:
        for start in range(first, blocks, CHUNK):
            tl.store(block_slots + start + chunk, -1, mask=start + chunk < blocks)
        for start in range(first * BLOCK, blocks * BLOCK, CHUNK):
            tl.store(pair_ids + start + chunk, P, mask=start + chunk < blocks * BLOCK)
    else:
        count = tl.load(counts + expert)
        own = (count + BLOCK - 1) // BLOCK
        slot = expert_slot(slots, expert, E, HAS_SLOTS)
        for start in range(0, own, CHUNK):
            tl.store(block_slots + first + start + chunk, slot, mask=start + chunk < own)
        at = first * BLOCK
        if count > 0:
            for start in range(0, P, CHUNK):
                p = start + chunk
                here = (tl.load(ids + p, mask=p < P, other=-1) == expert).to(tl.int32)
                tl.store(pair_ids + at + tl.cumsum(here, axis=0) - 1, p, mask=here > 0)
                at += tl.sum(here, axis=0)
        fill = at + tl.arange(0, BLOCK)
        tl.store(pair_ids + fill, P, mask=fill < (first + own) * BLOCK)


def moe_align(
    topk_ids: Tensor,
    num_experts: int,
    block: int,
    expert_slots: Tensor | None = None,
    out: AlignedPairs | None = None,
) -> AlignedPairs:
    """Sort the pairs of topk_ids, int32 [T, k], by expert into blocks of `block` (a power of two).

    Ids outside 0 .. num_experts - 1 are left out, as are experts whose entry in expert_slots, int32 [num_experts], is
    negative; the others' blocks carry that entry (the id itself without a map). out: of `AlignedPairs.allocate`.
    Raises TypeError or ValueError for arguments that do not fit.
    """
    for name, tensor in (("topk_ids", topk_ids), ("expert_slots", expert_slots)):
        if tensor is not None and tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {tensor.dtype}")
    if not topk_ids.is_contiguous() or (expert_slots is not None and expert_slots.shape != (num_experts,)):
        raise ValueError(f"topk_ids must be contiguous and expert_slots [{num_experts}]")
    if block < 1 or block & (block - 1):
        raise ValueError(f"block must be a power of two, got {block}")
    pairs = topk_ids.numel()
    blocks = max_blocks(pairs, num_experts, block)
    if out is None:
        out = AlignedPairs.allocate(pairs, num_experts, block, topk_ids.device)
    if (out.pair_ids.numel(), out.block_slots.numel(), out.counts.numel()) != (blocks * block, blocks, num_experts):
        raise ValueError(f"out must be of AlignedPairs.allocate({pairs}, {num_experts}, {block})")
    slots = topk_ids if expert_slots is None else expert_slots
    chunk, warps = (1024, 4) if pairs <= SMALL_PAIRS else (4096, 8)
    common = {"E": num_experts, "HAS_SLOTS": expert_slots is not None, "CHUNK": chunk, "num_warps": warps}
    _count_kernel[(num_experts,)](topk_ids, slots, out.counts, pairs, **common)
    _place_kernel[(num_experts + 1,)](
        topk_ids, slots, out.counts, out.pair_ids, out.block_slots, pairs, blocks,
        E2=triton.next_power_of_2(num_experts), BLOCK=block, **common,
    )  # fmt: skip
    return out

"""Mixture of experts on quantized weights, on CUDA: the kernels behind the rule name KExpertsMarlin.

    hidden = silu(x W_gate^T) * (x W_up^T);  out[t] = sum over j of topk_weights[t, j] * (hidden W_down^T)

or with biases behind the three products and another activation (`MoeEpilogue`).
Two paths. Few tokens with weights in the GPU's layout: one program per pair and tile of rows, on the GEMV (an
expert that two tokens share is read from the L2 cache the second time); two launches, and one before them that makes
block-wise int16 of x (block_int16.py) where gate and up are of types that take them. Otherwise: pairs sorted by expert
(align.py), then tensor-core tiles over blocks of one expert. Both add a token's experts in the order of its top-k list.
Experts lie in slots of one tensor per projection; a staging buffer may hold a few of them (`moe_blocks`), in the layout
of the CPU kernels too. Launches depend on shapes alone; with `out` and a workspace nothing is allocated.
Knows no router and no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.triton.common.bits import ONE
from ktransformers.kernels.triton.common.elementwise import activated
from ktransformers.kernels.triton.common.runtime import jit, tl, triton
from ktransformers.kernels.triton.experts.align import AlignedPairs, known_expert, max_blocks, moe_align
from ktransformers.kernels.triton.experts.gemv import launch_gemv
from ktransformers.kernels.triton.experts.matrices import ExpertMatrices, MoeMatrices, RoutedRows
from ktransformers.kernels.triton.experts.workspace import MoeWorkspace, block_rows, uses_gemv
from ktransformers.kernels.triton.linear.linear import check_rows, result
from ktransformers.kernels.triton.linear.matmul import dot_tile, dot_tile_pair
from ktransformers.kernels.triton.quant.dequant import runs_ahead
from ktransformers.kernels.triton.quant.repack import has_gemv
from ktransformers.kernels.triton.quant.tables import tables

__all__ = ["moe", "moe_blocks", "moe_sum"]


def _tile_shape(part: ExpertMatrices, block: int, count: int) -> tuple[int, int]:
    """Rows of each of `count` matrices that a program multiplies with blocks of so many rows of x, and its warps."""
    if runs_ahead(int(part.qtype), int(part.layout)):
        return 128 // count, 4
    if block == 16:
        return 64 // count, 2
    return (128, 8) if block == 128 and count == 1 else (64, 4)


@jit(do_not_specialize=["P", "first"])
def _gate_up_tile(x, stride, ids, pair_ids, block_slots, gate, up, gate_bias, up_bias, hidden, P, first, one, tables,
                  GATE: tl.constexpr, UP: tl.constexpr, GATE_BYTES: tl.constexpr, UP_BYTES: tl.constexpr,
                  LAYOUT: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr,
                  LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    block = first + tl.program_id(0)
    slot = tl.load(block_slots + block).to(tl.int64)
    if slot >= 0:
        n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
        pair = tl.load(pair_ids + block * BM + tl.arange(0, BM))[:, None]
        rows = x + (pair // TOP_K).to(tl.int64) * stride
        g, u = dot_tile_pair(rows, pair < P, gate + slot * GATE_BYTES, up + slot * UP_BYTES, tl.program_id(1) * BN, one,
                             tables, 0, (K + BK - 1) // BK, GATE, UP, LAYOUT, K, N, BN, BK, WARPS)  # fmt: skip
        if HAS_BIAS:
            expert = tl.load(ids + tl.load(pair_ids + block * BM))  # of all pairs in the block
            g += tl.load(gate_bias + expert * N + n, mask=n < N, other=0.0)
            u += tl.load(up_bias + expert * N + n, mask=n < N, other=0.0)
        value = activated(g, u, ACT, ALPHA, LIMIT).to(hidden.dtype.element_ty)
        tl.store(hidden + pair.to(tl.int64) * N + n, value, mask=(pair < P) & (n < N))


@jit(do_not_specialize=["P", "first"])
def _down_tile(hidden, ids, pair_ids, block_slots, weights, down, bias, parts, P, first, one, tables,
               TYPE: tl.constexpr,
               BYTES: tl.constexpr, LAYOUT: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    block = first + tl.program_id(0)
    slot = tl.load(block_slots + block).to(tl.int64)
    if slot >= 0:
        n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
        pair = tl.load(pair_ids + block * BM + tl.arange(0, BM))[:, None]
        acc = dot_tile(hidden + pair.to(tl.int64) * K, pair < P, down + slot * BYTES, n, n < N, one, tables, 0,
                       (K + BK - 1) // BK, TYPE, LAYOUT, K, N, BK, WARPS)  # fmt: skip
        if HAS_BIAS:
            expert = tl.load(ids + tl.load(pair_ids + block * BM))
            acc += tl.load(bias + expert * N + n, mask=n < N, other=0.0)
        value = acc * tl.load(weights + pair, mask=pair < P, other=0.0)
        tl.store(parts + pair.to(tl.int64) * N + n, value.to(parts.dtype.element_ty), mask=(pair < P) & (n < N))


@jit
def _sum_kernel(parts, ids, out, N: tl.constexpr, E: tl.constexpr,
                TOP_K: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """out[t] = sum of the parts of token t, in their order, without those that no expert wrote."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for j in range(TOP_K):
        p = token * TOP_K + j
        slot = known_expert(tl.load(ids + p), E)
        total += tl.load(parts + p * N + n, mask=n < tl.where(slot >= 0, N, 0), other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)


def _tiles(rows: RoutedRows, experts: MoeMatrices, space: MoeWorkspace) -> None:
    pairs, num_experts = rows.topk_ids.numel(), experts.up.slots
    block = block_rows(pairs, num_experts)
    aligned = moe_align(rows.topk_ids, num_experts, block, out=space.aligned)
    _blocks(rows, experts, aligned, (0, max_blocks(pairs, num_experts, block)), block, space)


def _blocks(
    rows: RoutedRows,
    experts: MoeMatrices,
    aligned: AlignedPairs,
    span: tuple[int, int],
    block: int,
    space: MoeWorkspace,
) -> None:
    """The blocks span[0] .. span[1] - 1, of `block` rows each."""
    x, ids, weights = rows.x, rows.topk_ids, rows.topk_weights
    gate, up, down, epilogue = experts.gate, experts.up, experts.down, experts.epilogue
    gate_bias, up_bias, down_bias = epilogue.biases or (x, x, x)
    pairs, top_k = weights.numel(), weights.shape[1]
    first, blocks = span[0], span[1] - span[0]
    block_n, warps = _tile_shape(up, block, 2)
    _gate_up_tile[(blocks, triton.cdiv(up.rows, block_n))](
        x, x.stride(0), ids, aligned.pair_ids, aligned.block_slots, gate.data, up.data, gate_bias, up_bias,
        space.hidden, pairs, first, ONE, tables(x.device), int(gate.qtype), int(up.qtype), gate.nbytes, up.nbytes,
        int(up.layout), up.cols, up.rows, TOP_K=top_k, BM=block, BN=block_n, BK=64, WARPS=warps, num_warps=warps,
        **epilogue.options(),
    )  # fmt: skip
    block_n, warps = _tile_shape(down, block, 1)
    _down_tile[(blocks, triton.cdiv(down.rows, block_n))](
        space.hidden, ids, aligned.pair_ids, aligned.block_slots, weights, down.data, down_bias, space.parts, pairs,
        first, ONE, tables(x.device), int(down.qtype), down.nbytes, int(down.layout), down.cols, down.rows,
        BM=block, BN=block_n, BK=64, WARPS=warps, HAS_BIAS=epilogue.biases is not None, num_warps=warps,
    )  # fmt: skip


def _check(rows: RoutedRows, experts: MoeMatrices) -> None:
    x, ids, weights = rows.x, rows.topk_ids, rows.topk_weights
    gate, up, down = experts.gate, experts.up, experts.down
    check_rows("x", x, up.cols)
    if ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise TypeError(f"topk_ids must be int32 and topk_weights float32, got {ids.dtype} and {weights.dtype}")
    if ids.dim() != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
        raise ValueError(
            f"topk_ids and topk_weights must be [{x.shape[0]}, k], got {tuple(ids.shape)}, {tuple(weights.shape)}"
        )
    if not ids.is_contiguous() or not weights.is_contiguous():
        raise ValueError("topk_ids and topk_weights must be contiguous")
    same = (gate.rows, gate.cols, gate.layout, gate.slots) == (up.rows, up.cols, up.layout, up.slots)
    loops = {has_gemv(int(part.qtype), part.layout) for part in (gate, up)}
    if not same or len(loops) > 1 or (down.cols, down.slots) != (up.rows, up.slots):
        raise ValueError("gate and up must have one shape, layout, kind of loop and number of slots, and down must fit")


def moe(
    rows: RoutedRows, experts: MoeMatrices, out: Tensor | None = None, *, workspace: MoeWorkspace | None = None
) -> Tensor:
    """Compute the sum of each token's experts, [T, H], times their weights.

    out: fp16, bf16 or fp32, x's dtype when None. workspace: of `MoeWorkspace.allocate` for this many rows. Between
    the projections, and on the path of many tokens before the sum, values are rounded to x's dtype, or to
    block-wise int16 where down takes them. Raises TypeError or ValueError for arguments that do not fit.
    """
    _check(rows, experts)
    x, ids, up, down = rows.x, rows.topk_ids, experts.up, experts.down
    num_experts = up.slots
    target = result(out, x, down.rows)
    if x.shape[0] == 0 or ids.shape[1] == 0:
        return target.zero_()
    space = workspace or MoeWorkspace.allocate(x, ids.shape[1], num_experts, up, down)
    space.check(ids.numel(), up.rows, down.rows)
    experts.epilogue.check(num_experts, up.rows, down.rows)
    if uses_gemv(x.shape[0], up, down):
        launch_gemv(rows, experts, target, space)
    else:
        _tiles(rows, experts, space)
        moe_sum(ids, target, space, num_experts)
    return target


def moe_blocks(
    rows: RoutedRows, experts: MoeMatrices, workspace: MoeWorkspace, span: tuple[int, int], num_experts: int
) -> None:
    """Compute some of the blocks of pairs, for experts that come in turns through staging buffers.

    When every block has had its turn, `moe_sum` gives what one `moe` with all experts would have given on its path of
    many tokens, bit for bit. experts: those that are there now. workspace.aligned: of `moe_align` with blocks of
    block_rows(pairs, num_experts), of rows.topk_ids or of others that stand for them; rows.topk_ids says whose the
    biases are. span: first block of this turn, and the one after its last.
    """
    assert workspace.aligned is not None, "the workspace has no sorted pairs"
    pairs = rows.topk_weights.numel()
    workspace.check(pairs, experts.up.rows, experts.down.rows)
    if span[1] > span[0]:
        _blocks(rows, experts, workspace.aligned, span, block_rows(pairs, num_experts), workspace)


def moe_sum(topk_ids: Tensor, out: Tensor, workspace: MoeWorkspace, num_experts: int) -> Tensor:
    """Compute out [T, H] = the sum of each token's parts, in the order of its top-k list.

    Left out: ids outside 0 .. num_experts - 1.
    """
    tokens, top_k = topk_ids.shape
    if out.shape != (tokens, workspace.parts.shape[1]) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous [{tokens}, {workspace.parts.shape[1]}], got {tuple(out.shape)}")
    if tokens:
        _sum_kernel[(tokens, triton.cdiv(out.shape[1], 1024))](
            workspace.parts, topk_ids, out, N=out.shape[1], E=num_experts,
            TOP_K=top_k, BN=1024, num_warps=4,
        )  # fmt: skip
    return out

"""Experts of few tokens on the GEMV, see moe.py. Knows launch parameters, which depend on shapes alone."""

from __future__ import annotations

from torch import Tensor

from ktransformers.kernels.triton.common.arrival import arrive_last
from ktransformers.kernels.triton.common.bits import ONE
from ktransformers.kernels.triton.common.elementwise import activated
from ktransformers.kernels.triton.common.runtime import jit, tl, triton
from ktransformers.kernels.triton.experts.align import known_expert
from ktransformers.kernels.triton.experts.matrices import (
    ExpertMatrices,
    MoeMatrices,
    RoutedRows,
    are_plane_types,
    takes_block_int16,
)
from ktransformers.kernels.triton.experts.workspace import DOWN_ROWS, MoeWorkspace
from ktransformers.kernels.triton.linear.block_int16_gemv import is_strided
from ktransformers.kernels.triton.linear.linear import warps_for
from ktransformers.kernels.triton.linear.matmul import gemv_pair, gemv_tile
from ktransformers.kernels.triton.quant.block_int16 import PairOrder, quantize_block_int16, store_block_int16
from ktransformers.kernels.triton.quant.repack import GpuLayout
from ktransformers.kernels.triton.quant.tables import tables

__all__ = ["launch_gemv"]

_SEVERAL_TOKENS = 2
"""From here on block-wise int16 of planes save more than the launch that makes them costs, and tokens share experts,
whose pairs are then computed side by side. One number for both: warm-ups call one number of rows of each kind
(warmup.py)."""
_MANY_PROGRAMS = 1024


@jit
def _gate_up_gemv(x, stride, ids, order, gate, up, gate_bias, up_bias, hidden, one, tables, GATE: tl.constexpr,
                    UP: tl.constexpr, GATE_BYTES: tl.constexpr, UP_BYTES: tl.constexpr, K: tl.constexpr,
                    N: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr,
                    KS: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
                    HAS_BIAS: tl.constexpr, STRIDED: tl.constexpr, ORDERED: tl.constexpr):  # fmt: skip
    """x and hidden: rows of 16-bit floats, or of block-wise int16; STRIDED: their order in `hidden`."""
    tile, p = tl.program_id(0), tl.program_id(1)
    if ORDERED:
        p = tl.load(order + p)
    expert = tl.load(ids + p)
    slot = known_expert(expert, E)
    if slot >= 0:
        n = tile * BN + tl.arange(0, BN)
        at = slot.to(tl.int64)
        row = x + (p // TOP_K).to(tl.int64) * stride
        g, u = gemv_pair(row, gate + at * GATE_BYTES, up + at * UP_BYTES, n[None, :], n[None, :] < N, one, tables, 0,
                               (K // 32 + KS - 1) // KS, GATE, UP, K, N, KS)  # fmt: skip
        if HAS_BIAS:
            g += tl.load(gate_bias + expert * N + n, mask=n < N, other=0.0)
            u += tl.load(up_bias + expert * N + n, mask=n < N, other=0.0)
        value = activated(g, u, ACT, ALPHA, LIMIT)
        if hidden.dtype.element_ty == tl.int32:
            block = tile * (BN // 32) + tl.arange(0, BN // 32)
            store_block_int16(hidden + p * N, block, tl.reshape(value, (BN // 32, 32)), block < N // 32, STRIDED)
        else:
            tl.store(hidden + p * N + n, value.to(hidden.dtype.element_ty), mask=n < N)


@jit
def _down_gemv(hidden, ids, order, weights, down, bias, parts, counters, out, one, tables, TYPE: tl.constexpr,
                 BYTES: tl.constexpr, K: tl.constexpr, N: tl.constexpr, E: tl.constexpr,
                 TOP_K: tl.constexpr, BN: tl.constexpr, KS: tl.constexpr, STAGES: tl.constexpr,
                 HAS_BIAS: tl.constexpr, ORDERED: tl.constexpr):  # fmt: skip
    """The last program of a token and a tile to finish adds the parts of all its experts, in their order."""
    tile, p = tl.program_id(0), tl.program_id(1)
    if ORDERED:
        p = tl.load(order + p)
    expert = tl.load(ids + p)
    slot = known_expert(expert, E)
    n = tile * BN + tl.arange(0, BN)
    mask = n < N
    steps = tl.where(slot >= 0, (K // 32 + KS - 1) // KS, 0)  # no expert: the part is zero
    value, _, _, _ = gemv_tile(hidden + p * K, 0, down + slot.to(tl.int64) * BYTES, n[None, :], mask[None, :], one,
                                 tables, 0,
                                 steps, TYPE, K, N, KS, 1, STAGES)  # fmt: skip
    if HAS_BIAS:
        value += tl.load(bias + expert * N + n, mask=n < tl.where(slot >= 0, N, 0), other=0.0)
    tl.store(parts + p * N + n, value * tl.load(weights + p), mask=mask)
    token = p // TOP_K
    if arrive_last(counters + token * tl.num_programs(0) + tile, TOP_K):
        at = parts + token * TOP_K * N + n
        total = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        for j in range(1, TOP_K):
            total += tl.load(at + j * N, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=mask)


def launch_gemv(routed: RoutedRows, experts: MoeMatrices, out: Tensor, space: MoeWorkspace) -> None:
    """Launch `moe.moe` of as many tokens as `uses_gemv` says, its arguments checked."""
    x, ids, weights = routed.x, routed.topk_ids, routed.topk_weights
    gate, up, down, epilogue = experts.gate, experts.up, experts.down, experts.epilogue
    num_experts = up.slots
    gate_bias, up_bias, down_bias = epilogue.biases or (x, x, x)
    pairs, tokens = ids.numel(), x.shape[0]
    assert space.block_int16 is not None, "the workspace is for many tokens"
    assert space.order is not None, "the workspace is for many tokens"
    rows, is_ordered = x, False
    if takes_block_int16(gate, up) and (tokens >= _SEVERAL_TOKENS or not are_plane_types(gate, up)):
        is_ordered = tokens >= _SEVERAL_TOKENS
        order = PairOrder(ids, num_experts, space.order) if is_ordered else None
        rows = quantize_block_int16(x, space.block_int16[0], is_strided(int(up.qtype)), order)
    hidden = space.block_int16[1] if takes_block_int16(down) else space.hidden
    common = {"E": num_experts, "TOP_K": ids.shape[1], "ORDERED": is_ordered}
    block, warps, groups = _gate_up_plan(gate, up, pairs, has_block_int16=rows is not x)
    _gate_up_gemv[(triton.cdiv(up.rows, block), pairs)](
        rows, rows.stride(0), ids, space.order, gate.data, up.data, gate_bias, up_bias, hidden, ONE, tables(x.device),
        int(gate.qtype), int(up.qtype), gate.nbytes, up.nbytes, up.cols, up.rows, BN=block, KS=groups,
        STRIDED=is_strided(int(down.qtype)), num_warps=warps, **common, **epilogue.options(),
    )  # fmt: skip
    tiles = triton.cdiv(down.rows, DOWN_ROWS)
    warps, groups, stages = _down_plan(down, tiles * pairs)
    _down_gemv[(tiles, pairs)](
        hidden, ids, space.order, weights, down.data, down_bias, space.parts, space.counters, out, ONE,
        tables(x.device), int(down.qtype), down.nbytes, down.cols, down.rows, BN=DOWN_ROWS, KS=groups, STAGES=stages,
        HAS_BIAS=epilogue.biases is not None, num_warps=warps, **common,
    )  # fmt: skip


def _gate_up_plan(
    gate: ExpertMatrices, up: ExpertMatrices, pairs: int, *, has_block_int16: bool
) -> tuple[int, int, int]:
    """BN, warps and KS. has_block_int16: rows of x are block-wise int16."""
    block = 64 if triton.cdiv(up.rows, 64) * pairs >= 256 else 32
    if are_plane_types(gate, up):
        most = 2 if has_block_int16 else 4
    else:
        # Loops over tiles keep what they read ahead in registers: of 8 warps few programs would fit.
        most = 4 if up.layout == GpuLayout.CPU_PACKED and not (block == 32 and has_block_int16) else 8
    return block, *warps_for(up.cols // 32, block, most)


def _down_plan(down: ExpertMatrices, programs: int) -> tuple[int, int, int]:
    """Warps, KS and stages of the loop. With enough programs to fill the device, of few warps more of them fit."""
    if are_plane_types(down) and programs >= _MANY_PROGRAMS:
        return *warps_for(down.cols // 32, DOWN_ROWS, 2), 2
    return *warps_for(down.cols // 32, DOWN_ROWS), 3

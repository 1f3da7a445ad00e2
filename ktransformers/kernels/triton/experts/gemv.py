"""Experts of few tokens on the vector loop, see moe.py. Knows launch parameters, which depend on shapes alone."""

from __future__ import annotations

from torch import Tensor

from ktransformers.kernels.triton.common.bits import ONE
from ktransformers.kernels.triton.common.elementwise import activated
from ktransformers.kernels.triton.common.runtime import jit, tl, triton
from ktransformers.kernels.triton.experts.align import known_expert
from ktransformers.kernels.triton.experts.matrices import Between, ExpertMatrices, are_planes, takes_digits
from ktransformers.kernels.triton.experts.workspace import DOWN_ROWS, MoeWorkspace
from ktransformers.kernels.triton.linear.block_int16_gemv import is_strided
from ktransformers.kernels.triton.linear.linear import warps_for
from ktransformers.kernels.triton.linear.matmul import arrive_last, vector_pair, vector_tile
from ktransformers.kernels.triton.quant.block_int16 import PairOrder, make_digits, store_digits
from ktransformers.kernels.triton.quant.repack import GpuLayout
from ktransformers.kernels.triton.quant.tables import tables

__all__ = ["launch_vector"]

_SEVERAL_TOKENS = 2
"""From here on digits of planes save more than the launch that makes them costs, and tokens share experts, whose pairs
are then computed side by side. One number for both: rehearsals call one number of rows of each kind (rehearsal.py)."""
_MANY_PROGRAMS = 1024


@jit
def _gate_up_vector(x, stride, ids, order, gate, up, gate_bias, up_bias, hidden, one, tables, GATE: tl.constexpr,
                    UP: tl.constexpr, GATE_BYTES: tl.constexpr, UP_BYTES: tl.constexpr, K: tl.constexpr,
                    N: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr,
                    KS: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
                    HAS_BIAS: tl.constexpr, STRIDED: tl.constexpr, ORDERED: tl.constexpr):  # fmt: skip
    """x and hidden: rows of 16-bit floats, or of digits; STRIDED: their order in `hidden`."""
    tile, p = tl.program_id(0), tl.program_id(1)
    if ORDERED:
        p = tl.load(order + p)
    expert = tl.load(ids + p)
    slot = known_expert(expert, E)
    if slot >= 0:
        n = tile * BN + tl.arange(0, BN)
        at = slot.to(tl.int64)
        row = x + (p // TOP_K).to(tl.int64) * stride
        g, u = vector_pair(row, gate + at * GATE_BYTES, up + at * UP_BYTES, n[None, :], n[None, :] < N, one, tables, 0,
                               (K // 32 + KS - 1) // KS, GATE, UP, K, N, KS)  # fmt: skip
        if HAS_BIAS:
            g += tl.load(gate_bias + expert * N + n, mask=n < N, other=0.0)
            u += tl.load(up_bias + expert * N + n, mask=n < N, other=0.0)
        value = activated(g, u, ACT, ALPHA, LIMIT)
        if hidden.dtype.element_ty == tl.int32:
            block = tile * (BN // 32) + tl.arange(0, BN // 32)
            store_digits(hidden + p * N, block, tl.reshape(value, (BN // 32, 32)), block < N // 32, STRIDED)
        else:
            tl.store(hidden + p * N + n, value.to(hidden.dtype.element_ty), mask=n < N)


@jit
def _down_vector(hidden, ids, order, weights, down, bias, parts, counters, out, one, tables, TYPE: tl.constexpr,
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
    value, _, _, _ = vector_tile(hidden + p * K, 0, down + slot.to(tl.int64) * BYTES, n[None, :], mask[None, :], one,
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


def launch_vector(
    x: Tensor, ids: Tensor, weights: Tensor, num_experts: int,
    matrices: tuple[ExpertMatrices, ExpertMatrices, ExpertMatrices], out: Tensor, space: MoeWorkspace,
    between: Between,
) -> None:  # fmt: skip
    """`moe.moe` of as many tokens as `uses_vector_path` says, its arguments checked. matrices: gate, up, down."""
    gate, up, down = matrices
    gate_bias, up_bias, down_bias = between.biases or (x, x, x)
    pairs, tokens = ids.numel(), x.shape[0]
    assert space.digits is not None, "the workspace is for many tokens"
    assert space.order is not None, "the workspace is for many tokens"
    rows, is_ordered = x, False
    if takes_digits(gate, up) and (tokens >= _SEVERAL_TOKENS or not are_planes(gate, up)):
        is_ordered = tokens >= _SEVERAL_TOKENS
        order = PairOrder(ids, num_experts, space.order) if is_ordered else None
        rows = make_digits(x, space.digits[0], is_strided(int(up.qtype)), order)
    hidden = space.digits[1] if takes_digits(down) else space.hidden
    common = {"E": num_experts, "TOP_K": ids.shape[1], "ORDERED": is_ordered}
    block, warps, groups = _gate_up_plan(gate, up, pairs, has_digits=rows is not x)
    _gate_up_vector[(triton.cdiv(up.rows, block), pairs)](
        rows, rows.stride(0), ids, space.order, gate.data, up.data, gate_bias, up_bias, hidden, ONE, tables(x.device),
        int(gate.qtype), int(up.qtype), gate.nbytes, up.nbytes, up.cols, up.rows, BN=block, KS=groups,
        STRIDED=is_strided(int(down.qtype)), num_warps=warps, **common, **between.options(),
    )  # fmt: skip
    tiles = triton.cdiv(down.rows, DOWN_ROWS)
    warps, groups, stages = _down_plan(down, tiles * pairs)
    _down_vector[(tiles, pairs)](
        hidden, ids, space.order, weights, down.data, down_bias, space.parts, space.counters, out, ONE,
        tables(x.device), int(down.qtype), down.nbytes, down.cols, down.rows, BN=DOWN_ROWS, KS=groups, STAGES=stages,
        HAS_BIAS=between.biases is not None, num_warps=warps, **common,
    )  # fmt: skip


def _gate_up_plan(gate: ExpertMatrices, up: ExpertMatrices, pairs: int, *, has_digits: bool) -> tuple[int, int, int]:
    """BN, warps and KS. has_digits: rows of x are digits."""
    block = 64 if triton.cdiv(up.rows, 64) * pairs >= 256 else 32
    if are_planes(gate, up):
        most = 2 if has_digits else 4
    else:
        # Loops over tiles keep what they read ahead in registers: of 8 warps few programs would fit.
        most = 4 if up.layout == GpuLayout.TILES and not (block == 32 and has_digits) else 8
    return block, *warps_for(up.cols // 32, block, most)


def _down_plan(down: ExpertMatrices, programs: int) -> tuple[int, int, int]:
    """Warps, KS and stages of the loop. With enough programs to fill the device, of few warps more of them fit."""
    if are_planes(down) and programs >= _MANY_PROGRAMS:
        return *warps_for(down.cols // 32, DOWN_ROWS, 2), 2
    return *warps_for(down.cols // 32, DOWN_ROWS), 3

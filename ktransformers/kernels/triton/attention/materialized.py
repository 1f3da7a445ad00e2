"""Latent attention (MLA, arXiv 2405.04434) on expanded keys and values, for the many rows of prefill steps on a GPU.

    T rows of a step, H heads, N non-rotary and P rotary columns of a key, V columns of a value, L positions

Keys and values of some heads were expanded for the L positions of one or more sequences, side by side; the rotary part
of a key is shared by all heads and read where it is, beside the latents. The loop is FlashAttention's (arXiv
2205.14135, running maximum of arXiv 1805.02867), with logits in units of log 2. Products are taken in the keys' type,
sums in fp32. A program's rows are of one sequence, and what a row gives does not depend on the rows beside it. Knows
pointers and strides; not pages, who expanded the keys, or when that pays
(operators/attention/latent_materialization.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.kernels.triton.attention.launch import compute_type
from ktransformers.kernels.triton.common.elementwise import check_float
from ktransformers.kernels.triton.common.runtime import jit, num_multiprocessors, power_of_two, shared_bytes, tl

__all__ = ["MaterializedRun", "MaterializedTile", "materialized_attention", "materialized_tile", "tiles_of"]

_LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class MaterializedRun:
    """Neighbouring rows of one sequence, at its last positions: row first_row sees length - num_rows + 1 positions, the
    last one all `length`, of which the first is expanded at `offset`."""

    first_row: int
    num_rows: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class MaterializedTile:
    """Sizes of a launch: block_m rows against block_n positions at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@jit
def _read(base, rows, stride, keep, WIDTH: tl.constexpr, WIDTH_P2: tl.constexpr, MASKED: tl.constexpr):
    """Some rows as [rows, WIDTH_P2], zeros beyond WIDTH; with MASKED, zeros where not `keep`."""
    columns = tl.arange(0, WIDTH_P2)
    pointers = base + rows[:, None] * stride + columns[None, :]
    if WIDTH < WIDTH_P2:
        mask = columns[None, :] < WIDTH
        if MASKED:
            mask = mask & keep[:, None]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=keep[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@jit
def _attend_materialized(
    m, total, acc, q0, q1, k_ptr, r_ptr, v_ptr, row_hi, start, stop, end, scale,
    N: tl.constexpr, N_P2: tl.constexpr, P: tl.constexpr, P_P2: tl.constexpr, V: tl.constexpr, V_P2: tl.constexpr,
    R_ROW: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Positions start .. stop - 1 into the running state; position 0 comes first and all rows see it.

    MASKED: some rows do not see some of them; nothing is read from `end` on.
    """
    for first in range(start, stop, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        keep = positions < end
        k0 = _read(k_ptr, positions, N, keep, N, N_P2, MASKED).to(COMPUTE)
        s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        k1 = _read(r_ptr, positions, R_ROW, keep, P, P_P2, MASKED).to(COMPUTE)
        s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
        if MASKED:
            s = tl.where(positions[None, :] < row_hi[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - m_new[:, None])
        decay = tl.exp2(m - m_new)
        total = total * decay + tl.sum(p, 1)
        v = _read(v_ptr, positions, V, keep, V, V_P2, MASKED).to(COMPUTE)
        acc = tl.dot(p.to(COMPUTE), v, acc * decay[:, None], input_precision=PRECISION)
        m = m_new
    return m, total, acc


@jit(do_not_specialize=["num_positions"])
def _materialized_kernel(
    q_ptr, q_rot_ptr, k_ptr, r_ptr, v_ptr, out_ptr, tile_ptr,
    q_row, q_head, q_rot_row, q_rot_head, out_row, out_head, num_positions, scale,
    N: tl.constexpr, N_P2: tl.constexpr, P: tl.constexpr, P_P2: tl.constexpr, V: tl.constexpr, V_P2: tl.constexpr,
    R_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, heads): BLOCK_M rows of a sequence for one head."""
    tile = tile_ptr + tl.program_id(0) * 4
    head = tl.program_id(1).to(tl.int64)
    first_row, num_rows = tl.load(tile), tl.load(tile + 1)
    offset, shortest = tl.load(tile + 2).to(tl.int64), tl.load(tile + 3)
    local = tl.arange(0, BLOCK_M)
    mine = local < num_rows
    rows = (first_row + local).to(tl.int64)
    q0 = _read(q_ptr + head * q_head, rows, q_row, mine, N, N_P2, True).to(COMPUTE)
    q1 = _read(q_rot_ptr + head * q_rot_head, rows, q_rot_row, mine, P, P_P2, True).to(COMPUTE)
    k_base = k_ptr + (head * num_positions + offset) * N
    v_base = v_ptr + (head * num_positions + offset) * V
    r_base = r_ptr + offset * R_ROW
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_P2], tl.float32)
    row_hi = shortest + local
    end = shortest + num_rows - 1
    middle = shortest // BLOCK_N * BLOCK_N  # before it every row sees every position
    m, total, acc = _attend_materialized(
        m, total, acc, q0, q1, k_base, r_base, v_base, row_hi, 0, middle, end, scale,
        N, N_P2, P, P_P2, V, V_P2, R_ROW, BLOCK_N, False, PRECISION, COMPUTE,
    )  # fmt: skip
    m, total, acc = _attend_materialized(
        m, total, acc, q0, q1, k_base, r_base, v_base, row_hi, middle, end, end, scale,
        N, N_P2, P, P_P2, V, V_P2, R_ROW, BLOCK_N, True, PRECISION, COMPUTE,
    )  # fmt: skip
    columns = tl.arange(0, V_P2)
    pointers = out_ptr + head * out_head + rows[:, None] * out_row + columns[None, :]
    acc = acc / total[:, None]
    tl.store(pointers, acc.to(out_ptr.dtype.element_ty), mask=mine[:, None] & (columns < V)[None, :])


def materialized_tile(num_rows: int, num_heads: int, dtype: torch.dtype, device: torch.device) -> MaterializedTile:
    """Return the sizes of a launch for so many rows and heads: 128 rows of a head, fewer where that leaves processors
    idle.

    The fastest of those measured on an H100 (`benchmarks.gpu.latent --tune`), with as many stages as shared
    memory has room for: 90, 131 and 213 KB for two, three and four (tests/support/triton_kernels/compile_launches.py).
    """
    if dtype.itemsize == 4:
        return MaterializedTile(64, 32, 4, 2)
    if -(-num_rows // 128) * num_heads < num_multiprocessors(device):
        return MaterializedTile(64, 64, 4, 2)
    room = shared_bytes(device)
    return MaterializedTile(128, 64, 8, 4 if room >= 213 << 10 else 3 if room >= 132 << 10 else 2)


def tiles_of(runs: Iterable[MaterializedRun], block_m: int) -> Tensor:
    """Return what programs do, int32 [tiles, 4] on the CPU: first row, rows, first position, positions the first row
    sees.

    Tiles that see most come first, since they take longest.
    """
    tiles = [
        (run.first_row + done, min(block_m, run.num_rows - done), run.offset, run.length - run.num_rows + done + 1)
        for run in runs
        for done in range(0, run.num_rows, block_m)
    ]
    tiles.sort(key=lambda tile: -tile[3])
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 4)


def materialized_attention(
    queries: tuple[Tensor, Tensor],
    cached: tuple[Tensor, Tensor, Tensor],
    tiles: Tensor,
    scale: float,
    out: Tensor,
    tile: MaterializedTile,
) -> None:
    """Compute causal attention of the rows in `tiles` for h heads, to their rows of `out`; other rows stay as they are.

    queries: q [T, h, >= N], of which the first N columns count, and q_rot [T, h, P], rotated. cached: keys [h, L, N],
    contiguous, k_rot [L, P] of any row stride, and values [h, L, V], contiguous. All are fp16, bf16 or
    fp32, keys, k_rot and values of one type. tiles: int32 [tiles, 4] of `tiles_of` for tile.block_m, on q's device.
    scale: of the logits, above 0. out: [T, h, V]. Raises TypeError or ValueError for what does not fit; rows and
    positions in `tiles` are not checked.
    """
    q, q_rot = queries
    keys, k_rot, values = cached
    num_rows, heads = q.shape[:2]
    num_positions, nope, rope, v_dim = keys.shape[1], keys.shape[2], k_rot.shape[1], values.shape[2]
    check_float("q", q, (None, heads, None))
    check_float("q_rot", q_rot, (num_rows, heads, rope))
    check_float("keys", keys, (heads, None, None))
    check_float("k_rot", k_rot, (num_positions, None))
    check_float("values", values, (heads, num_positions, None))
    check_float("out", out, (num_rows, heads, v_dim))
    if q.shape[2] < nope or not keys.is_contiguous() or not values.is_contiguous():
        raise ValueError(f"q {list(q.shape)}, keys {list(keys.shape)} and values must fit; the last two contiguous")
    if not keys.dtype == values.dtype == k_rot.dtype:
        raise TypeError(f"keys are {keys.dtype}, k_rot {k_rot.dtype} and values {values.dtype}: give one type")
    if tiles.dtype != torch.int32 or tiles.shape[1:] != (4,) or not tiles.is_contiguous() or scale <= 0:
        raise ValueError(f"tiles must be contiguous int32 [tiles, 4] and scale positive, got {tiles.dtype} and {scale}")
    if tiles.shape[0] == 0:
        return
    _materialized_kernel[(tiles.shape[0], heads)](
        q, q_rot, keys, k_rot, values, out, tiles,
        q.stride(0), q.stride(1), q_rot.stride(0), q_rot.stride(1), out.stride(0), out.stride(1), num_positions,
        scale * _LOG2E,
        N=nope, N_P2=max(16, power_of_two(nope)), P=rope, P_P2=max(16, power_of_two(rope)),
        V=v_dim, V_P2=max(16, power_of_two(v_dim)), R_ROW=k_rot.stride(0), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        PRECISION="tf32x3" if keys.dtype == torch.float32 else "tf32", COMPUTE=compute_type(keys.dtype),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip

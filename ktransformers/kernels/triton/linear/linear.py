"""Linear layers out = x W^T + bias with W in ggml's block formats, on CUDA: the kernels behind the rule name
KLinearMarlin.

Up to `VECTOR_ROWS` rows of x and weights in the GPU's layout: the vector kernel, which reads each weight byte once,
the columns split over programs where the rows alone cannot fill the device (the last program of a tile adds the parts
in their order, so results do not depend on timing). Otherwise the tile kernel. Knows launch parameters, which depend on
shapes alone and allocate nothing once `out` and a workspace are given: both kernels can be captured in a CUDA graph.
Does not know experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.kernels.triton.common.arrival import arrive_last
from ktransformers.kernels.triton.common.bits import ONE
from ktransformers.kernels.triton.common.elementwise import activation_value
from ktransformers.kernels.triton.common.runtime import jit, power_of_two, tl, triton
from ktransformers.kernels.triton.linear.matmul import dot_tile, gemv_tile
from ktransformers.kernels.triton.quant.dequant import WeightMatrix, runs_ahead
from ktransformers.kernels.triton.quant.repack import GpuLayout, has_gemv
from ktransformers.kernels.triton.quant.tables import tables
from ktransformers.kernels.types import Activation

__all__ = ["SPLIT_ROWS", "VECTOR_ROWS", "Workspace", "gated_linear", "launch", "linear", "linear_pair"]

#: Largest number of rows that the vector kernel takes.
VECTOR_ROWS = 4
_PROCESSORS = 132  # of an H100 or H200
# Programs to aim for when the tile kernel's columns are split, of 64 rows of W each, and of 128.
_PROGRAMS = 5 * _PROCESSORS // 2
_WIDE_PROGRAMS = 3 * _PROCESSORS // 2
#: Rows of x above which no product splits its columns.
SPLIT_ROWS = 512
_MAX_SPLIT = 32


@jit
def _gemv_rows(x, stride, base, bias, out, parts, counter, tile, one, tables, TYPE: tl.constexpr, K: tl.constexpr,
                 N: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, KS: tl.constexpr, M: tl.constexpr,
                 SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """Tile `tile` of a matrix of N rows, which are columns of `parts`, rows WIDTH apart; out and bias start with it."""
    split = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    steps: tl.constexpr = (K // 32 + KS - 1) // KS
    first, last = split * steps // SPLIT, (split + 1) * steps // SPLIT
    r0, r1, r2, r3 = gemv_tile(x, stride, base, n[None, :], n[None, :] < N, one, tables, first, last, TYPE, K, N, KS, M)
    mask = n < N
    if SPLIT > 1:
        at = parts + split * M * WIDTH + n
        tl.store(at, r0, mask=mask)
        if M > 1:
            tl.store(at + WIDTH, r1, mask=mask)
        if M > 2:
            tl.store(at + 2 * WIDTH, r2, mask=mask)
        if M > 3:
            tl.store(at + 3 * WIDTH, r3, mask=mask)
        if arrive_last(counter, SPLIT):
            for m in tl.static_range(M):
                _add_parts(parts + m * WIDTH, bias, out, m, n, N, M * WIDTH, WIDTH, BN, SPLIT, HAS_BIAS, ACT)
    else:
        _store_row(r0, bias, out, 0, n, N, WIDTH, BN, HAS_BIAS, ACT)
        if M > 1:
            _store_row(r1, bias, out, 1, n, N, WIDTH, BN, HAS_BIAS, ACT)
        if M > 2:
            _store_row(r2, bias, out, 2, n, N, WIDTH, BN, HAS_BIAS, ACT)
        if M > 3:
            _store_row(r3, bias, out, 3, n, N, WIDTH, BN, HAS_BIAS, ACT)


@jit
def _store_row(value, bias, out, m, n, N: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr,
               ACT: tl.constexpr):  # fmt: skip
    """Row m of the result. ACT: rows 2 i and 2 i + 1 of the matrix are gate and up of one result."""
    if HAS_BIAS:
        value += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if ACT == "":
        tl.store(out + m * WIDTH + n, value.to(out.dtype.element_ty), mask=n < N)
    else:
        gate, up = tl.split(tl.reshape(value, (BN // 2, 2)))
        at, _ = tl.split(tl.reshape(n, (BN // 2, 2)))
        acted = activation_value(gate, up, 0.0, 0.0, ACT, True)
        tl.store(out + m * (WIDTH // 2) + at // 2, acted.to(out.dtype.element_ty), mask=at < N)


@jit
def _add_parts(parts, bias, out, m, n, N: tl.constexpr, stride: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
               SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    total = tl.load(parts + n, mask=n < N, other=0.0, cache_modifier=".cg")
    for split in range(1, SPLIT):
        total += tl.load(parts + split * stride + n, mask=n < N, other=0.0, cache_modifier=".cg")
    _store_row(total, bias, out, m, n, N, WIDTH, BN, HAS_BIAS, ACT)


@jit
def _gemv_kernel(x, stride, base, second, bias, out, parts, counters, one, tables, TYPE: tl.constexpr,
                   TYPE2: tl.constexpr,
                   K: tl.constexpr, N: tl.constexpr, N2: tl.constexpr, BN: tl.constexpr, KS: tl.constexpr,
                   M: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """Grid (tiles of the first matrix and, if N2 > 0, of the second, splits): the results lie side by side."""
    tile = tl.program_id(0)
    tiles: tl.constexpr = (N + BN - 1) // BN
    if N2 == 0:
        _gemv_rows(x, stride, base, bias, out, parts, counters + tile, tile, one, tables, TYPE, K, N, N, BN, KS, M,
                     SPLIT,
                     HAS_BIAS, ACT)  # fmt: skip
    elif tile < tiles:
        _gemv_rows(x, stride, base, bias, out, parts, counters + tile, tile, one, tables, TYPE, K, N, N + N2, BN,
                     KS, M,
                     SPLIT, HAS_BIAS, ACT)  # fmt: skip
    else:
        _gemv_rows(x, stride, second, bias + N, out + N, parts + N, counters + tile, tile - tiles, one, tables,
                     TYPE2, K, N2,
                     N + N2, BN, KS, M, SPLIT, HAS_BIAS, ACT)  # fmt: skip


@jit
def _tile_rows(x, stride, base, bias, out, parts, counter, tile, T, one, tables, TYPE: tl.constexpr,
               LAYOUT: tl.constexpr,
               K: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
               BK: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
               ACT: tl.constexpr):  # fmt: skip
    """As `_gemv_rows`, for BM rows of x."""
    split = tl.program_id(2)
    t = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    n = tile * BN + tl.arange(0, BN)[None, :]
    steps: tl.constexpr = (K + BK - 1) // BK
    first, last = split * steps // SPLIT, (split + 1) * steps // SPLIT
    acc = dot_tile(x + t.to(tl.int64) * stride, t < T, base, n, n < N, one, tables, first, last, TYPE, LAYOUT, K, N, BK,
                   WARPS)  # fmt: skip
    mask = (t < T) & (n < N)
    if SPLIT > 1:
        at = t.to(tl.int64) * WIDTH + n
        part = T * WIDTH  # Workspace.allocate says why this is small
        tl.store(parts + split * part + at, acc, mask=mask)
        is_last = arrive_last(counter, SPLIT)
        mask = (t < tl.where(is_last, T, 0)) & (n < N)
        acc = tl.load(parts + at, mask=mask, other=0.0, cache_modifier=".cg")
        for other in range(1, SPLIT):
            acc += tl.load(parts + other * part + at, mask=mask, other=0.0, cache_modifier=".cg")
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if ACT == "":
        tl.store(out + t.to(tl.int64) * WIDTH + n, acc.to(out.dtype.element_ty), mask=mask)
    else:
        gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        half = tile * (BN // 2) + tl.arange(0, BN // 2)[None, :]
        rows = t < (tl.where(is_last, T, 0) if SPLIT > 1 else T)
        acted = activation_value(gate, up, 0.0, 0.0, ACT, True)
        target = out + t.to(tl.int64) * (WIDTH // 2) + half
        tl.store(target, acted.to(out.dtype.element_ty), mask=rows & (half < N // 2))


@jit(do_not_specialize=["T"])
def _tile_kernel(x, stride, base, second, bias, out, parts, counters, T, one, tables, TYPE: tl.constexpr,
                 TYPE2: tl.constexpr,
                 LAYOUT: tl.constexpr, K: tl.constexpr, N: tl.constexpr, N2: tl.constexpr, BM: tl.constexpr,
                 BN: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr,
                 HAS_BIAS: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """Grid (tiles of x, tiles as in `_gemv_kernel`, splits)."""
    tile = tl.program_id(1)
    tiles: tl.constexpr = (N + BN - 1) // BN
    counter = counters + tl.program_id(0) * tl.num_programs(1) + tile
    if N2 == 0:
        _tile_rows(x, stride, base, bias, out, parts, counter, tile, T, one, tables, TYPE, LAYOUT, K, N, N, BM, BN,
                   BK, WARPS, SPLIT, HAS_BIAS, ACT)  # fmt: skip
    elif tile < tiles:
        _tile_rows(x, stride, base, bias, out, parts, counter, tile, T, one, tables, TYPE, LAYOUT, K, N, N + N2, BM,
                   BN, BK, WARPS, SPLIT, HAS_BIAS, ACT)  # fmt: skip
    else:
        _tile_rows(x, stride, second, bias + N, out + N, parts + N, counter, tile - tiles, T, one, tables, TYPE2,
                   LAYOUT, K, N2, N + N2, BM, BN, BK, WARPS, SPLIT, HAS_BIAS, ACT)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of products that run one after another on one stream.

    parts: fp32, results of split columns. counters: int32, all 0 between calls (the kernels leave them so).
    """

    parts: Tensor
    counters: Tensor

    @classmethod
    def allocate(cls, device: torch.device | str, rows: int) -> Workspace:
        """Allocate enough for every `linear` of at most `rows` rows of x, whatever the matrix.

        Columns are split only as long as there are few programs, which bounds what they store: tiles of 64 rows of W
        and at most 64 of x in _PROGRAMS programs, of 128 and at most 128 in _WIDE_PROGRAMS, or tiles of 16 and
        VECTOR_ROWS for a small matrix.
        """
        wide = _WIDE_PROGRAMS * 128 * 128 if rows > 64 else 0
        parts = max(_PROGRAMS * 64 * min(rows, 64), wide, _PROCESSORS // 2 * 16 * _MAX_SPLIT * VECTOR_ROWS)
        floats = torch.empty(parts, dtype=torch.float32, device=device)
        return cls(floats, torch.zeros(_PROGRAMS, dtype=torch.int32, device=device))

    def check(self, parts: int, counters: int) -> None:
        """Raise ValueError where a call needs more memory than the workspace has."""
        if self.parts.numel() < parts or self.counters.numel() < counters:
            raise ValueError(
                f"workspace of {self.parts.numel()} floats and {self.counters.numel()} counters, needs {parts} and "
                f"{counters}"
            )


def warps_for(groups: int, block: int, most: int = 8) -> tuple[int, int]:
    """Return the warps of a vector program and KS, the groups of 32 columns that they multiply at once: 4 rows for each
    lane.

    Fewer warps where the last step would leave more than a fifth of all lanes without columns.
    """
    warps = most
    while warps > 2 and -(-groups // (warps * 128 // block)) * (warps * 128 // block) > 1.25 * groups:
        warps //= 2
    return warps, warps * 128 // block


def _gemv_plan(rows: int, cols: int) -> tuple[int, int, int, int]:
    """BN, KS, split and warps of the vector kernel for a matrix [rows, cols].

    Narrow tiles come first: they fill the device without the round trip to memory that split columns cost.
    """
    block = next((size for size in (64, 32) if triton.cdiv(rows, size) >= _PROCESSORS), 16)
    tiles = triton.cdiv(rows, block)
    warps, groups = warps_for(cols // 32, block, 4 if tiles >= 8 * _PROCESSORS else 8)
    split, steps = 1, triton.cdiv(cols // 32, groups)
    while tiles * split < _PROCESSORS // 2 and split * 2 <= min(steps, _MAX_SPLIT):
        split *= 2
    return block, groups, split, warps


def _tile_plan(tokens: int, rows: int, cols: int, is_ahead: bool) -> tuple[int, int, int, int, int]:
    """BM, BN, BK, split and warps of the tile kernel. is_ahead: `dequant.runs_ahead`.

    The split is the same for all numbers of tokens up to a power of two: each is another kernel.
    """
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64 if tokens <= (128 if is_ahead else 64) else 128
    block_n = 64 if tokens <= 64 else 128
    warps = (2 if block_m <= 32 else 4) if is_ahead else 8 if block_m == 128 else 4
    tiles = triton.cdiv(power_of_two(tokens), block_m) * triton.cdiv(rows, block_n)
    split, steps = 1, triton.cdiv(cols, 64)
    most = _PROGRAMS if block_n == 64 else _WIDE_PROGRAMS
    while tokens <= SPLIT_ROWS and tiles * split * 2 <= most and split * 2 <= min(steps, _MAX_SPLIT):
        split *= 2
    return block_m, block_n, 64, split, warps


def _space(workspace: Workspace | None, x: Tensor, split: int, tokens: int, rows: int, tiles: int) -> Workspace:
    needed = split * tokens * rows if split > 1 else 0
    if workspace is None:
        return Workspace(
            torch.empty(max(needed, 1), dtype=torch.float32, device=x.device),
            torch.zeros(tiles if split > 1 else 1, dtype=torch.int32, device=x.device),
        )
    workspace.check(needed, tiles if split > 1 else 0)
    return workspace


def check_rows(name: str, x: Tensor, cols: int) -> None:
    """Raise TypeError or ValueError unless x is fp16 or bf16 [T, cols] with contiguous, aligned rows."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"{name} must be float16 or bfloat16, got {x.dtype}")
    if x.data_ptr() % 8 or (x.dim() == 2 and x.shape[0] > 1 and x.stride(0) % 4):
        raise ValueError(f"rows of {name} must begin at multiples of 8 bytes, got strides {x.stride()}")
    if x.dim() != 2 or x.shape[1] != cols or (x.shape[0] > 0 and x.stride(1) != 1):
        raise ValueError(f"{name} must be [T, {cols}] with contiguous rows, got {tuple(x.shape)}, {x.stride()}")


def result(out: Tensor | None, x: Tensor, rows: int) -> Tensor:
    """Return `out` checked, or a new tensor [T, rows] of x's dtype."""
    if out is None:
        return torch.empty(x.shape[0], rows, dtype=x.dtype, device=x.device)
    if out.shape != (x.shape[0], rows) or not out.is_contiguous() or out.device != x.device:
        raise ValueError(f"out must be contiguous [{x.shape[0]}, {rows}] on {x.device}, got {tuple(out.shape)}")
    return out


def linear(
    x: Tensor,
    weight: WeightMatrix,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    workspace: Workspace | None = None,
) -> Tensor:
    """Compute out[t, n] = sum_k x[t, k] W[n, k] + bias[n].

    x: [T, K] fp16 or bf16, rows contiguous. weight: [N, K] in any layout; the GPU's is the fastest, by far for few rows
    of x, ggml's the slowest. bias: [N], any float type. out: [T, N], fp16, bf16 or fp32; x's dtype when None.
    workspace: for splitting columns; made when None. Weights are widened to fp32 for up to VECTOR_ROWS rows of x in the
    GPU's layout, and rounded to x's dtype otherwise; sums are in fp32, in an order that depends on shapes alone. The
    first call of a shape compiles, which a graph capture does not allow. Raises TypeError or ValueError for arguments
    that do not fit.
    """
    return launch(x, (weight,), bias, out, workspace)


def linear_pair(
    x: Tensor,
    weights: tuple[WeightMatrix, WeightMatrix],
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    workspace: Workspace | None = None,
) -> Tensor:
    """Compute the products of x with two matrices side by side in one launch: [T, rows of the first + of the second].

    Both matrices are in the GPU's layout, of types that may differ; rows in 8s. bias: of both. The others as in
    `linear`.
    """
    _check_planes(*weights)
    return launch(x, weights, bias, out, workspace)


def gated_linear(
    x: Tensor,
    weight: WeightMatrix,
    kind: Activation,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    workspace: Workspace | None = None,
) -> Tensor:
    """Compute act(x gate^T) * (x up^T) in one launch: [T, rows / 2].

    weight: row 2 i is gate's row i, row 2 i + 1 up's, in the GPU's layout; bias likewise. kind: an activation without
    numbers of its own. What is activated is fp32, not rounded. The others as in `linear`.
    """
    _check_planes(weight)
    if kind.is_clamped:
        raise ValueError(f"{kind.name} has numbers of its own: compute the product and activate it")
    return launch(x, (weight,), bias, out, workspace, kind.name)


def _check_planes(*weights: WeightMatrix) -> None:
    for weight in weights:
        if weight.layout is not GpuLayout.PLANES:
            raise ValueError(f"a matrix {weight.qtype.name} in the layout {weight.layout.name}, not in the GPU's")


def launch(
    x: Tensor,
    weights: tuple[WeightMatrix, ...],
    bias: Tensor | None,
    out: Tensor | None,
    workspace: Workspace | None,
    act: str = "",
) -> Tensor:
    """Launch `linear` for one or two matrices of one layout, or `gated_linear` when `act` is not empty."""
    cols, layout = weights[0].cols, weights[0].layout
    check_rows("x", x, cols)
    rows = sum(weight.rows for weight in weights)
    if bias is not None and (bias.shape != (rows,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be contiguous [{rows}], got {tuple(bias.shape)}")
    target = result(out, x, rows // 2 if act else rows)
    tokens = x.shape[0]
    if tokens == 0 or rows == 0:
        return target
    first, second = weights[0], weights[-1]
    second_rows = second.rows if len(weights) > 1 else 0
    types = (int(first.qtype), int(second.qtype))
    counts = (cols, first.rows, second_rows)
    bias_or_x = x if bias is None else bias
    options = {"HAS_BIAS": bias is not None, "ACT": act}
    if tokens <= VECTOR_ROWS and all(has_gemv(int(weight.qtype), layout) for weight in weights):
        block, groups, split, warps = _gemv_plan(rows, cols)
        tiles = sum(triton.cdiv(weight.rows, block) for weight in weights)
        space = _space(workspace, x, split, tokens, rows, tiles)
        _gemv_kernel[(tiles, split)](
            x, x.stride(0), first.data, second.data, bias_or_x, target, space.parts, space.counters, ONE,
            tables(x.device), *types,
            *counts, BN=block, KS=groups, M=tokens, SPLIT=split, num_warps=warps, **options,
        )  # fmt: skip
        return target
    is_ahead = all(runs_ahead(int(weight.qtype), int(layout)) for weight in weights)
    block_m, block_n, block_k, split, warps = _tile_plan(tokens, rows, cols, is_ahead)
    grid = (triton.cdiv(tokens, block_m), sum(triton.cdiv(weight.rows, block_n) for weight in weights), split)
    space = _space(workspace, x, split, tokens, rows, grid[0] * grid[1])
    _tile_kernel[grid](
        x, x.stride(0), first.data, second.data, bias_or_x, target, space.parts, space.counters, tokens, ONE,
        tables(x.device), *types,
        int(layout), *counts, BM=block_m, BN=block_n, BK=block_k, WARPS=warps, SPLIT=split, num_warps=warps, **options,
    )  # fmt: skip
    return target

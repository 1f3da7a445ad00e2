"""Kernels around latent attention (MLA, arXiv 2405.04434) in a decode step, in three launches. Knows slots.

    T rows, H heads, R rank of the latent, P rotary dimension, N other columns of a query head, V columns of a value

`norm_to_cache`: both norms, the shared key's rotation and the cache write; `absorb`: each head's query times its key
up-projection, and the rotation beside it; `expand`: each head's attended latent times its value up-projection.
Angles as in rope.py. Meant for few rows: weights are read once for every 16 of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.triton.attention.kv_codes import bits_of, check_cache
from ktransformers.kernels.triton.attention.rope import (
    LatentSlots,
    Rotation,
    check_ids,
    is_cached,
    pair_columns,
    put_normed,
    rotate_heads,
)
from ktransformers.kernels.triton.common.elementwise import check_float
from ktransformers.kernels.triton.common.runtime import jit, power_of_two, tl

__all__ = ["MAX_LATENT_ROWS", "absorb", "expand", "norm_to_cache"]

MAX_LATENT_ROWS = 64
"""Rows up to which these kernels are the better choice."""


@jit(do_not_specialize_on_alignment=["slot_ptr"])
def _norm_kernel(
    kv_ptr, q_ptr, cache_ptr, scale_ptr, q_out_ptr, slot_ptr, cos_ptr, sin_ptr, kv_weight_ptr, q_weight_ptr,
    kv_row, q_row, cache_slot, scale_slot, q_out_row, num_slots, cos_row, kv_eps, q_eps,
    RANK: tl.constexpr, RANK_P2: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr, Q_WIDTH: tl.constexpr,
    Q_P2: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_CODES: tl.constexpr,
):  # fmt: skip
    """Grid (rows, 2 or 1): a row's latent and shared key, or its compressed query."""
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        slot = tl.load(slot_ptr + row).to(tl.int64)
        target, source = cache_ptr + slot * cache_slot, kv_ptr + row * kv_row
        scales = scale_ptr + slot * scale_slot
        limit = tl.where(is_cached(slot, num_slots), RANK, 0)
        put_normed(source, target, kv_weight_ptr, kv_eps, RANK, RANK_P2, limit, scales, HAS_CODES)
        one = tl.arange(0, 1)
        rotate_heads(
            source + RANK, target + RANK, one, one < tl.where(is_cached(slot, num_slots), 1, 0), 0, 0, kv_weight_ptr,
            kv_eps, cos_ptr, sin_ptr, row * cos_row, 2 * HALF, HALF, HALF_P2, 1, INTERLEAVED, False, False,
            scales + 1, 0, HAS_CODES,
        )  # fmt: skip
    else:
        put_normed(q_ptr + row * q_row, q_out_ptr + row * q_out_row, q_weight_ptr, q_eps, Q_WIDTH, Q_P2, Q_WIDTH)


def norm_to_cache(
    compressed: Tensor,
    kv_norm: tuple[Tensor, float],
    rotation: Rotation,
    slots: LatentSlots,
    query: Tensor | None = None,
    query_norm: tuple[Tensor, float] | None = None,
) -> Tensor | None:
    """Write each row's latent and shared key to its slot; returns the normalized compressed query, if there is one.

    compressed: [T, R + P]. kv_norm, query_norm: weight and epsilon of the RMSNorms of the latent [R] and the query [Q].
    rotation: without positions. query: [T, Q], any row stride.
    """
    cos, sin, cache, slot_mapping, scales = rotation.cos, rotation.sin, slots.cache, slots.slot_mapping, slots.scales
    rows, rank = compressed.shape[0], kv_norm[0].shape[0]
    rotary = compressed.shape[1] - rank
    check_float("compressed", compressed, (None, None))
    check_cache("cache", cache, scales, (None, 1, rank + rotary), parts=2)
    rotation.check(rows, rotary)
    check_ids("slot_mapping", slot_mapping, rows)
    out, width = None, 16
    if query is not None:
        assert query_norm is not None, "a query comes with its norm"
        width = query.shape[1]
        check_float("query", query, (rows, None))
        check_float("query_norm", query_norm[0], (width,))
        out = torch.empty(rows, width, dtype=query.dtype, device=query.device)
    if rows:
        q, q_out, q_norm = (compressed, compressed, kv_norm) if out is None else (query, out, query_norm)
        assert q is not None
        assert q_norm is not None
        held = cache if scales is None else scales  # nothing is written to the former as scales
        _norm_kernel[(rows, 1 if out is None else 2)](
            compressed, q, bits_of(cache), held, q_out, slot_mapping, cos, sin, kv_norm[0], q_norm[0],
            compressed.stride(0), q.stride(0), cache.stride(0), held.stride(0), q_out.stride(0), cache.shape[0],
            cos.stride(0), float(kv_norm[1]), float(q_norm[1]), RANK=rank, RANK_P2=power_of_two(rank), HALF=rotary // 2,
            HALF_P2=power_of_two(rotary // 2), Q_WIDTH=width, Q_P2=power_of_two(width),
            INTERLEAVED=rotation.is_interleaved, HAS_CODES=scales is not None, num_warps=4,
        )  # fmt: skip
    return out


@jit
def _rotate_rows(source, target, t, T, source_row, target_row, cos_ptr, sin_ptr, cos_row, HALF: tl.constexpr,
                 HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """One head's rotary columns of the rows t [BM], each row by its own angles."""
    pair, first, second, exists = pair_columns(HALF, HALF_P2, INTERLEAVED)
    mask = (t < T)[:, None] & exists[None, :]
    cos = tl.load(cos_ptr + t[:, None] * cos_row + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + t[:, None] * cos_row + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    a = tl.load(source + t[:, None] * source_row + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + t[:, None] * source_row + second[None, :], mask=mask, other=0.0).to(tl.float32)
    to = target + t[:, None] * target_row + pair[None, :]
    element = target.dtype.element_ty
    tl.store(to, (a * cos - b * sin).to(element), mask=mask)
    tl.store(to + HALF, (b * cos + a * sin).to(element), mask=mask)


@jit(do_not_specialize=["T"])
def _heads_kernel(
    x_ptr, w_ptr, out_ptr, cos_ptr, sin_ptr, x_row, x_head, out_row, out_head, cos_row, T,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr,
    HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (rows / BM, heads, N / BN and, if HALF > 0, one more for the rotation of what comes after column K)."""
    t = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    x, out = x_ptr + head * x_head, out_ptr + head * out_head
    tiles: tl.constexpr = (N + BN - 1) // BN
    if tl.program_id(2) < tiles:
        n = tl.program_id(2) * BN + tl.arange(0, BN)
        w = w_ptr + head * (K * N)
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            part = tl.load(x + t[:, None] * x_row + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=0.0)
            weights = tl.load(w + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
            acc = tl.dot(part, weights, acc, input_precision=PRECISION)
        tl.store(
            out + t[:, None] * out_row + n[None, :],
            acc.to(out.dtype.element_ty),
            mask=(t < T)[:, None] & (n < N)[None, :],
        )
    if HALF > 0:  # noqa: SIM102 (decided while compiling)
        if tl.program_id(2) == tiles:
            _rotate_rows(x + K, out + N, t, T, x_row, out_row, cos_ptr, sin_ptr, cos_row, HALF, HALF_P2, INTERLEAVED)


def _launch(x: Tensor, weight: Tensor, out: Tensor, rotation: Rotation | None) -> None:
    rows, heads, inner, width = x.shape[0], *weight.shape
    if x.dtype != weight.dtype or not weight.is_contiguous() or x.shape[1] != heads:
        raise ValueError(f"x {list(x.shape)} of {x.dtype} and weight {list(weight.shape)} of {weight.dtype} do not fit")
    if rows == 0:
        return
    cos, sin = (x, x) if rotation is None else (rotation.cos, rotation.sin)
    half = 0 if rotation is None else (x.shape[2] - inner) // 2
    block_n = min(128, max(16, power_of_two(width)))
    if width % 64 == 0 and inner > 256:
        block_n = 64  # long loops over few columns: more programs
    _heads_kernel[(-(-rows // 16), heads, -(-width // block_n) + (half > 0))](
        x, weight, out, cos, sin, x.stride(0), x.stride(1), out.stride(0), out.stride(1), cos.stride(0), rows,
        K=inner, N=width, BM=16, BN=block_n, BK=min(64, max(16, power_of_two(inner))), HALF=half,
        HALF_P2=power_of_two(max(1, half)), INTERLEAVED=rotation is not None and rotation.is_interleaved,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip


def absorb(q: Tensor, k_b: Tensor, rotation: Rotation) -> Tensor:
    """Absorb and rotate queries: [T, H, R + P] of q [T, H, N + P], any row and head strides.

    k_b: [H, N, R] of q's dtype, contiguous. rotation: without positions. Raises ValueError for shapes that do not
    fit.
    """
    heads, nope, rank = k_b.shape
    rotary = q.shape[2] - nope
    check_float("q", q, (None, heads, None))
    rotation.check(q.shape[0], rotary)
    out = torch.empty(q.shape[0], heads, rank + rotary, dtype=q.dtype, device=q.device)
    _launch(q, k_b, out, rotation)
    return out


def expand(latent: Tensor, v_b: Tensor) -> Tensor:
    """Expand attended latents [T, H, R] to values [T, H, V]; v_b: [H, R, V] of their dtype, contiguous."""
    check_float("latent", latent, (None, v_b.shape[0], v_b.shape[1]))
    out = torch.empty(latent.shape[0], v_b.shape[0], v_b.shape[2], dtype=latent.dtype, device=latent.device)
    _launch(latent, v_b, out, None)
    return out

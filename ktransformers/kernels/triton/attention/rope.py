"""Rotary embedding (Su et al. 2021) and the cache write in one kernel, with the norms that come before. Knows slots.

    T rows, P rotary dimensions (the first P of a head), cos and sin fp32 [N, >= P / 2]

Pairs of a head are (0, P / 2), (1, P / 2 + 1), ... in the half layout (llama, qwen) and (0, 1), (2, 3), ... in the
interleaved one (deepseek). A rotated head holds first all first members, then all second ones, in both, as
`operators.rotation.rotate` has it: dot products of two rotated vectors do not depend on the order.
Rows of cos and sin are positions when `positions` is given, else row t belongs to row t.
A row whose slot is negative is rotated and not cached: what pads a batch needs no slot of its own. Neither is one whose
slot lies beyond the cache: it would be written into whatever comes after (engine/step/context.py refuses such a step).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.kernels.attention_call import KvScales
from ktransformers.kernels.triton.attention.kv_codes import (
    bits_of,
    check_cache,
    factor_and_scale,
    has_codes,
    magnitude,
    put_codes,
    put_heads,
)
from ktransformers.kernels.triton.common.elementwise import check_float
from ktransformers.kernels.triton.common.runtime import jit, power_of_two, tl

__all__ = [
    "HeadNorms",
    "KvSlots",
    "LatentSlots",
    "Rotation",
    "check_angles",
    "check_ids",
    "is_cached",
    "latent_to_cache",
    "pair_columns",
    "put_normed",
    "rope_to_cache",
    "rotate_heads",
]

_HEADS_PER_PROGRAM = 4


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of a step's rows, see the module. positions: int32 or int64 [T]. rotary_dim: P, all columns of a
    head when None; the rest of a head passes through.
    """

    cos: Tensor
    sin: Tensor
    is_interleaved: bool = False
    positions: Tensor | None = None
    rotary_dim: int | None = None

    def check(self, num_rows: int, rotary_dim: int) -> None:
        """Raise TypeError or ValueError for tables that do not have an angle for each row, or position, and pair."""
        check_angles(self.cos, self.sin, self.positions, num_rows, rotary_dim)


@dataclass(frozen=True, slots=True)
class KvSlots:
    """The slots that a step's keys and values go to. k_cache: [slots, Hkv, D], v_cache: [slots, Hkv, Dv]. slot_mapping:
    int32 or int64 [T], negative for rows to leave out. scales: of caches of codes, int8 or e4m3, which are written with
    them; fp32 [slots, Hkv, 1] of keys, and of values.
    """

    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    scales: KvScales = (None, None)


@dataclass(frozen=True, slots=True)
class LatentSlots:
    """The slots that a step's latents go to. cache: [slots, 1, R + P], slot_mapping: as KvSlots has it. scales: of a
    cache of codes, fp32 [slots, 1, 2], for the latent and for the rotated key.
    """

    cache: Tensor
    slot_mapping: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorms of each query and each key head, weights [D]: before the rotation (qwen3), or behind it (hunyuan)."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    is_behind: bool = False


@jit
def pair_columns(HALF: tl.constexpr, HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the numbers of the pairs, the columns of their two members, and which pairs exist."""
    pair = tl.arange(0, HALF_P2)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    return pair, first, second, pair < HALF


@jit
def is_cached(slot, num_slots):
    """Whether a slot number is one of the cache's."""
    return (slot >= 0) & (slot < num_slots)


@jit
def rotate_heads(
    source, target, heads, keep, source_head, target_head, weight_ptr, eps, cos_ptr, sin_ptr, angle_row,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr, REST_P2: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, NORMS_ROTATED: tl.constexpr = False,
    scale_ptr=None, scale_head=0, HAS_CODES: tl.constexpr = False,
):  # fmt: skip
    """Normalize and rotate some heads of one row, from `source` to `target`, where `keep`.

    The norm divides by the same either way, for a rotation keeps lengths: NORMS_ROTATED says where its weight comes in.
    HAS_CODES: `target` gets codes, and `scale_ptr` the scales of the heads.
    """
    pair, first, second, exists = pair_columns(HALF, HALF_P2, INTERLEAVED)
    cos = tl.load(cos_ptr + angle_row + pair, mask=exists, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle_row + pair, mask=exists, other=0.0).to(tl.float32)
    mask = keep[:, None] & exists[None, :]
    at = source + heads[:, None] * source_head
    to = target + heads[:, None] * target_head
    a = tl.load(at + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + second[None, :], mask=mask, other=0.0).to(tl.float32)
    rest = 2 * HALF + tl.arange(0, REST_P2)
    rest_mask = keep[:, None] & (rest < DIM)[None, :]
    if DIM > 2 * HALF:
        c = tl.load(at + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if DIM > 2 * HALF:
            squares += tl.sum(c * c, 1)
        scale = 1.0 / tl.sqrt(squares / DIM + eps)
        of_a = scale[:, None] * tl.load(weight_ptr + first, mask=exists, other=0.0).to(tl.float32)[None, :]
        of_b = scale[:, None] * tl.load(weight_ptr + second, mask=exists, other=0.0).to(tl.float32)[None, :]
        if not NORMS_ROTATED:
            a *= of_a
            b *= of_b
        if DIM > 2 * HALF:
            c *= scale[:, None] * tl.load(weight_ptr + rest, mask=rest < DIM, other=0.0).to(tl.float32)[None, :]
    rotated_a, rotated_b = a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :]
    if HAS_NORM and NORMS_ROTATED:
        rotated_a *= of_a
        rotated_b *= of_b
    if HAS_CODES:
        top = tl.maximum(tl.max(magnitude(rotated_a), 1), tl.max(magnitude(rotated_b), 1))
        if DIM > 2 * HALF:
            top = tl.maximum(top, tl.max(magnitude(c), 1))
        factor, scale = factor_and_scale(top, to)
        tl.store(scale_ptr + heads * scale_head, scale, mask=keep)
        put_codes(to + pair[None, :], rotated_a, factor[:, None], mask)
        put_codes(to + (pair + HALF)[None, :], rotated_b, factor[:, None], mask)
        if DIM > 2 * HALF:
            put_codes(to + rest[None, :], c, factor[:, None], rest_mask)
    else:
        element = target.dtype.element_ty
        tl.store(to + pair[None, :], rotated_a.to(element), mask=mask)
        tl.store(to + (pair + HALF)[None, :], rotated_b.to(element), mask=mask)
        if DIM > 2 * HALF:
            tl.store(to + rest[None, :], c.to(element), mask=rest_mask)


@jit(do_not_specialize_on_alignment=["slot_ptr", "position_ptr"])
def _rope_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, position_ptr, cos_ptr, sin_ptr,
    q_weight_ptr, k_weight_ptr, k_scale_ptr, v_scale_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
    k_slot, k_slot_head, v_slot, v_slot_head, ks_slot, ks_head, vs_slot, vs_head, num_slots, cos_row, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr, Q_PROGRAMS: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, V_P2: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr,
    REST_P2: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_NORM: tl.constexpr,
    NORMS_ROTATED: tl.constexpr, HAS_CODES: tl.constexpr,
):  # fmt: skip
    """Grid (rows, Q_PROGRAMS + cdiv(NUM_KV_HEADS, HEADS)): HEADS query heads of a row, or as many keys and values."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angle = row
    if HAS_POSITIONS:
        angle = tl.load(position_ptr + row).to(tl.int64)
    if block < Q_PROGRAMS:
        heads = block * HEADS + tl.arange(0, HEADS)
        rotate_heads(
            q_ptr + row * q_row, q_out_ptr + row * out_row, heads, heads < NUM_HEADS, q_head, out_head, q_weight_ptr,
            eps, cos_ptr, sin_ptr, angle * cos_row, DIM, HALF, HALF_P2, REST_P2, INTERLEAVED, HAS_NORM, NORMS_ROTATED,
        )  # fmt: skip
    else:
        heads = (block - Q_PROGRAMS) * HEADS + tl.arange(0, HEADS)
        slot = tl.load(slot_ptr + row).to(tl.int64)
        keep = heads < tl.where(is_cached(slot, num_slots), NUM_KV_HEADS, 0)
        rotate_heads(
            k_ptr + row * k_row, k_cache_ptr + slot * k_slot, heads, keep, k_head, k_slot_head, k_weight_ptr,
            eps, cos_ptr, sin_ptr, angle * cos_row, DIM, HALF, HALF_P2, REST_P2, INTERLEAVED, HAS_NORM, NORMS_ROTATED,
            k_scale_ptr + slot * ks_slot, ks_head, HAS_CODES,
        )  # fmt: skip
        columns = tl.arange(0, V_P2)
        mask = keep[:, None] & (columns < DIM_V)[None, :]
        v = tl.load(v_ptr + row * v_row + heads[:, None] * v_head + columns[None, :], mask=mask, other=0.0)
        target = v_cache_ptr + slot * v_slot + heads[:, None] * v_slot_head + columns[None, :]
        scales = v_scale_ptr + slot * vs_slot + heads * vs_head
        put_heads(target, v.to(tl.float32), mask, scales, keep, HAS_CODES)


def check_angles(cos: Tensor, sin: Tensor, positions: Tensor | None, num_rows: int, rotary_dim: int) -> None:
    """Raise ValueError for tables that do not have an angle for each row, or position, and pair of columns."""
    for name, table in (("cos", cos), ("sin", sin)):
        check_float(name, table, (None, None))
        if table.shape[1] < rotary_dim // 2 or (positions is None and table.shape[0] != num_rows):
            raise ValueError(f"{name} {list(table.shape)} must have {num_rows} rows of {rotary_dim // 2} angles")
    if cos.stride(0) != sin.stride(0):
        raise ValueError(f"cos and sin must have the same row stride, got {cos.stride(0)} and {sin.stride(0)}")
    if positions is not None:
        check_ids("positions", positions, num_rows)


def check_ids(name: str, ids: Tensor, num_rows: int) -> None:
    """Raise TypeError or ValueError unless `ids` are num_rows contiguous whole numbers."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {ids.dtype}")
    if tuple(ids.shape) != (num_rows,) or not ids.is_contiguous():
        raise ValueError(f"{name} must be contiguous with shape {[num_rows]}, got {list(ids.shape)}")


def _checked_rotary(rotary: int, dim: int) -> int:
    """Raises ValueError for a number of columns that cannot be rotated in pairs."""
    if rotary < 2 or rotary % 2 or rotary > dim:
        raise ValueError(f"rotary_dim must be even and within 2 .. {dim}, got {rotary}")
    return rotary


def _check_caches(k_cache: Tensor, v_cache: Tensor, scales: KvScales, sizes: tuple[int, int, int]) -> None:
    """sizes: heads, columns of a key, columns of a value. Raises TypeError or ValueError for caches that do not fit."""
    heads, dim, dim_v = sizes
    check_cache("k_cache", k_cache, scales[0], (None, heads, dim))
    check_cache("v_cache", v_cache, scales[1], (None, heads, dim_v))
    if has_codes(k_cache) != has_codes(v_cache):
        raise TypeError(f"k_cache is {k_cache.dtype} and v_cache {v_cache.dtype}: give one type")


def _held(cache: Tensor, scales: Tensor | None) -> Tensor:
    """What kernels take for scales: without any the cache takes their place, and nothing is written there."""
    return cache if scales is None else scales


def rope_to_cache(
    qkv: tuple[Tensor, Tensor, Tensor],
    rotation: Rotation,
    slots: KvSlots,
    norms: HeadNorms | None = None,
    *,
    q_out: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys, write keys and values to their slots; returns the rotated queries [T, Hq, D].

    qkv: [T, Hq, D], [T, Hkv, D] and [T, Hkv, Dv], any row and head strides (views of one product, say). q_out: made
    like q when None; must not be q when interleaved.
    """
    (q, k, v), cos, sin, positions = qkv, rotation.cos, rotation.sin, rotation.positions
    k_cache, v_cache, slot_mapping, scales = slots.k_cache, slots.v_cache, slots.slot_mapping, slots.scales
    q_weight, k_weight = (None, None) if norms is None else (norms.q_weight, norms.k_weight)
    num_rows, num_heads, dim = q.shape
    num_kv_heads, dim_v = v.shape[1:]
    rotary = _checked_rotary(dim if rotation.rotary_dim is None else rotation.rotary_dim, dim)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if q_out is None else q_out
    check_float("q", q, (None, None, None))
    check_float("k", k, (num_rows, num_kv_heads, dim))
    check_float("v", v, (num_rows, num_kv_heads, dim_v))
    _check_caches(k_cache, v_cache, scales, (num_kv_heads, dim, dim_v))
    check_float("q_out", out, tuple(q.shape))
    rotation.check(num_rows, rotary)
    check_ids("slot_mapping", slot_mapping, num_rows)
    for weight in (q_weight, k_weight):
        if weight is not None:
            check_float("weights of norms", weight, (dim,))
    if num_rows == 0:
        return out
    k_scales, v_scales = _held(k_cache, scales[0]), _held(v_cache, scales[1])
    q_programs = -(-num_heads // _HEADS_PER_PROGRAM)
    _rope_kernel[(num_rows, q_programs + -(-num_kv_heads // _HEADS_PER_PROGRAM))](
        q, k, v, out, bits_of(k_cache), bits_of(v_cache), slot_mapping, positions, cos, sin, q_weight, k_weight,
        k_scales, v_scales,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
        k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        k_scales.stride(0), k_scales.stride(1), v_scales.stride(0), v_scales.stride(1),
        min(k_cache.shape[0], v_cache.shape[0]), cos.stride(0), 0.0 if norms is None else float(norms.eps),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEADS=_HEADS_PER_PROGRAM, Q_PROGRAMS=q_programs,
        DIM=dim, DIM_V=dim_v, V_P2=power_of_two(dim_v), HALF=rotary // 2, HALF_P2=power_of_two(rotary // 2),
        REST_P2=power_of_two(max(1, dim - rotary)), INTERLEAVED=rotation.is_interleaved,
        HAS_POSITIONS=positions is not None, HAS_NORM=norms is not None,
        NORMS_ROTATED=norms is not None and norms.is_behind, HAS_CODES=has_codes(k_cache), num_warps=4,
    )  # fmt: skip
    return out


@jit
def put_normed(
    source, target, weight_ptr, eps, WIDTH: tl.constexpr, WIDTH_P2: tl.constexpr, limit,
    scale_ptr=None, HAS_CODES: tl.constexpr = False,
):  # fmt: skip
    """Write RMSNorm of one row; limit: WIDTH, or 0 to write nothing. HAS_CODES: `target` gets codes, `scale_ptr` a
    scale.
    """
    columns = tl.arange(0, WIDTH_P2)
    mask = columns < limit
    x = tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
    x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    x *= tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_CODES:
        one = tl.arange(0, 1)
        put_heads((target + columns)[None, :], x[None, :], mask[None, :], scale_ptr + one, one < limit, True)
    else:
        tl.store(target + columns, x.to(target.dtype.element_ty), mask=mask)


@jit(do_not_specialize_on_alignment=["slot_ptr", "position_ptr"])
def _latent_kernel(
    q_ptr, kv_ptr, q_out_ptr, cache_ptr, scale_ptr, slot_ptr, position_ptr, cos_ptr, sin_ptr, weight_ptr,
    q_row, q_head, kv_row, out_row, out_head, cache_slot, scale_slot, num_slots, cos_row, eps,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, Q_PROGRAMS: tl.constexpr, RANK: tl.constexpr, RANK_P2: tl.constexpr,
    HALF: tl.constexpr, HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    HAS_CODES: tl.constexpr,
):  # fmt: skip
    """Grid (rows, Q_PROGRAMS + 1): the rotary part of HEADS queries of a row, or the row's latent and shared key."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angle = row
    if HAS_POSITIONS:
        angle = tl.load(position_ptr + row).to(tl.int64)
    heads = block * HEADS + tl.arange(0, HEADS)
    if block < Q_PROGRAMS:
        rotate_heads(
            q_ptr + row * q_row, q_out_ptr + row * out_row, heads, heads < NUM_HEADS, q_head, out_head, weight_ptr,
            eps, cos_ptr, sin_ptr, angle * cos_row, 2 * HALF, HALF, HALF_P2, 1, INTERLEAVED, False,
        )  # fmt: skip
    else:
        slot = tl.load(slot_ptr + row).to(tl.int64)
        target, scales = cache_ptr + slot * cache_slot, scale_ptr + slot * scale_slot
        one = heads - Q_PROGRAMS * HEADS
        keep = one < tl.where(is_cached(slot, num_slots), 1, 0)
        put_normed(
            kv_ptr + row * kv_row, target, weight_ptr, eps, RANK, RANK_P2,
            tl.where(is_cached(slot, num_slots), RANK, 0), scales, HAS_CODES,
        )  # fmt: skip
        rotate_heads(
            kv_ptr + row * kv_row + RANK, target + RANK, one, keep, 0, 0, weight_ptr, eps, cos_ptr, sin_ptr,
            angle * cos_row, 2 * HALF, HALF, HALF_P2, 1, INTERLEAVED, False, False, scales + 1, 0, HAS_CODES,
        )  # fmt: skip


def latent_to_cache(
    q_rot: Tensor,
    compressed: Tensor,
    norm: tuple[Tensor, float],
    rotation: Rotation,
    slots: LatentSlots,
    *,
    q_out: Tensor | None = None,
) -> Tensor:
    """Normalize and rotate for latent attention (MLA) and write latents to their slots; returns the rotated queries [T,
    Hq, P].

    q_rot: [T, Hq, P], the rotary part of the queries. compressed: [T, R + P], the latent before its norm and the
    shared key; row t's slot gets the normalized latent, then the rotated key. norm: its weight [R] and epsilon. q_out:
    [T, Hq, P], made like q_rot when None; a view of the last P columns of the absorbed queries [T, Hq, R + P] saves a
    copy; must not be q_rot when interleaved.
    """
    (norm_weight, eps), cos, sin, positions = norm, rotation.cos, rotation.sin, rotation.positions
    cache, slot_mapping, scales = slots.cache, slots.slot_mapping, slots.scales
    num_rows, num_heads, rotary = q_rot.shape
    rank = norm_weight.shape[0]
    out = torch.empty_like(q_rot, memory_format=torch.contiguous_format) if q_out is None else q_out
    check_float("q_rot", q_rot, (None, None, None))
    check_float("compressed", compressed, (num_rows, rank + rotary))
    check_float("norm_weight", norm_weight, (rank,))
    check_cache("cache", cache, scales, (None, 1, rank + rotary), parts=2)
    check_float("q_out", out, tuple(q_rot.shape))
    rotation.check(num_rows, rotary)
    check_ids("slot_mapping", slot_mapping, num_rows)
    if num_rows == 0:
        return out
    held = _held(cache, scales)
    heads_per_program = 16
    q_programs = -(-num_heads // heads_per_program)
    _latent_kernel[(num_rows, q_programs + 1)](
        q_rot, compressed, out, bits_of(cache), held, slot_mapping, positions, cos, sin, norm_weight,
        q_rot.stride(0), q_rot.stride(1), compressed.stride(0), out.stride(0), out.stride(1), cache.stride(0),
        held.stride(0), cache.shape[0], cos.stride(0), float(eps),
        NUM_HEADS=num_heads, HEADS=heads_per_program, Q_PROGRAMS=q_programs, RANK=rank, RANK_P2=power_of_two(rank),
        HALF=rotary // 2, HALF_P2=power_of_two(rotary // 2), INTERLEAVED=rotation.is_interleaved,
        HAS_POSITIONS=positions is not None, HAS_CODES=scales is not None, num_warps=4,
    )  # fmt: skip
    return out

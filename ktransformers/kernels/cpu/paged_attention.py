"""Causal attention of flattened rows over a paged cache, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.cpu.base import WorkerPool, check_tensor, output
from ktransformers.kernels.cpu.kv import KvScales, check_cache, check_scales, kv_type
from ktransformers.kernels.extension import extension
from ktransformers.kernels.untraced import untraced

__all__ = ["MAX_BF16_DIMS", "attention", "row_numbers"]

MAX_BF16_DIMS = extension.MAX_BF16_DIMS
"""Of a key, with products of bf16."""


def _check_heads(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[int, int, int, int, int, int]:
    """Check that q [T, Hq, Dk] and the two caches fit one another. Returns T, Hq, Hkv, Dk, Dv and the slots."""
    check_tensor("q", q, (None, None, None))
    check_cache("k_cache", k_cache)
    check_cache("v_cache", v_cache)
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(f"k_cache is {k_cache.dtype} and v_cache {v_cache.dtype}: give one type")
    slots, num_kv_heads, _ = v_cache.shape
    if tuple(k_cache.shape) != (slots, num_kv_heads, q.shape[2]):
        expected = [slots, num_kv_heads, q.shape[2]]
        raise ValueError(f"k_cache must have shape {expected} to fit q and v_cache, got {list(k_cache.shape)}")
    if num_kv_heads < 1 or q.shape[1] % num_kv_heads != 0:
        raise ValueError(f"{q.shape[1]} query heads cannot share {num_kv_heads} KV heads")
    return q.shape[0], q.shape[1], num_kv_heads, q.shape[2], v_cache.shape[2], slots


def _check_both_scales(scales: KvScales, k_cache: Tensor, v_cache: Tensor) -> tuple[int, int, int, int, int, int, int]:
    """Scales of keys and of values as the kernel takes them."""
    of_keys = check_scales("scales of keys", scales[0], k_cache, 2)
    of_values = check_scales("scales of values", scales[1], v_cache, 1)
    if of_keys[3] == 2 and v_cache.shape[2] >= k_cache.shape[2]:
        raise ValueError(f"keys of {k_cache.shape[2]} dimensions have no two parts, the first of {v_cache.shape[2]}")
    return *of_keys, *of_values[:3]


def _check_options(page_size: int, window: int, softcap: float, sinks: Tensor | None, num_heads: int) -> None:
    if page_size < 1 or window < 0 or softcap < 0:
        raise ValueError(f"page_size {page_size} must be >= 1, window {window} and softcap {softcap} >= 0")
    if sinks is not None:
        check_tensor("sinks", sinks, (num_heads,))


def row_numbers(name: str, values: Tensor, num_rows: int) -> Tensor:
    """Return `values` [num_rows] as int32. Raises TypeError or ValueError, with `name`, for another shape or type."""
    if values.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, got {values.dtype}")
    converted = values.to(torch.int32)
    check_tensor(name, converted, (num_rows,), torch.int32)
    if values.dtype is torch.int64 and not torch.equal(converted.to(torch.int64), values):
        raise ValueError(f"{name} holds a number that no int32 can hold")
    return converted


@untraced
def attention(  # noqa: PLR0913 - what a call of the kernel takes; the rest is by keyword
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    page_size: int,
    seq_ids: Tensor,
    kv_lens: Tensor,
    scale: float,
    pool: WorkerPool,
    *,
    window: int = 0,
    is_chunked: bool = False,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    scales: KvScales = (None, None),
    bf16_products: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of T flattened rows over a paged cache; returns [T, Hq, Dv].

    q: [T, Hq, Dk]. k_cache: [slots, Hkv, Dk], v_cache: [slots, Hkv, Dv], any slot and head strides, the last dimension
    contiguous; v_cache may be a view of k_cache (MLA: Hkv = 1). Query head h reads KV head h // (Hq / Hkv).
    block_table: int32 [num_seqs, max_pages]; position p of sequence s is in slot
    block_table[s, p // page_size] * page_size + p % page_size. seq_ids: int32 or int64 [T].
    kv_lens: int32 or int64 [T]: row t sees positions 0 .. kv_lens[t] - 1 (its own included), with window > 0 only the
    last `window` of them, or, is_chunked, those from the last multiple of `window` up to its own; a row that sees
    nothing gives zeros. sinks: fp32 [Hq], a virtual logit per head (gpt_oss).
    softcap > 0: scores become softcap * tanh(score / softcap) (gemma2).
    Both caches are fp32, bf16, or codes, int8 or e4m3, with scales: of keys [slots, Hkv, 1], or [slots, Hkv, 2] where
    their first Dv dimensions have the first one (MLA), of values [slots, Hkv, 1].
    bf16_products, of caches in bf16: queries and probabilities are rounded to it and products are of bf16, with sums in
    fp32; see csrc/kernels/attention/bf16.inl.
    Raises ValueError for products of bf16 of other caches or of more than MAX_BF16_DIMS dimensions of a key, and
    when a page that a row sees lies outside the cache or the table.
    """
    sizes = num_rows, num_heads, _, _, dim_v, _ = _check_heads(q, k_cache, v_cache)
    check_tensor("block_table", block_table, (None, None), torch.int32)
    _check_options(page_size, window, softcap, sinks, num_heads)
    seqs, lens = row_numbers("seq_ids", seq_ids, num_rows), row_numbers("kv_lens", kv_lens, num_rows)
    both_scales = _check_both_scales(scales, k_cache, v_cache)
    result = output(out, (num_rows, num_heads, dim_v), q)
    rule = float(scale), float(softcap), window, is_chunked, 0 if sinks is None else sinks.data_ptr(), bf16_products
    extension.attention(
        pool.handle,
        q.data_ptr(),
        kv_type("k_cache", k_cache),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        both_scales,
        result.data_ptr(),
        sizes,
        (q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1)),
        block_table.data_ptr(),
        (block_table.shape[0], block_table.shape[1], block_table.stride(0), page_size),
        seqs.data_ptr(),
        lens.data_ptr(),
        *rule,
    )
    return result

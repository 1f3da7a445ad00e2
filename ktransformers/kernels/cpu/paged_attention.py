"""Causal attention of flattened rows over a paged cache, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.attention_call import AttentionCall, KvScales
from ktransformers.kernels.cpu.base import WorkerPool, check_tensor, output
from ktransformers.kernels.cpu.kv import check_cache, check_scales, kv_type
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


def _check_options(call: AttentionCall, num_heads: int) -> None:
    page_size, window, softcap = call.pages.page_size, call.window, call.softcap
    if page_size < 1 or window < 0 or softcap < 0:
        raise ValueError(f"page_size {page_size} must be >= 1, window {window} and softcap {softcap} >= 0")
    if call.sinks is not None:
        check_tensor("sinks", call.sinks, (num_heads,))


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
def attention(
    call: AttentionCall, pool: WorkerPool, *, bf16_products: bool = False, out: Tensor | None = None
) -> Tensor:
    """Compute a call of attention on the CPU; returns [T, Hq, Dv], `out` where it is given.

    Queries are fp32; both caches are fp32, bf16, or codes, int8 or e4m3, with scales.
    bf16_products, of caches in bf16: queries and probabilities are rounded to it and products are of bf16, with sums in
    fp32; see csrc/kernels/attention/bf16.inl.
    Raises ValueError for products of bf16 of other caches or of more than MAX_BF16_DIMS dimensions of a key, and
    when a page that a row sees lies outside the cache or the table.
    """
    q, k_cache, v_cache, pages, sinks = call.q, call.k_cache, call.v_cache, call.pages, call.sinks
    sizes = num_rows, num_heads, _, _, dim_v, _ = _check_heads(q, k_cache, v_cache)
    table = pages.block_table
    check_tensor("block_table", table, (None, None), torch.int32)
    _check_options(call, num_heads)
    seqs, lens = row_numbers("seq_ids", pages.seq_ids, num_rows), row_numbers("kv_lens", pages.kv_lens, num_rows)
    both_scales = _check_both_scales(call.scales, k_cache, v_cache)
    result = output(out, (num_rows, num_heads, dim_v), q)
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
        table.data_ptr(),
        (table.shape[0], table.shape[1], table.stride(0), pages.page_size),
        seqs.data_ptr(),
        lens.data_ptr(),
        float(call.scale),
        float(call.softcap),
        call.window,
        call.is_chunked,
        0 if sinks is None else sinks.data_ptr(),
        bf16_products,
    )
    return result

"""Implementations of attention as tests call them: with the fields of a call one by one, as they vary them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import Tensor

from ktransformers.kernels.attention_call import AttentionCall, RowPages, TopkCall

__all__ = ["flat_attention", "flat_mla", "flat_pooled", "flat_topk"]

_OPTIONS = {field.name for field in fields(AttentionCall)} - {"q", "k_cache", "v_cache", "pages", "scale"}


def _parted(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the call, and those of the implementation."""
    of_call = {name: value for name, value in options.items() if name in _OPTIONS}
    return of_call, {name: value for name, value in options.items() if name not in _OPTIONS}


def flat_attention(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """(q, k_cache, v_cache, block_table, page_size, seq_ids, kv_lens, scale, what compute takes beside a call)."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        of_call, others = _parted(options)
        return compute(AttentionCall(q, k, v, RowPages(*rest[:4]), rest[4], **of_call), *rest[5:], **others)

    return attention


def flat_mla(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """(q, cache, rank, block_table, ...) as `flat_attention`; scales are the keys'."""
    attention = flat_attention(compute)

    def mla(q: Tensor, cache: Tensor, rank: int, *rest: Any, scales: Tensor | None = None, **options: Any) -> Tensor:
        return attention(q, cache, cache[..., :rank], *rest, scales=(scales, None), **options)

    return mla


def flat_topk(compute: Callable[..., Any]) -> Callable[..., Any]:
    """(q, weights, k_cache, block_table, page_size, seq_ids, kv_lens, scale, num_chosen, what compute takes beside)."""

    def topk(q: Tensor, weights: Tensor | None, keys: Tensor, *rest: Any, **options: Any) -> Any:
        scale, num_chosen = rest[4:6]
        return compute(TopkCall(q, weights, keys, RowPages(*rest[:4]), scale, num_chosen, **options), *rest[6:])

    return topk


def flat_pooled(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """(cache, bias, block_table, page_size, seq_ids, kv_lens, dim, size)."""
    return lambda cache, bias, *rest: compute(cache, bias, RowPages(*rest[:4]), *rest[4:])

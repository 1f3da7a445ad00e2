"""Grouped-query attention over a paged cache on the GPU. Knows tensors; not models, phases or who owns a page."""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.triton.attention.kv_codes import KvScales
from ktransformers.kernels.triton.attention.launch import (
    DECODE_ROWS,
    AttentionLaunch,
    check_call,
    launch_decode,
    launch_prefill,
)

__all__ = ["attention"]


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    page_size: int,
    seq_ids: Tensor,
    kv_lens: Tensor,
    scale: float,
    *,
    window: int = 0,
    is_chunked: bool = False,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    counters: Tensor | None = None,
    scales: KvScales = (None, None),
    quantized_attention: bool = False,
) -> Tensor:
    """Compute causal attention of T flattened rows over a paged cache; returns [T, Hq, Dv]. Arguments as in
    `cpu.attention`.

    q, out: fp16, bf16 or fp32; k_cache [slots, Hkv, Dk], v_cache [slots, Hkv, Dv]: one of these types, in which the
    products are taken (fp32 accumulators); or codes, int8 or e4m3, with scales of keys and of values, fp32
    [slots, Hkv, 1]: then q is bf16 or fp32, and products are taken in its type. seq_ids, kv_lens: int32 or int64. out:
    made like q when None.
    workspace: fp32 of `workspace_numel`, made when None, at least for one row;
    give it and `out` and nothing is allocated. counters: int32, all 0 before and after; with one for each row and KV
    head, a decode step of few heads per KV head is one launch instead of two. Calls that share a workspace or counters
    must run one after another on one stream.
    Up to 16 rows, or as many as the table has, take the split-KV kernel, each row on its own; more take the prefill
    kernel, where the rows of one sequence should lie side by side (any order is right, and slower). Lengths and pages
    are read on the device, so nothing checks them: a page outside the cache is an invalid read.
    quantized_attention: the prefill kernel rounds each row of a head to codes of the cache's type, as keys are rounded
    (`kernels.reference.quantize_kv`), and multiplies codes with codes: int8 exactly, with int32 sums, e4m3 with the
    sums of the tensor cores (`why_no_quantized_attention` says where). Values are widened as without; so is all in
    decode. Raises TypeError or ValueError for a wrong dtype, shape, stride or device.
    """
    result = torch.empty(*q.shape[:2], v_cache.shape[-1], dtype=q.dtype, device=q.device) if out is None else out
    call = AttentionLaunch(
        q, k_cache, v_cache, block_table, page_size, seq_ids, kv_lens, scale, result, window, sinks, float(softcap),
        counters=counters, is_chunked=is_chunked, scales=scales, quantized_attention=quantized_attention,
    )  # fmt: skip
    check_call(call)
    if q.shape[0] == 0:
        return result
    if q.shape[0] <= max(DECODE_ROWS, block_table.shape[0]):
        launch_decode(call, workspace)
    else:
        launch_prefill(call)
    return result

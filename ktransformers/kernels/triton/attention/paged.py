"""Grouped-query attention over a paged cache on the GPU. Knows tensors; not models, phases or who owns a page."""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.attention_call import AttentionCall
from ktransformers.kernels.triton.attention.launch import AttentionLaunch, run

__all__ = ["attention"]


def attention(
    call: AttentionCall,
    *,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    counters: Tensor | None = None,
    quantized_attention: bool = False,
) -> Tensor:
    """Compute a call of attention on the GPU; returns [T, Hq, Dv].

    q, out: fp16, bf16 or fp32; both caches: one of these types, in which the products are taken (fp32 accumulators); or
    codes, int8 or e4m3, with scales [slots, Hkv, 1]: then q is bf16 or fp32, and products are taken in its type. out:
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
    q = call.q
    result = torch.empty(*q.shape[:2], call.dim_v, dtype=q.dtype, device=q.device) if out is None else out
    return run(AttentionLaunch(call, result, counters=counters, quantized_attention=quantized_attention), workspace)

"""A step of attention over a paged cache on a GPU, in the shapes of several models, for probes and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ktransformers.bench.gpu.device import BF16, Gpu
from ktransformers.engine.plan.kv_types import KV_DTYPES
from ktransformers.kernels.attention_call import AttentionCall, KvScales, RowPages
from ktransformers.kernels.reference import quantize_kv
from ktransformers.kernels.triton.attention.launch import workspace_numel
from ktransformers.kernels.triton.attention.mla import mla_attention
from ktransformers.kernels.triton.attention.paged import attention

__all__ = ["MAX_LEN", "MODELS", "AttentionCase", "AttentionModel", "StepShape"]

PAGE = 64


MAX_LEN = 32768


@dataclass(frozen=True)
class AttentionModel:
    """The attention of one model; rank > 0 for latent attention (dim is then rank + rope)."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    window: int = 0
    has_sinks: bool = False
    is_latent: bool = False
    kv_type: str = "bf16"
    quantized_attention: bool = False

    @property
    def shown(self) -> str:
        name = self.name if self.kv_type == "bf16" else f"{self.name} {self.kv_type}"
        return f"{name} products" if self.quantized_attention else name


_PLAIN = [
    AttentionModel("qwen3-30b-a3b", 32, 4, 128, 128),
    AttentionModel("glm-4.5-air", 96, 8, 128, 128),
    AttentionModel("qwen2-57b-a14b", 28, 4, 128, 128),
    AttentionModel("gpt-oss-20b", 64, 8, 64, 64, window=128, has_sinks=True),
    AttentionModel("gemma-like", 16, 8, 256, 256),
    AttentionModel("deepseek-v2-lite", 16, 1, 576, 512, is_latent=True),
    AttentionModel("deepseek-v3", 128, 1, 576, 512, is_latent=True),
]


MODELS = _PLAIN + [replace(model, kv_type=kv_type) for kv_type in ("int8", "fp8") for model in _PLAIN]


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step: `num_seqs` sequences whose last `rows` positions, up to `length`, are its rows."""

    num_seqs: int
    rows: int
    length: int


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """A cache as --kv_type has it: keys, values [slots, kv_heads, dim], and the scales of codes."""

    keys: Tensor
    values: Tensor
    scales: KvScales

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, model: AttentionModel) -> AttentionCache:
        """Return the cache of bf16 keys and values as the model's --kv_type keeps them."""
        dtype = KV_DTYPES[model.kv_type]
        if dtype == BF16:
            return cls(keys, values, (None, None))
        k, k_scales = quantize_kv(keys.float(), dtype, model.dim_v if model.is_latent else 0)
        if model.is_latent:
            return cls(k, k[..., : model.dim_v], (k_scales, None))
        v, v_scales = quantize_kv(values.float(), dtype)
        return cls(k, v, (k_scales, v_scales))


class AttentionCase:
    """A case of attention to measure: `sets` caches with a step's sequences in them."""

    def __init__(self, gpu: Gpu, model: AttentionModel, step: StepShape, sets: int):
        num_seqs, rows, length = step.num_seqs, step.rows, step.length
        self.gpu, self.model, self.num_seqs, self.rows, self.length = gpu, model, num_seqs, rows, length
        device = gpu.device
        pages = num_seqs * -(-length // PAGE)
        order = torch.randperm(pages, device=device).to(torch.int32).view(num_seqs, -1)
        self.table = torch.zeros(num_seqs, MAX_LEN // PAGE, dtype=torch.int32, device=device)
        self.table[:, : order.shape[1]] = order
        self.seq_ids = torch.arange(num_seqs, device=device, dtype=torch.int32).repeat_interleave(rows)
        lens = torch.arange(length - rows + 1, length + 1, device=device, dtype=torch.int32)
        self.kv_lens = lens.repeat(num_seqs)
        shape = (pages * PAGE, model.kv_heads)
        self.caches = []
        for _ in range(sets):
            keys = gpu.randn(*shape, model.dim)
            values = keys[..., : model.dim_v] if model.is_latent else gpu.randn(*shape, model.dim_v)
            self.caches.append(AttentionCache.of(keys, values, model))
        total = num_seqs * rows
        self.q = gpu.randn(total, model.heads, model.dim)
        self.out = torch.empty(total, model.heads, model.dim_v, device=device, dtype=BF16)
        self.sinks = torch.randn(model.heads, device=device) if model.has_sinks else None
        size = (
            workspace_numel(total, model.heads, 1, model.dim_v, MAX_LEN, device)
            if model.is_latent
            else workspace_numel(total, model.heads, model.kv_heads, model.dim_v, MAX_LEN, device)
        )
        self.workspace = torch.empty(2 * size if rows == 1 else 0, device=device)  # tuning may split twice as often
        self.scale = model.dim**-0.5

    def call(self, index: int) -> Tensor:
        """Compute the step on one of the caches, as operators do it."""
        call = self.arguments(index)
        workspace = self.workspace if self.rows == 1 else None
        if self.model.is_latent:
            return mla_attention(call, out=self.out, workspace=workspace)
        is_quantized = self.model.quantized_attention
        return attention(call, out=self.out, workspace=workspace, quantized_attention=is_quantized)

    def arguments(self, index: int) -> AttentionCall:
        """Return the step on one of the caches as kernels take it."""
        kept, model = self.caches[index], self.model
        pages = RowPages(self.table, PAGE, self.seq_ids, self.kv_lens)
        caches = kept.keys, kept.values
        return AttentionCall(
            self.q, *caches, pages, self.scale, window=model.window, sinks=self.sinks, scales=kept.scales
        )

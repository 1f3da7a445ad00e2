"""Attention as bench.gpu measures it, with what a developer asks beside: error, bytes, other tiles, torch's own."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ktransformers.bench.gpu.attention_case import PAGE, AttentionCache, AttentionCase
from ktransformers.bench.gpu.device import BF16, relative_error
from ktransformers.engine.plan.kv_types import KV_DTYPES
from ktransformers.kernels.triton.attention import launch

__all__ = ["CheckedAttention"]


class CheckedAttention(AttentionCase):
    """A case of attention whose results are compared, and whose tiles can be chosen."""

    def record(self, index: int) -> launch.AttentionLaunch:
        """Return the step on one of the caches as arguments of a launch."""
        model = self.model
        return launch.AttentionLaunch(
            self.arguments(index),
            self.out,
            is_shared=model.is_latent,
            quantized_attention=model.quantized_attention,
        )

    def run(self, index: int, tile: launch.Tile) -> None:
        """Launch the step on one of the caches with a given tile."""
        if self.rows == 1:
            launch.launch_decode(self.record(index), self.workspace, tile)
        else:
            launch.launch_prefill(self.record(index), tile)

    def gathered(self, index: int, seq: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one sequence [kv_heads, length, dim]."""
        positions = torch.arange(self.length, device=self.gpu.device)
        slots = self.table[seq].long()[positions // PAGE] * PAGE + positions % PAGE
        keys, values = _numbers(self.caches[index], slots)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def expected(self, row: int) -> Tensor:
        """Compute one row by fp32 torch, [heads, dim_v]."""
        keys, values = self.gathered(0, int(self.seq_ids[row]))
        length = int(self.kv_lens[row])
        first = max(0, length - self.model.window) if self.model.window else 0
        group = self.model.heads // self.model.kv_heads
        k = keys[:, first:length].float().repeat_interleave(group, 0)
        v = values[:, first:length].float().repeat_interleave(group, 0)
        scores = (k @ self.q[row].float()[:, :, None])[..., 0] * self.scale
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks[:, None]), 1)
        p = torch.softmax(scores, 1)[:, : length - first]
        return (p[:, None] @ v)[:, 0]

    def error(self) -> float:
        """Return the step's relative error against fp32 torch, the worst of three rows."""
        out = self.call(0)
        rows = {0, self.q.shape[0] // 3, self.q.shape[0] - 1}
        return max(relative_error(out[row], self.expected(row)) for row in rows)

    def seen(self) -> int:
        """The number of positions that all rows see together."""
        lens = self.kv_lens.long()
        return int((lens.clamp(max=self.model.window) if self.model.window else lens).sum())

    def nbytes(self) -> int:
        """The bytes of the keys and values that are read, each once."""
        model = self.model
        positions = min(self.length, model.window + self.rows - 1) if model.window else self.length
        columns, itemsize = model.dim + (0 if model.is_latent else model.dim_v), KV_DTYPES[model.kv_type].itemsize
        scales = 4 * 2 if itemsize == 1 else 0
        return self.num_seqs * positions * model.kv_heads * (itemsize * columns + scales)

    def torch_us(self) -> float | None:
        """Return microseconds of torch's attention on the same rows with contiguous keys; None where it has none."""
        model = self.model
        if model.is_latent or model.window or model.kv_type != "bf16" or (self.rows > 1 and self.rows != self.length):
            return None
        total = self.num_seqs
        q = self.q.view(total, self.rows, model.heads, model.dim).transpose(1, 2).contiguous()
        keys, values = zip(*(self.gathered(0, seq) for seq in range(total)), strict=True)
        sets = [(torch.stack(keys).to(BF16), torch.stack(values).to(BF16)) for _ in range(len(self.caches))]
        sdpa = partial(
            functional.scaled_dot_product_attention, is_causal=self.rows > 1, scale=self.scale, enable_gqa=True
        )
        return self.gpu.graph_us([partial(sdpa, q, k, v) for k, v in sets])


def _numbers(cache: AttentionCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of some slots, fp32 for codes."""
    k_scales, v_scales = cache.scales
    if k_scales is None:
        return cache.keys[slots], cache.values[slots]
    keys, parts, rank = cache.keys[slots].float(), k_scales[slots], cache.values.shape[-1]
    if v_scales is None:
        keys = torch.cat((keys[..., :rank] * parts[..., :1], keys[..., rank:] * parts[..., 1:]), dim=-1)
        return keys, keys[..., :rank]
    return keys * parts, cache.values[slots].float() * v_scales[slots]

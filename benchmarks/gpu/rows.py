"""The Triton kernels beside attention, row by row: norms, activations, rotation, routing. See attention.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from ktransformers.bench.common.report import Row
from ktransformers.bench.gpu.device import BF16, Gpu, relative_error
from ktransformers.kernels.cpu.router import RouterSpec, Scoring
from ktransformers.kernels.triton.attention.rope import (
    HeadNorms,
    KvSlots,
    LatentSlots,
    Rotation,
    latent_to_cache,
    rope_to_cache,
)
from ktransformers.kernels.triton.common.elementwise import activate, add_rms_norm
from ktransformers.kernels.triton.experts.router import topk_router
from ktransformers.kernels.types import ActivationSpec

__all__ = ["row_figures"]


def row_figures(gpu: Gpu, row_counts: Sequence[int] = (1, 16, 2048)) -> Iterator[Row]:
    """A figure per kernel and number of rows."""
    for rows in row_counts:
        yield norm_figure(gpu, rows, 2048)
        yield norm_figure(gpu, rows, 7168)
        yield silu_figure(gpu, rows, 6144)
        yield rope_figure(gpu, rows, (32, 4), 128)
        yield latent_figure(gpu, rows, 128)
        yield router_figure(gpu, rows, 128, RouterSpec(8))
        yield router_figure(gpu, rows, 256, RouterSpec(8, Scoring.SIGMOID, 8, 4, scaling=2.5), has_bias=True)


def _figure(name: str, rows: int, size: int, us: float, nbytes: int | None = None) -> Row:
    """size: columns, heads or experts. nbytes: moved once; None: too few to matter."""
    return {"name": name, "rows": rows, "size": size, "us": us, "gb_per_s": nbytes / us / 1e3 if nbytes else None}


def _numbered(call: Callable[[int], object], count: int) -> list[Callable[[], object]]:
    return [lambda i=i: call(i) for i in range(count)]  # type: ignore[misc]


def norm_figure(gpu: Gpu, rows: int, width: int) -> Row:
    """A sum and its RMS norm."""
    nbytes = 8 * rows * width
    sets = gpu.copies(nbytes)
    x, residual, out = (gpu.randn(sets, rows, width) for _ in range(3))
    weight = gpu.randn(width)
    calls = _numbered(lambda i: add_rms_norm(x[i], residual[i], weight, 1e-6, out[i], residual[i]), sets)
    return _figure("add_rms_norm", rows, width, gpu.graph_us(calls), nbytes)


def silu_figure(gpu: Gpu, rows: int, width: int) -> Row:
    """silu(gate) * up."""
    nbytes = 6 * rows * width
    sets = gpu.copies(nbytes)
    x, out = gpu.randn(sets, rows, 2 * width), torch.empty(sets, rows, width, device=gpu.device, dtype=BF16)
    silu = ActivationSpec()
    us = gpu.graph_us(_numbered(lambda i: activate(silu, x[i, :, :width], x[i, :, width:], out[i]), sets))
    want = functional.silu(x[0, :, :width].float()) * x[0, :, width:].float()
    return _figure("silu_mul", rows, width, us, nbytes) | {"error": relative_error(out[0], want)}


def rope_figure(gpu: Gpu, rows: int, heads: tuple[int, int], dim: int) -> Row:
    """Norm and rotation of queries and keys, and writing to the cache. heads: of queries, and of keys."""
    num_q, num_kv = heads
    nbytes = 4 * rows * (num_q + 2 * num_kv) * dim
    sets = gpu.copies(nbytes)
    qkv = gpu.randn(sets, rows, num_q + 2 * num_kv, dim)
    k_cache, v_cache = (torch.zeros(rows, num_kv, dim, device=gpu.device, dtype=BF16) for _ in range(2))
    angles = torch.rand(4096, dim // 2, device=gpu.device)
    cos, sin, ids = angles.cos(), angles.sin(), torch.arange(rows, device=gpu.device)
    weights = (torch.ones(dim, device=gpu.device), torch.ones(dim, device=gpu.device))
    q_out = torch.empty(rows, num_q, dim, device=gpu.device, dtype=BF16)
    rotation, slots = Rotation(cos, sin, positions=ids), KvSlots(k_cache, v_cache, ids)

    def call(index: int) -> Tensor:
        q, k, v = torch.split(qkv[index], [num_q, num_kv, num_kv], 1)
        return rope_to_cache((q, k, v), rotation, slots, HeadNorms(*weights, 1e-6), q_out=q_out)

    us = gpu.graph_us(_numbered(call, sets))
    x = qkv[sets - 1, :, :num_q].float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    a, b, c, s = x[..., : dim // 2], x[..., dim // 2 :], cos[:rows, None], sin[:rows, None]
    want = torch.cat((a * c - b * s, b * c + a * s), -1)
    return _figure("norm, rope, cache", rows, num_q, us, nbytes) | {"error": relative_error(q_out, want)}


def latent_figure(gpu: Gpu, rows: int, heads: int) -> Row:
    """The same for latent attention of DeepSeek's sizes."""
    nbytes = 4 * rows * (heads * 64 + 576)
    sets = gpu.copies(nbytes)
    q, kv = gpu.randn(sets, rows, heads, 192)[..., 128:], gpu.randn(sets, rows, 576)
    cache = torch.zeros(rows, 1, 576, device=gpu.device, dtype=BF16)
    out = torch.empty(rows, heads, 576, device=gpu.device, dtype=BF16)[..., 512:]
    angles = torch.rand(4096, 32, device=gpu.device)
    cos, sin, ids = angles.cos(), angles.sin(), torch.arange(rows, device=gpu.device)
    norm, rotation = (torch.ones(512, device=gpu.device), 1e-6), Rotation(cos, sin, True, ids)

    def call(index: int) -> object:
        return latent_to_cache(q[index], kv[index], norm, rotation, LatentSlots(cache, ids), q_out=out)

    return _figure("latent norm, rope, cache", rows, heads, gpu.graph_us(_numbered(call, sets)), nbytes)


def router_figure(gpu: Gpu, rows: int, num_experts: int, spec: RouterSpec, has_bias: bool = False) -> Row:
    """Choosing experts from logits."""
    logits = torch.randn(8, rows, num_experts, device=gpu.device)
    bias = torch.zeros(num_experts, device=gpu.device) if has_bias else None
    ids = torch.empty(rows, spec.top_k, dtype=torch.int64, device=gpu.device)
    weights = torch.empty(rows, spec.top_k, device=gpu.device)
    us = gpu.graph_us(_numbered(lambda i: topk_router(logits[i], spec, bias, ids, weights), 8))
    return _figure(f"router {spec.scoring.name.lower()}", rows, num_experts, us)

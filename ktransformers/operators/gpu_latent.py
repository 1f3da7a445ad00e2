"""Absorbed latent attention on a GPU, in four launches for few rows and its own cache write. See operators/mla.py.

T rows, H heads, R kv_lora_rank, P rotary dimension, N non-rotary dimension, V value dimension
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktransformers.errors import UnsupportedError
from ktransformers.kernels.native import WorkerPool
from ktransformers.kernels.quant import RawTensor
from ktransformers.kernels.triton.latent import MAX_LATENT_ROWS, absorb, expand, norm_to_cache
from ktransformers.kernels.triton.mla import mla_attention
from ktransformers.kernels.triton.rope import latent_to_cache
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import Device, use
from ktransformers.operators.flash import Attend
from ktransformers.operators.gpu_matrix import dense_tensor

__all__ = ["GpuLatent", "LatentStep", "check_gpu_shape"]


def check_gpu_shape(key: str, rank: int, rope_dim: int) -> None:
    """Raises UnsupportedError for shapes that the kernels do not take."""
    if rank < 16 or rank & (rank - 1) or 2 * rank <= rank + rope_dim:
        raise UnsupportedError(
            f"{key}: latent attention on a GPU needs a kv_lora_rank that is a power of two above qk_rope_head_dim, "
            f"got {rank} and {rope_dim}; place it on cpu"
        )


@dataclass(frozen=True, slots=True)
class LatentStep:
    """What a step brings to one layer's attention, beside its queries.

    compressed: [T, R + P], latent before its norm and shared key. norm: weight [R] and epsilon of the latent's RMSNorm.
    angles: cos and sin [T, >= P / 2], and whether pairs are interleaved. is_cached: the latents are in the cache.
    attend: over the cache, None for Triton's kernels.
    """

    compressed: torch.Tensor
    norm: tuple[torch.Tensor, float]
    angles: tuple[torch.Tensor, torch.Tensor, bool]
    cache: torch.Tensor
    context: ForwardContext
    scale: float
    is_cached: bool = False
    attend: Attend | None = None


@dataclass(frozen=True, slots=True)
class GpuLatent:
    """k_b: [H, N, R], v_b: [H, R, V], both dense in the device's type."""

    k_b: torch.Tensor
    v_b: torch.Tensor

    @classmethod
    def of(cls, k_b: RawTensor, v_b: RawTensor, device: Device, pool: WorkerPool) -> GpuLatent:
        """From the stored k_b [H, R, N] and v_b [H, V, R]."""
        dense = [dense_tensor(part, device, pool).transpose(1, 2).contiguous() for part in (k_b, v_b)]
        return cls(dense[0], dense[1])

    @staticmethod
    def is_small(step: LatentStep) -> bool:
        """Whether the kernels for few rows take the step."""
        return step.compressed.shape[0] <= MAX_LATENT_ROWS

    def cache_and_norm(self, step: LatentStep, query: torch.Tensor, norm: tuple[torch.Tensor, float]) -> torch.Tensor:
        """Write a small step's latents to the cache; returns its compressed queries [T, Q] normalized by `norm`."""
        use(step.cache.device)
        slots = step.context.slot_mapping
        normed = norm_to_cache(step.compressed, step.norm, step.angles, step.cache, slots, query, norm)
        assert normed is not None, "there is a query"
        return normed

    def attend(self, q: torch.Tensor, step: LatentStep) -> torch.Tensor:
        """Values [T, H, V] that the queries [T, H, N + P] attend to, the step's own latents included."""
        use(step.cache.device)
        context, is_small = step.context, self.is_small(step)
        if is_small and not step.is_cached:
            norm_to_cache(step.compressed, step.norm, step.angles, step.cache, context.slot_mapping)
        query = absorb(q, self.k_b, step.angles) if is_small else self._absorbed(q, step)
        rank = self.k_b.shape[2]
        if step.attend is not None:
            latent = step.attend(query, step.cache, step.cache[..., :rank])
        else:
            latent = mla_attention(
                query,
                step.cache,
                rank,
                context.block_table,
                context.page_size,
                context.seq_ids,
                context.kv_lens,
                step.scale,
            )
        if is_small:
            return expand(latent, self.v_b)
        return torch.bmm(latent.transpose(0, 1), self.v_b).transpose(0, 1).contiguous()

    def _absorbed(self, q: torch.Tensor, step: LatentStep) -> torch.Tensor:
        """Absorbed and rotated queries [T, H, R + P] of many rows, whose latents are cached on the way."""
        num_rows, num_heads = q.shape[:2]
        nope_dim, rank = self.k_b.shape[1:]
        query = torch.empty(num_rows, num_heads, step.cache.shape[-1], dtype=q.dtype, device=q.device)
        query[..., :rank] = torch.bmm(q[..., :nope_dim].transpose(0, 1), self.k_b).transpose(0, 1)
        cos, sin, is_interleaved = step.angles
        latent_to_cache(
            q[..., nope_dim:],
            step.compressed,
            *step.norm,
            cos,
            sin,
            step.cache,
            step.context.slot_mapping,
            is_interleaved=is_interleaved,
            q_out=query[..., rank:],
        )
        return query

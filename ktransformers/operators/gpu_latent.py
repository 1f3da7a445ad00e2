"""Absorbed latent attention on a GPU: the two batched up-projections around the Triton kernels. See operators/mla.py.

T rows, H heads, R kv_lora_rank, P rotary dimension, N non-rotary dimension, V value dimension
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktransformers.errors import UnsupportedError
from ktransformers.kernels.native import WorkerPool
from ktransformers.kernels.quant import RawTensor
from ktransformers.kernels.triton.mla import mla_attention
from ktransformers.kernels.triton.rope import latent_to_cache
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import Device, use
from ktransformers.operators.gpu_matrix import dense_tensor

__all__ = ["GpuLatent", "check_gpu_shape"]


def check_gpu_shape(key: str, rank: int, rope_dim: int) -> None:
    """Raises UnsupportedError for shapes that the kernels do not take."""
    if rank < 16 or rank & (rank - 1) or 2 * rank <= rank + rope_dim:
        raise UnsupportedError(
            f"{key}: latent attention on a GPU needs a kv_lora_rank that is a power of two above qk_rope_head_dim, "
            f"got {rank} and {rope_dim}; place it on cpu"
        )


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

    def attend(
        self,
        q: torch.Tensor,
        compressed: torch.Tensor,
        norm: tuple[torch.Tensor, float | None],
        angles: tuple[torch.Tensor, torch.Tensor, bool],
        cache: torch.Tensor,
        context: ForwardContext,
        scale: float,
    ) -> torch.Tensor:
        """Latents [T, H, R] that the rows' queries attend to, after the rows' own latents were cached.

        q: [T, H, N + P]. compressed: [T, R + P], latent before its norm and shared key. norm: weight [R] and epsilon
        of the latent's RMSNorm. angles: cos and sin [T, P / 2], and whether pairs are interleaved.
        """
        use(cache.device)
        num_rows, num_heads = q.shape[:2]
        nope_dim, rank = self.k_b.shape[1:]
        query = torch.empty(num_rows, num_heads, cache.shape[-1], dtype=q.dtype, device=q.device)
        query[..., :rank] = torch.bmm(q[..., :nope_dim].transpose(0, 1), self.k_b).transpose(0, 1)
        weight, eps = norm
        cos, sin, is_interleaved = angles
        latent_to_cache(
            q[..., nope_dim:],
            compressed,
            weight,
            eps or 0.0,
            cos,
            sin,
            cache,
            context.slot_mapping,
            is_interleaved=is_interleaved,
            q_out=query[..., rank:],
        )
        return mla_attention(
            query, cache, rank, context.block_table, context.page_size, context.seq_ids, context.kv_lens, scale
        )

    def expand(self, latent: torch.Tensor) -> torch.Tensor:
        """Latents [T, H, R] -> values [T, H, V]."""
        return torch.bmm(latent.transpose(0, 1), self.v_b).transpose(0, 1).contiguous()

"""Latent attention on a GPU: absorbed, in four launches for few rows and its own cache write, or on expanded keys where
many rows share them. See operators/attention/mla.py and operators/attention/latent_materialization.py.

T rows, H heads, R kv_lora_rank, P rotary dimension, N non-rotary dimension, V value dimension
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ktransformers.errors import UnsupportedError
from ktransformers.kernels.attention_call import AttentionCall
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.triton.attention.kv_codes import widen_latents
from ktransformers.kernels.triton.attention.latent import MAX_LATENT_ROWS, absorb, expand, norm_to_cache
from ktransformers.kernels.triton.attention.materialized import materialized_attention
from ktransformers.kernels.triton.attention.mla import mla_attention
from ktransformers.kernels.triton.attention.rope import LatentSlots, Rotation, latent_to_cache
from ktransformers.kernels.types import RawTensor
from ktransformers.operators.attention.flash import Attend
from ktransformers.operators.attention.latent_materialization import WORKSPACE_ALIGN, Materialization, MaterializedBatch
from ktransformers.operators.attention.topk_positions import TopkPositions
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import Device, use
from ktransformers.operators.linear.matrix import dense_tensor

__all__ = ["GpuLatent", "LatentStep", "check_gpu_shape"]


def check_gpu_shape(key: str, rank: int, rope_dim: int) -> None:
    """Raise UnsupportedError for shapes that the kernels do not take."""
    if rank < 16 or rank & (rank - 1) or 2 * rank <= rank + rope_dim:
        raise UnsupportedError(
            f"{key}: latent attention on a GPU needs a kv_lora_rank that is a power of two above qk_rope_head_dim, "
            f"got {rank} and {rope_dim}; place it on cpu"
        )


@dataclass(frozen=True, slots=True)
class LatentStep:
    """Inputs of one layer's latent attention in a step, beside its queries.

    compressed: [T, R + P], latent before its norm and shared key. norm: weight [R] and epsilon of the latent's RMSNorm.
    rotation: by cos and sin [T, >= P / 2]. scales: of a cache of codes, fp32
    [slots, 1, 2]. is_cached: the latents are in the cache. attend: over the cache, None for Triton's kernels.
    materialization: rows that attend on expanded keys instead, None for none. workspace: values that keys are expanded
    into, as many as it was chosen for. topk_positions: the positions that rows attend to, None for all. window: most
    positions that a row sees, 0 for all.
    """

    compressed: torch.Tensor
    norm: tuple[torch.Tensor, float]
    rotation: Rotation
    cache: torch.Tensor
    context: ForwardContext
    scale: float
    scales: torch.Tensor | None = None
    is_cached: bool = False
    attend: Attend | None = None
    materialization: Materialization | None = None
    workspace: torch.Tensor | None = None
    topk_positions: TopkPositions | None = None
    window: int = 0
    sinks: torch.Tensor | None = None  # fp32 [H], with nothing expanded

    @property
    def slots(self) -> LatentSlots:
        """The slots that the step's latents go to."""
        return LatentSlots(self.cache, self.context.slot_mapping, self.scales)


@dataclass(frozen=True, slots=True)
class GpuLatent:
    """Latent attention of a layer on a GPU. k_b: [H, N, R], v_b: [H, R, V], both dense in the device's type."""

    k_b: torch.Tensor
    v_b: torch.Tensor

    @classmethod
    def of(cls, k_b: RawTensor, v_b: RawTensor, device: Device, pool: WorkerPool) -> GpuLatent:
        """Bring the stored k_b [H, R, N] and v_b [H, V, R] to a GPU."""
        dense = [dense_tensor(part, device, pool).transpose(1, 2).contiguous() for part in (k_b, v_b)]
        return cls(dense[0], dense[1])

    @staticmethod
    def is_small(step: LatentStep) -> bool:
        """Whether the kernels for few rows take the step."""
        return step.materialization is None and step.compressed.shape[0] <= MAX_LATENT_ROWS

    def cache_and_norm(self, step: LatentStep, query: torch.Tensor, norm: tuple[torch.Tensor, float]) -> torch.Tensor:
        """Write a small step's latents to the cache; returns its compressed queries [T, Q] normalized by `norm`."""
        use(step.cache.device)
        normed = norm_to_cache(step.compressed, step.norm, step.rotation, step.slots, query, norm)
        assert normed is not None, "there is a query"
        return normed

    def attend(self, q: torch.Tensor, step: LatentStep) -> torch.Tensor:
        """Return values [T, H, V] that the queries [T, H, N + P] attend to, the step's own latents included."""
        use(step.cache.device)
        if step.materialization is not None:
            return self._attend_expanded(q, step, step.materialization)
        is_small = self.is_small(step)
        if is_small and not step.is_cached:
            norm_to_cache(step.compressed, step.norm, step.rotation, step.slots)
        query = absorb(q, self.k_b, step.rotation) if is_small else self._absorbed(q, step)
        if step.attend is not None:
            return self._values(step.attend(query, step.cache, step.cache[..., : self.rank]))
        return self._values(self._attend_latents(query, step, slice(None)))

    @property
    def rank(self) -> int:
        return self.k_b.shape[2]

    def _attend_latents(self, query: torch.Tensor, step: LatentStep, rows: slice | torch.Tensor) -> torch.Tensor:
        """Latents [n, H, R] that some rows' absorbed queries [n, H, R + P] attend to, by Triton's kernels."""
        chosen = step.topk_positions
        call = AttentionCall(
            query,
            step.cache,
            step.cache[..., : self.rank],
            (step.context.pages if chosen is None else chosen.pages).of(rows),
            step.scale,
            window=step.window if chosen is None else 0,
            sinks=step.sinks,
            scales=(step.scales, None),
        )
        return mla_attention(call)

    def _values(self, latent: torch.Tensor) -> torch.Tensor:
        """Attended latents [n, H, R] as values [n, H, V]."""
        if latent.shape[0] <= MAX_LATENT_ROWS:
            return expand(latent, self.v_b)
        return torch.bmm(latent.transpose(0, 1), self.v_b).transpose(0, 1).contiguous()

    def _absorbed(self, q: torch.Tensor, step: LatentStep) -> torch.Tensor:
        """Absorbed and rotated queries [T, H, R + P] of many rows, whose latents are cached on the way."""
        query = self._absorb_rows(q, step)
        self._rotate_and_cache(q, step, query[..., self.rank :])
        return query

    def _absorb_rows(self, q: torch.Tensor, step: LatentStep) -> torch.Tensor:
        """Absorbed queries [n, H, R + P] without their rotary columns."""
        query = torch.empty(*q.shape[:2], step.cache.shape[-1], dtype=q.dtype, device=q.device)
        nope_dim = self.k_b.shape[1]
        query[..., : self.rank] = torch.bmm(q[..., :nope_dim].transpose(0, 1), self.k_b).transpose(0, 1)
        return query

    def _rotate_and_cache(self, q: torch.Tensor, step: LatentStep, q_out: torch.Tensor) -> None:
        """All rows' rotary queries [T, H, P] to q_out, and their latents to the cache."""
        q_rot = q[..., self.k_b.shape[1] :]
        latent_to_cache(q_rot, step.compressed, step.norm, step.rotation, step.slots, q_out=q_out)

    def _attend_expanded(self, q: torch.Tensor, step: LatentStep, materialization: Materialization) -> torch.Tensor:
        """`attend` where some sequences, or all, have their keys expanded."""
        num_rows, num_heads = q.shape[:2]
        q_rot = q.new_empty(num_rows, num_heads, step.cache.shape[-1] - self.rank)
        self._rotate_and_cache(q, step, q_rot)
        out = q.new_empty(num_rows, num_heads, self.v_b.shape[2])
        for batch in materialization.batches:
            self._attend_batch(q, q_rot, step, batch, out)
        rest = materialization.rest
        if rest is not None:
            query = self._absorb_rows(q[rest], step)
            query[..., self.rank :] = q_rot[rest]
            out[rest] = self._values(self._attend_latents(query, step, rest))
        return out

    def _attend_batch(
        self, q: torch.Tensor, q_rot: torch.Tensor, step: LatentStep, batch: MaterializedBatch, out: torch.Tensor
    ) -> None:
        """The rows of a batch of sequences: some heads' keys and values at a time are expanded, then attended to."""
        assert step.workspace is not None, "an expansion comes with its workspace"
        num_positions, rank, v_dim = batch.num_positions, self.rank, self.v_b.shape[2]
        room, latents, slots = _Room(step.workspace), step.cache[:, 0], batch.slots
        if step.scales is None and isinstance(slots, slice):
            gathered = latents[slots]
        else:
            gathered = room.take(num_positions, latents.shape[1])
            if isinstance(slots, slice):
                slots = torch.arange(slots.start, slots.stop, device=latents.device)
            if step.scales is None:
                torch.index_select(latents, 0, slots, out=gathered)
            else:
                widen_latents(step.cache, step.scales, rank, slots, gathered)
        all_keys = room.take(batch.num_heads, num_positions, self.k_b.shape[1])
        all_values = room.take(batch.num_heads, num_positions, v_dim)
        for first in range(0, q.shape[1], batch.num_heads):
            heads = slice(first, min(first + batch.num_heads, q.shape[1]))
            k_b, v_b = self.k_b[heads], self.v_b[heads]
            keys, values = all_keys[: len(k_b)], all_values[: len(v_b)]
            latent = gathered[:, :rank].expand(len(k_b), -1, -1)
            torch.bmm(latent, k_b.transpose(1, 2), out=keys)
            torch.bmm(latent, v_b, out=values)
            queries, cached = (q[:, heads], q_rot[:, heads]), (keys, gathered[:, rank:], values)
            materialized_attention(queries, cached, batch.tiles, step.scale, out[:, heads], batch.tile)


class _Room:
    """Hands out a workspace piece by piece."""

    def __init__(self, workspace: torch.Tensor):
        self._workspace, self._taken = workspace, 0

    def take(self, *shape: int) -> torch.Tensor:
        """An uninitialized tensor of `shape`, its first value where nothing of another tensor shares a cache line."""
        numel = math.prod(shape)
        piece = self._workspace[self._taken : self._taken + numel]
        self._taken += -(-numel // WORKSPACE_ALIGN) * WORKSPACE_ALIGN
        return piece.view(shape)

"""Multi-head latent attention as part of a decoder layer, in one native call; see csrc/ops/attention/latent.h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ktransformers.kernels.cpu.base import check_tensor, check_weight
from ktransformers.kernels.cpu.kv import check_scales, kv_type
from ktransformers.kernels.cpu.layer import (
    CachedAttention,
    LayerKv,
    NativeMemory,
    Norm,
    Projection,
    native_bias,
    native_norm,
    native_weight,
)
from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import RawTensor

__all__ = ["LatentLayer", "LatentParts"]


@dataclass(frozen=True, slots=True)
class LatentParts:
    """Weights of latent attention with H heads, rank R, N and P dimensions without and with rotation, V of a value.

    q: [H (N + P), hidden], or of the compressed query's columns where q_a [Q, hidden] makes that and query_norm is its
    norm. kv_a: [R + P, hidden]; latent_norm: of its R columns; shared_norm: of the P others, or None. k_b: [H, R, N];
    v_b: [H, V, R]; o: [hidden, H V].
    """

    norm: Norm
    q: Projection
    kv_a: Projection
    o: Projection
    k_b: RawTensor
    v_b: RawTensor
    latent_norm: Norm
    shared_norm: Norm | None = None
    q_a: Projection | None = None
    query_norm: Norm | None = None


class LatentLayer(CachedAttention):
    """Latent attention of a decoder layer: x += o(v_b attention(k_b q, latents)) with q and latents made of norm(x);
    the cache keeps [latent, rotated key].

    rope_dim: P. scale: of scores. latent_scale: of latents, behind their norm. is_interleaved: neighbours are rotated
    together, else those P / 2 apart. Raises ValueError when shapes do not fit.
    """

    def __init__(
        self,
        parts: LatentParts,
        rope_dim: int,
        scale: float,
        latent_scale: float = 1.0,
        *,
        is_interleaved: bool,
        layer: int = -1,
    ):
        heads, rank, nope = parts.k_b.shape
        v_dim, hidden = parts.v_b.shape[1], parts.o.weight.shape[0]
        q_in = hidden if parts.q_a is None else parts.q_a.weight.shape[0]
        for name, shape, wanted in (
            ("q", parts.q.weight.shape, [heads * (nope + rope_dim), q_in]),
            ("q_a", [q_in, hidden] if parts.q_a is None else parts.q_a.weight.shape, [q_in, hidden]),
            ("kv_a", parts.kv_a.weight.shape, [rank + rope_dim, hidden]),
            ("o", parts.o.weight.shape, [hidden, heads * v_dim]),
            ("v_b", parts.v_b.shape, [heads, v_dim, rank]),
        ):
            if list(shape) != wanted:
                raise ValueError(f"{name} must have shape {wanted}, got {list(shape)}")
        if rope_dim % 2 or (parts.q_a is None) != (parts.query_norm is None):
            raise ValueError(
                f"{rope_dim} dimensions cannot be rotated in pairs, or q_a and its norm are not both there"
            )
        self.hidden_size, self.rotary_dims = hidden, rope_dim // 2
        self._kept: Any = parts
        self._cached_dim = rank + rope_dim
        compression = [] if parts.q_a is None else [native_weight(parts.q_a.weight)]
        self.block = extension.LatentBlock(
            [
                native_norm(parts.norm, hidden),
                native_norm(parts.query_norm, q_in),
                native_norm(parts.latent_norm, rank),
                native_norm(parts.shared_norm, rope_dim),
            ],
            [
                *(native_weight(part.weight) for part in (parts.q, parts.kv_a, parts.o)),
                _batched(parts.k_b),
                _batched(parts.v_b),
                *compression,
            ],
            [*(native_bias(part) for part in (parts.q, parts.kv_a, parts.o)), _bias_of(parts.q_a)],
            [heads, rank, nope, rope_dim, v_dim],
            float(scale),
            float(latent_scale),
            is_interleaved,
            layer,
        )

    @override
    def native_cache(self, cache: LayerKv) -> NativeMemory:
        """Keys are contiguous [slots, 1, R + P], values their first R columns."""
        keys, scales = cache.keys, cache.scales[0]
        check_tensor("keys", keys, (None, 1, self._cached_dim), keys.dtype)
        if cache.values.data_ptr() != keys.data_ptr():
            raise ValueError("values of latent attention must be columns of its keys")
        address = check_scales("scales of keys", scales, keys, 2)[0]
        if scales is not None:
            check_tensor("scales of keys", scales, (keys.shape[0], 1, 2))
        return kv_type("keys", keys), keys.data_ptr(), keys.data_ptr(), address, address, keys.shape[0], False


def _batched(weight: RawTensor) -> tuple[int, int, int, int, int]:
    """Matrices one below the other."""
    check_weight("weight", weight, 3)
    batch, rows, cols = weight.shape
    return (weight.data.data_ptr(), int(weight.qtype), 0, batch * rows, cols)


def _bias_of(part: Projection | None) -> int:
    return 0 if part is None else native_bias(part)

"""What an indexer makes of a step's rows: the projections and norms of its module, by the kind of indexer.

T rows, H index heads, D columns of one, P rotary columns. Knows modules; not caches or steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.operators.recognize.indexer import Granularity, IndexSpec
from ktransformers.operators.rotation import rotated_columns

__all__ = ["Angles", "IndexInputs", "make_inputs"]

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, [T, P / 2] each."""


@dataclass(frozen=True, slots=True)
class IndexInputs:
    """Inputs of a step's choice, before it is known where keys lie.

    x: the rows that they were made of, [1, T, hidden]. q: [T, H, D]. columns: [T, W], what each row leaves in the
    cache, and weights: fp32 [T, H], or None where heads choose apart. angles: of rows; q and keys of single positions
    and of blocks are yet to be rotated, queries of pools have been.
    """

    x: Tensor
    q: Tensor
    columns: Tensor
    weights: Tensor | None
    angles: Angles


def make_inputs(module: nn.Module, spec: IndexSpec, x: Tensor, query: Tensor | None, angles: Angles) -> IndexInputs:
    """Project rows x [1, T, hidden]. query: the compressed query [1, T, q_lora_rank], of latent attention."""
    if spec.granularity is Granularity.BLOCK:
        return _of_blocks(module, spec, x, angles)
    if spec.granularity is Granularity.POOL and not spec.is_gated:
        return _of_means(module, spec, x, angles)
    assert query is not None, "latent attention compresses queries"
    return _of_latent_attention(module, spec, x, query, angles)


def _of_latent_attention(module: Any, spec: IndexSpec, x: Tensor, query: Tensor, angles: Angles) -> IndexInputs:
    """Single positions, and pools with gates behind each key."""
    q = module.wq_b(query).view(-1, spec.num_heads, spec.head_dim)
    k = module.k_norm(module.wk(x))
    if spec.is_gated:
        k = torch.cat((k, nn.functional.linear(x, module.index_kpool_compress_gate)), dim=-1)
    weights = module.weights_proj(x)[0].float() * spec.head_scale
    q, k = spec.rotated_first(q), spec.rotated_first(k)
    return IndexInputs(x, q, k[0], weights.contiguous(), angles)


def _of_blocks(module: Any, spec: IndexSpec, x: Tensor, angles: Angles) -> IndexInputs:
    q = module.q_norm(module.q_proj(x).view(-1, spec.num_heads, spec.head_dim))
    k = module.k_norm(module.k_proj(x).view(-1, 1, spec.head_dim))
    return IndexInputs(x, q, k[:, 0], None, angles)


def _of_means(module: Any, spec: IndexSpec, x: Tensor, angles: Angles) -> IndexInputs:
    width = spec.num_heads * spec.head_dim
    q, k = module.index_qk_proj(x)[0].split((width, spec.head_dim), dim=-1)
    q = module.q_layernorm(q.reshape(-1, spec.num_heads, spec.head_dim))
    weights = torch.full((len(q), spec.num_heads), spec.head_scale, device=q.device)
    return IndexInputs(x, rotated_columns(q, *angles).contiguous(), k, weights, angles)

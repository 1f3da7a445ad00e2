"""Indexers of GLM-5.3 and Qwen4: they choose pools of neighbouring positions that attention sees.

    T rows, H index heads, D columns of one, M positions of a pool

    GLM-5.3   entry[w] = sum over positions j of pool w of softmax_j(gate[j] + bias[j - w M]) k[j], column by column
              score[t, w] = sum_h weights[t, h] max(q[t, h] . entry[w] / sqrt(D), 0)
    Qwen4     entry[w] = norm(mean of k[j]), rotated as the pool's first position; all heads weigh 1

A row sees the best pools of those that are whole where it stands, of equal scores the lower ones, and always what is
behind the last whole one. Where keys and entries lie, operators/attention/pools.py draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.attention_call import TopkCall
from ktransformers.kernels.triton.attention.pools import pooled, rows_to_cache
from ktransformers.kernels.triton.attention.topk_positions import select_topk_positions
from ktransformers.operators.attention.pools import PoolStep, in_order, pooled_by_gates
from ktransformers.operators.attention.rotation import rotated_columns
from ktransformers.operators.attention.sparse_indexer import SparseIndexer
from ktransformers.operators.attention.topk_positions import TopkPositions
from ktransformers.operators.base import OperatorConfig, OperatorRuntime, Placement
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import use
from ktransformers.operators.exact import NativeMathMode
from ktransformers.operators.recognize.pooled_indexer import recognize_pooled_indexer

__all__ = ["ChoiceMask", "KPooledIndexer"]


@dataclass(frozen=True, slots=True)
class ChoiceMask:
    """Takes the place of the mask that a module makes of its indexer's choice, and brings the choice to attention.

    topk_positions: None for all positions.
    """

    context: ForwardContext
    topk_positions: TopkPositions | None = None
    dtype: ClassVar[torch.dtype] = torch.bool

    def __and__(self, other: ChoiceMask) -> ChoiceMask:
        return other


class KPooledIndexer(SparseIndexer):
    """Chooses pools for the attention that it is a child of; its projections and norms are operators of their own."""

    OPS: ClassVar[dict[str, str]] = {
        "KPooledIndexerNative": "native scores and choice",
        "KPooledIndexerTriton": "Triton entries and scores, torch's choice",
    }

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        if not self.is_used:
            return
        spec = recognize_pooled_indexer(module)
        if spec is None:
            raise UnsupportedError(
                f"{key} ({type(module).__name__}) is no indexer that KPooledIndexer knows; --sparse_attention off runs "
                "the model without it, attending to all positions"
            )
        if spec.num_heads > cpu.MAX_INDEX_HEADS:
            raise UnsupportedError(f"{key} has {spec.num_heads} heads; up to {cpu.MAX_INDEX_HEADS} are supported")
        self.spec, self.index_dim, self.index_pool = spec, spec.cached_dim, spec.pool
        self._rotary: nn.Module | None = None

    @override
    def op(self, phase: Phase) -> str:
        return "KPooledIndexerTriton" if self.device.is_gpu else "KPooledIndexerNative"

    @override
    def bind(self, runtime: OperatorRuntime) -> None:
        """Take the model's rotary embedding, which gives the angles of the first positions of pools."""
        if self.is_used and not self.spec.is_gated:
            self._rotary = runtime.find(nn.Module)
            if self._rotary is None:
                raise UnsupportedError(f"{self.key}: the model has no module rotary_emb, which rotates its entries")

    @override
    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Any, *args: Any
    ) -> ChoiceMask:
        """Return the choice in the place of a mask in a module of grouped keys, see ChoiceMask."""
        if not isinstance(attention_mask, ChoiceMask):
            raise UnsupportedError(f"{self.key} chooses for a KAttention inside of the engine only")
        context = attention_mask.context
        if not self.is_used:
            return ChoiceMask(context)
        keys = context.cache.index_keys(int(self.inner.layer_idx))  # type: ignore[arg-type]
        half = position_embeddings[0].shape[-1] // 2
        cos, sin = (part[0, :, :half] for part in position_embeddings)
        return ChoiceMask(context, self.choose(hidden_states, None, (cos, sin), context.on(keys.device), keys))

    def choose(
        self,
        x: Tensor,
        query: Tensor | None,
        angles: tuple[Tensor, Tensor],
        context: ForwardContext,
        keys: Tensor,
    ) -> TopkPositions | None:
        """Choose what the rows attend to; None where all of them take all that they see.

        x: [1, T, hidden]. query: what queries are made of where that is not x, [1, T, q_lora_rank]. angles: cos and sin
        [T, P / 2]. context: on the device of keys [slots, index_dim], this layer's, to which what x leaves is written.
        """
        project = self._gated if self.spec.is_gated else self._plain
        if self.device.is_gpu:
            return self._choose_on_gpu(x, *project(x, query, angles), context, keys)
        spec, pool = self.spec, self.config.require_pool()
        with NativeMathMode(pool):
            q, columns, weights = project(x, query, angles)
            step = PoolStep.of(context, spec.pool)
            keys[context.slot_mapping] = columns
            last, slots = step.ended()
            if len(last):
                keys[context.slot_mapping[last], : spec.head_dim] = self._entries(x, keys[slots], context.kv_lens[last])
        if step.most <= spec.num_chosen:
            return None
        call = TopkCall(q, weights, keys[:, : spec.head_dim], step.pages, spec.scale, spec.num_chosen)
        return step.expanded(*cpu.select_topk_positions(call, pool))

    def _choose_on_gpu(
        self, x: Tensor, q: Tensor, columns: Tensor, weights: Tensor, context: ForwardContext, keys: Tensor
    ) -> TopkPositions | None:
        """How long sequences are, and which rows end pools, is known on the device alone: steps can be replayed."""
        use(keys.device)
        inner: Any = self.inner
        spec, slots, lens = self.spec, context.slot_mapping, context.kv_lens
        rows_to_cache(columns, keys, slots, lens)
        bias = inner.index_kpool_compress_ape if spec.is_gated else None
        entries = pooled(keys, bias, context.pages, spec.head_dim, spec.pool)
        if not spec.is_gated:
            entries = self._rotated(x, inner.k_layernorm(entries.to(x.dtype)), lens)
        rows_to_cache(entries, keys, slots, lens, every=spec.pool)
        step = PoolStep.of(context, spec.pool, is_replayed=True)
        if step.most <= spec.num_chosen:
            return None
        call = TopkCall(q.to(keys.dtype), weights, keys[:, : spec.head_dim], step.pages, spec.scale, spec.num_chosen)
        return step.expanded(*select_topk_positions(call))

    def _gated(self, x: Tensor, query: Tensor | None, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], what is cached [T, 2 D], weights [T, H]."""
        assert query is not None, "latent attention compresses queries"
        inner: Any = self.inner
        spec = self.spec
        q = inner.wq_b(query).view(-1, spec.num_heads, spec.head_dim)
        gates = nn.functional.linear(x, inner.index_kpool_compress_gate)
        columns = torch.cat((inner.k_norm(inner.wk(x)), gates), dim=-1)[0]
        weights = inner.weights_proj(x)[0].float() * spec.head_scale
        return q, columns, weights.contiguous()

    def _plain(self, x: Tensor, query: Tensor | None, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The same, with [T, D] to be cached."""
        inner: Any = self.inner
        spec = self.spec
        width = spec.num_heads * spec.head_dim
        q, k = inner.index_qk_proj(x)[0].split((width, spec.head_dim), dim=-1)
        q = inner.q_layernorm(q.reshape(-1, spec.num_heads, spec.head_dim))
        weights = torch.full((len(q), spec.num_heads), spec.head_scale, device=q.device)
        return rotated_columns(q, *angles).contiguous(), k, weights

    def _entries(self, x: Tensor, found: Tensor, kv_lens: Tensor) -> Tensor:
        """[N, D] of the rows [N, M, index_dim] that the cache has of pools; kv_lens: of the rows that end them."""
        inner: Any = self.inner
        dim = self.spec.head_dim
        if self.spec.is_gated:
            return pooled_by_gates(found[..., :dim], found[..., dim:], inner.index_kpool_compress_ape)
        return self._rotated(x, inner.k_layernorm(in_order(found) / self.spec.pool), kv_lens)

    def _rotated(self, x: Tensor, entries: Tensor, kv_lens: Tensor) -> Tensor:
        """Entries [N, D] rotated as the first positions of the pools that end at kv_lens [N]; of others, any way."""
        assert self._rotary is not None, f"{self.key} is not bound"
        cos, sin = self._rotary(x, (kv_lens.long() - self.spec.pool).clamp(min=0)[None])
        half = cos.shape[-1] // 2
        return rotated_columns(entries[:, None], cos[0, :, :half], sin[0, :, :half])[:, 0]

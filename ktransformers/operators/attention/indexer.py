"""Indexers of sparse attention: they choose the positions that attention sees, or blocks or pools of positions.

    T rows, H index heads, D columns of one, M positions of a block or a pool

    positions   score[t, j] = sum_h w[t, h] max(q[t, h] . k[j] / sqrt(D), 0)     w = weights_proj(x) / sqrt(H)
                                                                          DeepSeek-V3.2, GLM-5; for latent attention
    blocks      score[t, h, b] = max over positions j of block b of q[t, h] . k[j]
                                                                          MiniMax-M3; for each KV head
    pools       score[t, w] = sum_h w[t, h] max(q[t, h] . entry[w] / sqrt(D), 0)
      GLM-5.3     entry[w] = sum over positions j of pool w of softmax_j(gate[j] + bias[j - w M]) k[j], by column
      Qwen4       entry[w] = norm(mean of k[j]), rotated as the pool's first position; all heads weigh 1

The best are chosen, of equal scores the lower ones; the last blocks always, and what is behind the last whole pool.
Keys k, one for all heads, are cached beside the layer's; where entries lie, operators/attention/pools.py draws. What an
indexer makes of rows is in operators/attention/index_inputs.py.

The published code of DeepSeek turns q and k by a Hadamard matrix before it rounds them to FP8; that keeps dot products
and nothing is rounded here, so it is left out, as in transformers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.attention_call import RowPages, TopkCall
from ktransformers.kernels.triton.attention.pools import pooled, rows_to_cache
from ktransformers.kernels.triton.attention.rope import KvSlots, Rotation, rope_to_cache
from ktransformers.kernels.triton.attention.topk_positions import select_topk_positions
from ktransformers.operators.attention.index_inputs import Angles, IndexInputs, make_inputs
from ktransformers.operators.attention.pools import PoolStep, in_order, pool_starts, pooled_by_gates
from ktransformers.operators.attention.topk_positions import TopkPositions
from ktransformers.operators.base import OperatorConfig, OperatorRuntime, Placement, Requirements
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import use
from ktransformers.operators.exact import NativeMathMode
from ktransformers.operators.recognize.indexer import Granularity, recognize_indexer
from ktransformers.operators.rotation import rotated_columns
from ktransformers.operators.wrapper import WrapperOperator
from ktransformers.weights.source import WeightSource

__all__ = ["ChoiceMask", "KBlockIndexer", "KIndexer", "KPooledIndexer", "PendingChoice", "log_dense"]

logger = logging.getLogger(__name__)


@functools.cache
def log_dense() -> None:
    """Warn that the model attends to all positions: once, not for every layer."""
    logger.warning(
        "--sparse_attention off: the model attends to all positions, where it was trained to choose some; answers "
        "differ in sequences longer than what it chooses (index_topk in its config)"
    )


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


@dataclass(frozen=True, slots=True)
class PendingChoice:
    """Value that a module passes from its indexer to attention, which has the step's context and makes the choice."""

    indexer: KIndexer
    inputs: IndexInputs

    def choose(self, context: ForwardContext, layer_idx: int) -> TopkPositions | None:
        """Return what rows attend to, see `KIndexer.choose`. context: on the device of the cache."""
        return self.indexer.choose_among(self.inputs, context, context.cache.index_keys(layer_idx))


@dataclass(frozen=True, slots=True)
class _Scored:
    """What is scored: queries [T, H, D], and where the keys or entries lie that rows see.

    most: how many of them the longest sequence has, or may have in a step that is replayed. positions_of: makes the
    choice of positions of the slots and counts that were chosen.
    """

    q: Tensor
    pages: RowPages
    most: int
    positions_of: Callable[[Tensor, Tensor], TopkPositions] = TopkPositions


class KIndexer(WrapperOperator):
    """Chooses positions for the attention that it is a child of; its projections and norms are operators of their own.

    is_used: False with --sparse_attention off, which reads none of its tensors. index_dim: of its keys in the cache.
    index_pool: positions that it chooses together, which have to lie in one page of the cache.
    """

    GRANULARITY: ClassVar[Granularity] = Granularity.POSITION
    OPS: ClassVar[dict[str, str]] = {
        "KIndexerNative": "native scores and choice",
        "KIndexerTriton": "Triton scores, torch's choice",
    }

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        self.is_used = config.sparse_attention != "off"
        self.index_dim, self.index_pool = 0, 1
        self._rotary: nn.Module | None = None  # of the model, once bound, where entries are rotated
        if not self.is_used:
            log_dense()
            return
        spec = recognize_indexer(module, self.GRANULARITY)
        if spec is None:
            raise UnsupportedError(
                f"{key} ({type(module).__name__}) is no indexer that {type(self).__name__} knows; --sparse_attention "
                "off runs the model without it, attending to all positions"
            )
        if spec.num_heads > cpu.MAX_INDEX_HEADS:
            raise UnsupportedError(f"{key} has {spec.num_heads} heads; up to {cpu.MAX_INDEX_HEADS} are supported")
        if self.device.is_gpu and spec.rotary_dim == spec.head_dim:
            raise UnsupportedError(
                f"{key} rotates all of its columns, which is not supported on a GPU; place it on cpu"
            )
        self.spec, self.index_dim = spec, spec.cached_dim
        if self._has_pools:
            self.index_pool = spec.size

    @property
    def _has_pools(self) -> bool:
        return self.GRANULARITY is Granularity.POOL

    @override
    def op(self, phase: Phase) -> str:
        native, triton = self.OPS
        return triton if self.device.is_gpu else native

    @override
    def bypassed(self) -> Iterable[nn.Module]:
        return (self.inner,)

    @override
    def owned_children(self) -> frozenset[str]:
        return frozenset() if self.is_used else frozenset(name for name, _ in self.inner.named_children())

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        """Require nothing but the stored names of its tensors when the indexer is not used."""
        if self.is_used:
            return super().requirements(source)
        needs = Requirements()
        for name, _ in self.inner.named_parameters():
            info = source.find(f"{self.key}.{name}")
            needs.stored_names.update(() if info is None else info.stored_names)
        return needs

    @override
    def load(self, source: WeightSource) -> None:
        if self.is_used:
            super().load(source)
            return
        for name in self.inner._parameters:  # its own, which would be missed
            self.inner._parameters[name] = None

    @override
    def bind(self, runtime: OperatorRuntime) -> None:
        """Take the model's rotary embedding, which gives the angles of the first positions of pools."""
        if self.is_used and self._has_pools and not self.spec.is_gated:
            self._rotary = runtime.find(nn.Module)
            if self._rotary is None:
                raise UnsupportedError(f"{self.key}: the model has no module rotary_emb, which rotates its entries")

    @override
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: object = None,
        *args: object,
        **kwargs: object,
    ) -> ChoiceMask | PendingChoice | None:
        """Return the choice as modules of grouped keys pass it to attention: in the place of their mask, see
        ChoiceMask, or as block_indices, where None is for all positions. Latent attention calls `choose`.
        """
        if self.GRANULARITY is Granularity.BLOCK:
            return PendingChoice(self, self._inputs(hidden_states, position_embeddings)) if self.is_used else None
        if not isinstance(attention_mask, ChoiceMask):
            raise UnsupportedError(f"{self.key} chooses for a KAttention inside of the engine only")
        context = attention_mask.context
        if not self.is_used:
            return ChoiceMask(context)
        keys = context.cache.index_keys(int(self.inner.layer_idx))  # type: ignore[arg-type]
        with self._exact():
            inputs = self._inputs(hidden_states, position_embeddings)
        return ChoiceMask(context, self.choose_among(inputs, context.on(keys.device), keys))

    def _inputs(self, x: Tensor, embeddings: tuple[Tensor, Tensor]) -> IndexInputs:
        """embeddings: cosines and sines [1, T, P], each twice side by side."""
        half = min(embeddings[0].shape[-1], self.spec.head_dim) // 2
        cos, sin = (part[0, :, :half] for part in embeddings)
        return make_inputs(self.inner, self.spec, x, None, (cos, sin))

    def choose(
        self, x: Tensor, query: Tensor, angles: Angles, context: ForwardContext, keys: Tensor
    ) -> TopkPositions | None:
        """Choose what the rows attend to; None where all of them see so few positions that they take them all.

        x: [1, T, hidden]. query: the compressed query, [1, T, q_lora_rank]. angles: cos and sin [T, P / 2]. context: on
        the device of keys [slots, index_dim], this layer's, to which what x leaves is written.
        """
        with self._exact():
            inputs = make_inputs(self.inner, self.spec, x, query, angles)
        return self.choose_among(inputs, context, keys)

    def choose_among(self, inputs: IndexInputs, context: ForwardContext, keys: Tensor) -> TopkPositions | None:
        """Write what rows leave to the cache, then choose, as `choose`."""
        spec = self.spec
        if self.device.is_gpu:
            use(keys.device)
        with self._exact():
            scored = (self._with_pools if self._has_pools else self._with_keys)(inputs, context, keys)
        if scored.most <= spec.num_chosen * spec.block:
            return None
        call = TopkCall(
            scored.q,
            inputs.weights,
            keys[:, : spec.head_dim],
            scored.pages,
            spec.scale,
            spec.num_chosen,
            block=spec.block,
            num_local=spec.num_local,
        )
        if self.device.is_gpu:
            return scored.positions_of(*select_topk_positions(call))
        return scored.positions_of(*cpu.select_topk_positions(call, self.config.require_pool()))

    def _exact(self) -> AbstractContextManager[object]:
        """On the CPU, entries of pools are made the same whatever they are computed beside."""
        is_native = self._has_pools and not self.device.is_gpu
        return NativeMathMode(self.config.require_pool()) if is_native else nullcontext()

    def _with_keys(self, inputs: IndexInputs, context: ForwardContext, keys: Tensor) -> _Scored:
        """Rotate queries and keys, and cache the keys."""
        spec, angles, lens = self.spec, inputs.angles, context.kv_lens
        q, k, cache = inputs.q, inputs.columns[:, None], keys[:, None]
        if not self.device.is_gpu:
            q, k = (rotated_columns(part, *angles, is_interleaved=spec.is_interleaved) for part in (q, k))
            keys[context.slot_mapping] = k[:, 0]
            return _Scored(q.contiguous(), context.pages, int(lens.max()) if len(q) else 0)
        # How long sequences are is known on the device alone, so that steps can be replayed.
        rotary = spec.rotary_dim or 2 * angles[0].shape[-1]
        if rotary == spec.head_dim:
            raise UnsupportedError(
                "an indexer that rotates all of its columns is not supported on a GPU; place it on cpu"
            )
        # What is not rotated goes to the cache as "values", which it would anyway: the kernel wants some.
        q = rope_to_cache(
            (q, k, k[..., rotary:]),
            Rotation(*angles, spec.is_interleaved, rotary_dim=rotary),
            KvSlots(cache, cache[..., rotary:], context.slot_mapping),
            q_out=torch.empty(q.shape, dtype=keys.dtype, device=keys.device),
        )
        pages = context.pages
        return _Scored(q, pages, pages.room)

    def _with_pools(self, inputs: IndexInputs, context: ForwardContext, keys: Tensor) -> _Scored:
        """Cache what rows leave, then the entries of the pools that they end."""
        spec, slots, lens = self.spec, context.slot_mapping, context.kv_lens
        if self.device.is_gpu:  # which rows end pools is known on the device alone
            rows_to_cache(inputs.columns, keys, slots, lens)
            rows_to_cache(self._pooled_on_gpu(inputs, context, keys), keys, slots, lens, every=spec.size)
            step = PoolStep.of(context, spec.size, is_replayed=True)
        else:
            step = PoolStep.of(context, spec.size)
            keys[slots] = inputs.columns
            last, found = step.ended()
            if len(last):
                starts = pool_starts(context, spec.size)[..., last]
                keys[slots[last], : spec.head_dim] = self._entries(inputs, keys[found], starts)
        return _Scored(inputs.q.to(keys.dtype), step.pages, step.most, step.expanded)

    def _pooled_on_gpu(self, inputs: IndexInputs, context: ForwardContext, keys: Tensor) -> Tensor:
        """Entries [T, D] of the pools that rows end; of others, any."""
        inner: Any = self.inner
        spec = self.spec
        bias = inner.index_kpool_compress_ape if spec.is_gated else None
        entries = pooled(keys, bias, context.pages, spec.head_dim, spec.size)
        if spec.is_gated:
            return entries

        def angles(_: Tensor) -> Angles:
            return self._angles(inputs, pool_starts(context, spec.size))

        made = context.derived(f"angles of pools of {spec.size}", context.kv_lens, angles)
        return rotated_columns(inner.k_layernorm(entries.to(inputs.x.dtype))[:, None], *made)[:, 0]

    def _entries(self, inputs: IndexInputs, found: Tensor, starts: Tensor) -> Tensor:
        """[N, D] of the rows [N, M, index_dim] that the cache has of pools; starts: see `pool_starts`, of these."""
        inner: Any = self.inner
        dim = self.spec.head_dim
        if self.spec.is_gated:
            return pooled_by_gates(found[..., :dim], found[..., dim:], inner.index_kpool_compress_ape)
        entries = inner.k_layernorm(in_order(found) / self.spec.size)
        return rotated_columns(entries[:, None], *self._angles(inputs, starts))[:, 0]

    def _angles(self, inputs: IndexInputs, starts: Tensor) -> Angles:
        """By rotary positions [N], or [3, N]."""
        assert self._rotary is not None, f"{self.key} is not bound"
        cos, sin = self._rotary(inputs.x, starts[None] if starts.dim() == 1 else starts[:, None])
        half = cos.shape[-1] // 2
        return cos[0, :, :half], sin[0, :, :half]


class KBlockIndexer(KIndexer):
    """Chooses blocks of positions for each KV head."""

    GRANULARITY: ClassVar[Granularity] = Granularity.BLOCK
    OPS: ClassVar[dict[str, str]] = {
        "KBlockIndexerNative": "native scores and choice",
        "KBlockIndexerTriton": "Triton scores, torch's choice",
    }


class KPooledIndexer(KIndexer):
    """Chooses pools of positions, each of which it scores as one."""

    GRANULARITY: ClassVar[Granularity] = Granularity.POOL
    OPS: ClassVar[dict[str, str]] = {
        "KPooledIndexerNative": "native scores and choice",
        "KPooledIndexerTriton": "Triton entries and scores, torch's choice",
    }

"""Attention over a window and over entries that layers share (DeepSeek-V4.1).

    D head_dim, M tokens of an entry (compress_rate, 1 or 2), I columns of an indexer's key

    latent[w]  = norm(sum_j softmax_j(Z_j) C_j) over the tokens j = w M .. w M + M - 1; M = 1: norm(C_w), without gates
    entry[w]   = latent[w], rotated as token w M;  key[w] = norm(k_proj(latent[w])), rotated likewise
    row at p   sees the tokens p - W + 1 .. p of its own layer, and of the entries w < (p + 1) / M the best ones

A source makes entries and keys, which layers behind it read from its cache up to the next source. Some layers choose
(score = sum_h w_h max(q_h . key, 0), as in DeepSeek-V4), the others take the last choice; one of them keeps its best
blocks of entries, and later ones choose inside of these. Rows of the cache, all of one width where they are needed:

    | key D | entry D | C, Z of tokens, where M > 1 | key I of the entry | what other modules of the layer keep |

An entry lies with the last token of its own, so that pages are shared, kept and moved like any other's.

The published code rounds what it caches (keys to FP8, entries and indexers' keys to FP4) and the inputs of FP8 and FP4
products. Nothing is rounded here, as with DeepSeek-V4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.attention_call import AttentionCall, TopkCall
from ktransformers.operators.attention.compressed import KCompressedAttention, StepRows, turned
from ktransformers.operators.attention.pools import PoolStep, pooled_by_gates
from ktransformers.operators.attention.shared_entries import SharedEntries, Windows
from ktransformers.operators.attention.topk_positions import TopkPositions
from ktransformers.operators.context import ForwardContext

if TYPE_CHECKING:
    from ktransformers.models.deepseek_v41.modeling import DeepseekV41Attention, DeepseekV41Indexer

__all__ = ["KSharedCompressedAttention"]

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, [T, P / 2] each."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where the parts of a source's rows of the cache lie."""

    entry: slice
    parts: slice  # C and Z
    index: slice

    @classmethod
    def of(cls, head_dim: int, rate: int, index_dim: int) -> _Columns:
        parts = 2 * head_dim if rate > 1 else 0
        first = 2 * head_dim + parts
        return cls(slice(head_dim, 2 * head_dim), slice(2 * head_dim, first), slice(first, first + index_dim))


class KSharedCompressedAttention(KCompressedAttention):
    """Attention of the DeepSeek-V4.1 family: [1, T, hidden] and what the layer before handed on in, the like out."""

    OPS: ClassVar[dict[str, str]] = {
        "KSharedCompressedNative": "native attention over a window and entries that layers share"
    }
    NEEDED: ClassVar[tuple[str, ...]] = (
        *("q_a_proj", "kv_norm", "o_a_proj", "o_b_proj", "sinks", "sliding_window"),
        *("compressor", "indexer", "kv_source", "compress_rate", "has_candidates", "num_kept"),
    )

    @property
    def _module(self) -> DeepseekV41Attention:
        return cast("DeepseekV41Attention", self.inner)

    @property
    def _chooser(self) -> DeepseekV41Indexer:
        """The module's indexer, of a layer that has one."""
        indexer = self._module.indexer
        assert indexer is not None, f"{self.key} chooses no entries"
        return indexer

    @override
    def _take_parts(self) -> int:
        inner = self._module
        if self.device.is_gpu:
            raise UnsupportedError(
                f"{self.key}: attention over entries that layers share runs on the CPU; place it there"
            )
        self._source, self._rate = inner.kv_source, inner.compress_rate
        width = self.head_dim if inner.compressor is None else self._columns().index.stop
        return width + inner.num_kept

    @override
    def op(self, phase: Phase) -> str:
        return "KSharedCompressedNative"

    @override
    def bypassed(self) -> Iterable[nn.Module]:
        inner = self._module
        return (inner, *(part for part in (inner.o_a_proj, inner.compressor, inner.indexer) if part is not None))

    @override
    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        shared: SharedEntries | None = None,
        position_embeddings: Mapping[str, Angles] | None = None,
        forward_context: ForwardContext | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, SharedEntries | None]:
        if forward_context is None:
            raise UnsupportedError("attention over shared entries runs inside the engine only: it needs a context")
        assert self._o_a is not None, f"{self.key} is not loaded"
        assert position_embeddings is not None, "the model has made angles"
        inner = self._module
        rows, pool = StepRows.of(forward_context), self.config.require_pool()
        cos, sin = (part[0] for part in position_embeddings[inner.rope_layer_type])
        cached = forward_context.cache.layer(self.layer_idx)[0][:, 0]
        residual = inner.q_a_norm(inner.q_a_proj(hidden_states))
        query = turned(inner.q_b_proj(residual).view(-1, self.num_heads, self.head_dim), cos, sin)
        key = inner.kv_norm(inner.kv_proj(hidden_states))[0]
        cached[forward_context.slot_mapping, : self.head_dim] = turned(key[:, None], cos, sin)[:, 0]
        if inner.compressor is not None:
            with self._exact():
                self._compress(rows, hidden_states, cached)
        if inner.indexer is not None:
            shared = self._choose(rows, hidden_states, residual, (cos, sin), shared)
        seen = shared if self._source is not None else self._without_entries(forward_context, cached)
        assert seen is not None, f"{self.key} is behind a layer that chooses entries"
        keys = seen.with_window(cached[:, : self.head_dim])
        sinks = inner.sinks.detach()
        call = AttentionCall(query.contiguous(), keys, keys, seen.table.pages, inner.scaling, sinks=sinks)
        out = turned(cpu.attention(call, pool), cos, -sin)
        merged = cpu.batched_linear(out.view(-1, self._o_a_shape[0], self._o_a_shape[2]), self._o_a, pool)
        return inner.o_b_proj(merged.view(1, len(merged), -1)), shared

    def _without_entries(self, context: ForwardContext, cached: Tensor) -> SharedEntries:
        windows = Windows.of(context, self.window)
        keys = cached[:, : self.head_dim]
        return SharedEntries.of(keys, None, None, windows, None)

    def _columns(self) -> _Columns:
        return _Columns.of(self.head_dim, self._rate, self._chooser.head_dim)

    def _compress(self, rows: StepRows, hidden_states: Tensor, cached: Tensor) -> None:
        """Write the entries that end with rows of this step, and their keys."""
        compressor, indexer, columns = self._module.compressor, self._chooser, self._columns()
        assert compressor is not None, f"{self.key} makes no entries"
        slots, last = rows.context.slot_mapping, torch.arange(len(rows.positions))
        projected = compressor.kv_proj(hidden_states)[0]
        if compressor.gate_proj is not None:
            cached[slots, columns.parts] = torch.cat((projected, compressor.gate_proj(hidden_states)[0]), dim=-1)
            last = ((rows.positions + 1) % self._rate == 0).nonzero()[:, 0]
            if not len(last):
                return
        start = rows.positions[last] + 1 - self._rate
        if self._rate > 1:
            found = cached[rows.slots(start[:, None] + torch.arange(self._rate), last), columns.parts]
            values, gates = found.view(len(last), self._rate, 2, self.head_dim).unbind(2)
            projected = pooled_by_gates(values, gates, torch.zeros(()))
        latent = compressor.kv_norm(projected)
        cos, sin = (
            part[0]
            for part in compressor.rotary_emb(latent, position_ids=start[None], layer_type=self._module.rope_layer_type)
        )
        keys = indexer.k_norm(indexer.k_proj(latent))
        cached[slots[last], columns.entry] = turned(latent.clone()[:, None], cos, sin)[:, 0]
        cached[slots[last], columns.index] = turned(keys[:, None], cos, sin)[:, 0]

    def _choose(
        self, rows: StepRows, hidden_states: Tensor, residual: Tensor, angles: Angles, shared: SharedEntries | None
    ) -> SharedEntries:
        """Choose entries for this layer and those behind it."""
        indexer = self._chooser
        assert self._source is not None, "a layer that chooses entries reads some"
        context, columns = rows.context, self._columns()
        cached = context.cache.layer(self._source)[0][:, 0]
        windows, step = Windows.of(context, self.window), PoolStep.of(context, self._rate)
        entries = cached[:, columns.entry]
        if not step.most:
            return SharedEntries.of(entries, None, None, windows, None)
        query = turned(indexer.q_b_proj(residual).view(-1, indexer.num_heads, indexer.head_dim), *angles).contiguous()
        weights = (indexer.weights_proj(hidden_states)[0] * indexer.num_heads**-0.5).contiguous()
        inside = shared.candidates if shared is not None and self._module.has_candidates else None
        pages, most = (step.pages, step.most) if inside is None else (inside.pages, inside.slots.shape[1])
        num_chosen = min(indexer.index_topk, most)
        call = TopkCall(query, weights, cached[:, columns.index], pages, indexer.head_dim**-0.5, num_chosen)
        chosen = self._best(call)
        candidates = None if shared is None else shared.candidates
        if indexer.num_blocks:
            candidates = self._candidates(call, step, indexer.num_blocks, indexer.block_size)
        return SharedEntries.of(entries, step, chosen, windows, candidates)

    def _candidates(self, call: TopkCall, step: PoolStep, num_blocks: int, size: int) -> TopkPositions | None:
        """The best blocks of entries, the last one always; None where rows see no more than so many."""
        if -(-step.most // size) <= num_blocks:
            return None
        blocks = TopkCall(call.q, call.weights, call.k_cache, step.pages, call.scale, num_blocks, size, num_local=1)
        return self._best(blocks)

    def _best(self, call: TopkCall) -> TopkPositions:
        return TopkPositions(*cpu.select_topk_positions(call, self.config.require_pool()))

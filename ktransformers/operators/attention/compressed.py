"""Attention over a window and over compressed keys (DeepSeek-V4): a token sees the last ones as they are, the others
as entries, each made of a few neighbours.

    D head_dim (one head of keys, which are the values too), W sliding_window, M tokens of an entry (compress_rate)

    entry[w]   = norm(sum_j softmax_j(Z_j + bias_j) C_j) over the tokens j of window w = tokens w M .. w M + M - 1;
                 C, Z = projections of their hidden states; with overlap of two series, those of window w - 1 too
    row at p   sees the tokens p - W + 1 .. p, and the entries w < (p + 1) / M: all of them, or those that an indexer
               chooses, which scores entries of its own

What a token leaves behind is one row of the cache, so that pages are shared, kept and moved like any other's; an entry
lies with the last token of its window:

    | key D | entry D | C, Z of the compressor | entry, C, Z of the indexer | unused, to a multiple of D
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.attention_call import AttentionCall, RowPages, TopkCall
from ktransformers.kernels.types import RawTensor
from ktransformers.operators.attention.compressed_gpu import CompressedSpec, GpuCompressed, Series
from ktransformers.operators.attention.topk_positions import TopkPositions
from ktransformers.operators.base import (
    OperatorConfig,
    OperatorRuntime,
    Placement,
    Requirements,
    expect_shape,
    layer_number,
)
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.exact import NativeMathMode
from ktransformers.operators.linear.matrix import dense_tensor
from ktransformers.operators.recognize.norm import recognize_weightless_norm
from ktransformers.operators.rotation import rotate
from ktransformers.operators.wrapper import DenseState, WrapperOperator
from ktransformers.weights.source import WeightSource

__all__ = ["KCompressedAttention", "StepRows", "turned"]

_MAX_INDEX = (1 << 31) - 1


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of the last columns of fp32 x [N, heads, D] by angles [N, P / 2], in place, and return x."""
    pairs = x[..., -2 * cos.shape[-1] :]
    pairs.copy_(rotate(pairs, cos, sin, is_interleaved=True, keeps_places=True))
    return x


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, and where the cache has any position of their sequences. p: their positions, int64 [T]."""

    context: ForwardContext
    positions: torch.Tensor
    seq_ids: torch.Tensor

    @classmethod
    def of(cls, context: ForwardContext) -> StepRows:
        """Return the rows of a step."""
        return cls(context, context.kv_lens.long() - 1, context.seq_ids.long())

    def slots(self, positions: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Cache slots of positions [N, ...] of the sequences of rows [N], or of all rows."""
        seqs = self.seq_ids if rows is None else self.seq_ids[rows]
        page_size = self.context.page_size
        pages = self.context.block_table.long()[seqs.view(-1, *[1] * (positions.dim() - 1)), positions // page_size]
        return pages * page_size + positions % page_size

    def sequences(self) -> Iterator[torch.Tensor]:
        """The rows of each sequence."""
        for seq in sorted(set(self.seq_ids.tolist())):
            yield (self.seq_ids == seq).nonzero()[:, 0]


@dataclass(frozen=True, slots=True)
class _Compression:
    """One compressor: its module, how many tokens an entry has, and its columns of the cache's rows.

    dim: of an entry. series: 2 where entries overlap, and the projections have columns for the next window, then for
    their own.
    """

    module: Any
    rate: int
    dim: int
    series: int
    entry: int
    values: int

    @classmethod
    def of(cls, module: Any, entry: int, values: int) -> _Compression:
        """entry, values: the first columns of entries, and of C and Z."""
        rate, width = module.position_bias.shape
        dim = int(module.head_dim)
        return cls(module, int(rate), dim, width // dim, entry, values)

    @property
    def width(self) -> int:
        """Columns of C and Z."""
        return 2 * self.series * self.dim

    def update(self, rows: StepRows, hidden_states: torch.Tensor, cached: torch.Tensor) -> None:
        """Write C and Z of all rows [1, T, hidden], then the entries of windows that end in this step."""
        columns = torch.cat((self.module.kv_proj(hidden_states)[0], self.module.gate_proj(hidden_states)[0]), dim=-1)
        cached[rows.context.slot_mapping, self.values : self.values + self.width] = columns
        last = ((rows.positions + 1) % self.rate == 0).nonzero()[:, 0]
        if not len(last):
            return
        start = rows.positions[last] + 1 - self.rate
        entries = self.module.kv_norm(self._pooled(rows, last, start, cached))
        angles = self.module.rotary_emb(entries, position_ids=start[None], layer_type=self.module.rope_layer_type)
        entries = turned(entries[:, None], *(part[0] for part in angles))[:, 0]
        cached[rows.context.slot_mapping[last], self.entry : self.entry + self.dim] = entries

    def _pooled(self, rows: StepRows, last: torch.Tensor, start: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each window, [N, D]; added up token by token, whatever else is computed beside it."""
        back = (self.series - 1) * self.rate
        positions = start[:, None] - back + torch.arange(back + self.rate)
        found = cached[rows.slots(positions.clamp(min=0), last), self.values : self.values + self.width]
        values, gates = found.view(*positions.shape, 2, self.series, self.dim).unbind(2)  # [N, tokens, series, D]
        gates = gates + self.module.position_bias.view(self.rate, self.series, self.dim).repeat(self.series, 1, 1)
        series = torch.arange(back + self.rate) // self.rate  # tokens before the window give their first series
        at = torch.arange(back + self.rate)
        values, gates = values[:, at, series], gates[:, at, series]
        gates = gates.masked_fill((positions < 0)[..., None], float("-inf"))
        weights = torch.exp(gates - gates.amax(dim=1, keepdim=True))
        total, pooled = torch.zeros_like(weights[:, 0]), torch.zeros_like(weights[:, 0])
        for j in range(back + self.rate):
            total = total + weights[:, j]
        for j in range(back + self.rate):
            pooled = pooled + values[:, j] * (weights[:, j] / total)
        return pooled


class KCompressedAttention(WrapperOperator):
    """Attention of the DeepSeek-V4 family, with compressed keys or a window alone: [1, T, hidden] in and out.

    window: positions that a row sees as they are.
    """

    OPS: ClassVar[dict[str, str]] = {
        "KCompressedNative": "native attention over a window and compressed entries",
        "KCompressedTriton": "Triton attention over a window and compressed entries",
    }
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"o_a_proj"})  # a linear layer for each group of heads

    NEEDED: ClassVar[tuple[str, ...]] = (
        *("q_a_proj", "q_b_norm", "kv_norm", "o_a_proj", "o_b_proj", "sinks", "sliding_window", "compressor"),
    )

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        missing = [name for name in self.NEEDED if not hasattr(module, name)]
        if missing:
            raise UnsupportedError(
                f"{type(self).__name__} cannot replace {key} ({type(module).__name__}): no {missing[0]}"
            )
        numbers = (int(getattr(module, name)) for name in ("layer_idx", "sliding_window", "num_heads", "head_dim"))
        self.layer_idx, self.window, self.num_heads, self.head_dim = numbers
        self.layer = layer_number(module)
        self._o_a: RawTensor | None = None  # [groups, R, columns of a group]
        self._biases: list[torch.Tensor] = []  # of positions in a window, fp32 on a GPU
        self._gpu: GpuCompressed | None = None
        self._compressor: _Compression | None = None
        self._indexer: _Compression | None = None
        self._head_eps: float | None = None
        self._epsilons: tuple[float, float] | None = None
        self.cached_dim = self._take_parts()

    def _take_parts(self) -> int:
        """Look at the parts of the module; return the columns of the cache's rows."""
        inner: Any = self.inner
        width = self.head_dim
        if inner.compressor is not None:
            self._compressor = _Compression.of(inner.compressor, width, 2 * self.head_dim)
            width = 2 * self.head_dim + self._compressor.width
            indexer = getattr(inner.compressor, "indexer", None)
            if indexer is not None:
                self._indexer = _Compression.of(indexer, width, width + int(indexer.head_dim))
                width = self._indexer.values + self._indexer.width
        self._head_eps = recognize_weightless_norm(inner.q_b_norm)
        self._epsilons = CompressedSpec.check(self.key, inner, self.head_dim) if self.device.is_gpu else None
        return -(-width // self.head_dim) * self.head_dim

    @override
    def op(self, phase: Phase) -> str:
        return "KCompressedTriton" if self.device.is_gpu else "KCompressedNative"

    @override
    def state(self) -> DenseState:
        return DenseState(self.inner, self.key, self.device, torch.float32)  # sinks

    @override
    def bypassed(self) -> Iterable[nn.Module]:
        return (self.inner, self.inner.get_submodule("o_a_proj"), *(each.module for each in self._compressions))

    @property
    def _compressions(self) -> list[_Compression]:
        return [each for each in (self._compressor, self._indexer) if each is not None]

    @property
    def _o_a_shape(self) -> tuple[int, int, int]:
        module: Any = self.inner.o_a_proj
        return int(module.n_groups), int(module.out_features) // int(module.n_groups), int(module.in_features)

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        needs, name = super().requirements(source), f"{self.key}.o_a_proj.weight"
        groups, rank, cols = self._o_a_shape
        info = expect_shape(source.find(name), name, (groups * rank, cols))
        if not self.device.is_gpu:
            needs.add("cpu", info)
            return needs
        needs.add(self.device.name, info, math.prod(info.shape) * self.device.dtype.itemsize)
        needs.nbytes[self.device.name] += sum(4 * each.rate * each.series * each.dim for each in self._compressions)
        return needs

    @override
    def load(self, source: WeightSource) -> None:
        super().load(source)
        stored = source.tensor(f"{self.key}.o_a_proj.weight")
        o_a = RawTensor(stored.data, stored.qtype, self._o_a_shape)
        self._o_a = o_a if self.device.is_gpu else self.kept(o_a)
        if self.device.is_gpu:  # the compressors' own have the device's type, which rounds
            names = [f"{self.key}.{name}.position_bias" for name in ("compressor", "compressor.indexer")]
            self._biases = [
                self.device.move(source.dense(name).float()) for name, _ in zip(names, self._compressions, strict=False)
            ]

    @override
    def bind(self, runtime: OperatorRuntime) -> None:
        if self._epsilons is None:
            return
        assert self._o_a is not None, f"{self.key} is not loaded"
        series = [Series(each.module, each.rate, each.series, each.entry, each.values) for each in self._compressions]
        compressor, indexer = (*series, None, None)[:2]
        units = self.cached_dim // self.head_dim
        spec = CompressedSpec(self.window, self.num_heads, self.head_dim, units, *self._epsilons, compressor, indexer)
        weight = dense_tensor(self._o_a, self.device, self.config.require_pool()).transpose(1, 2).contiguous()
        self._o_a = None
        self._gpu = GpuCompressed(self.inner, self.key, spec, weight, self._biases, self.device, runtime.max_len)

    @override
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        forward_context: ForwardContext | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if forward_context is None or attention_mask is not None:
            raise UnsupportedError(
                "compressed attention runs inside the engine only: it needs forward_context, no mask"
            )
        if self._gpu is not None:
            return self._forward_on_gpu(self._gpu, hidden_states, position_embeddings, forward_context)
        assert self._o_a is not None, f"{self.key} is not loaded"
        inner: Any = self.inner
        pool = self.config.require_pool()
        cos, sin = (part[0] for part in position_embeddings[inner.rope_layer_type])
        rows = StepRows.of(forward_context)
        keys, _ = forward_context.cache.layer(self.layer_idx)
        residual = inner.q_a_norm(inner.q_a_proj(hidden_states))
        query = self._head_norm(inner.q_b_proj(residual).view(-1, self.head_dim))
        query = query.view(-1, self.num_heads, self.head_dim)
        self._keep_keys(hidden_states, (cos, sin), keys, forward_context)
        entries, num_entries = self._entries(rows, hidden_states, residual, keys[:, 0], (cos, sin))
        out = self._attend(rows, turned(query, cos, sin), keys, entries, num_entries)
        out = turned(out, cos, -sin)
        merged = cpu.batched_linear(out.view(-1, self._o_a_shape[0], self._o_a_shape[2]), self._o_a, pool)
        return inner.o_b_proj(merged.view(1, len(merged), -1)), None

    def keep_keys(
        self, hidden_states: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], context: ForwardContext
    ) -> None:
        """Write the keys of rows [1, T, hidden] and nothing else, of a layer with a window alone: for a drafter whose
        keys are made of its target's hidden states. angles: cos and sin [T, P / 2]."""
        assert not self._compressions, f"{self.key} has compressed keys"
        keys, _ = context.cache.layer(self.layer_idx)
        if self._gpu is None:
            self._keep_keys(hidden_states, angles, keys, context)
        else:
            self._check_slots(len(keys))
            self._gpu.keep_keys(self.device.to_device(hidden_states)[0], angles, context.on(keys.device), keys)

    def _keep_keys(
        self,
        hidden_states: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        context: ForwardContext,
    ) -> None:
        inner = self.inner
        key: torch.Tensor = inner.get_submodule("kv_norm")(inner.get_submodule("kv_proj")(hidden_states))[0]
        keys[context.slot_mapping, 0, : self.head_dim] = turned(key[:, None], *angles)[:, 0]

    def _forward_on_gpu(
        self, gpu: GpuCompressed, hidden_states: torch.Tensor, position_embeddings: Any, context: ForwardContext
    ) -> tuple[torch.Tensor, None]:
        inner: Any = self.inner
        keys, _ = context.cache.layer(self.layer_idx)
        self._check_slots(len(keys))
        self.device.time_part("linear", self.layer)
        cos, sin = (part[0] for part in position_embeddings[inner.rope_layer_type])
        merged = gpu(self.device.to_device(hidden_states)[0], (cos, sin), context.on(keys.device), keys)
        return inner.o_b_proj(merged), None

    def _check_slots(self, num_slots: int) -> None:
        """Raises UnsupportedError where 32 bits do not number the parts of a cache."""
        if num_slots * (self.cached_dim // self.head_dim) > _MAX_INDEX:
            raise UnsupportedError(f"a cache of {num_slots} tokens is too large for {self.key}; lower --cache_lens")

    def _exact(self) -> NativeMathMode:
        """Around modules inside of compressors, of which `bypassed` says that they are no operators' business."""
        return NativeMathMode(self.config.require_pool())

    def _head_norm(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalize query heads [N, D]."""
        if self._head_eps is None:
            with self._exact():
                normed: torch.Tensor = self.inner.get_submodule("q_b_norm")(heads)
            return normed
        return cpu.rms_norm(heads, torch.ones(self.head_dim), self._head_eps, self.config.require_pool())

    def _entries(
        self,
        rows: StepRows,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        cached: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which entries each row sees, in ascending order: int64 [T, most], of which the first [T] count."""
        if self._compressor is None:
            return rows.positions.new_zeros(len(rows.positions), 0), torch.zeros_like(rows.positions)
        with self._exact():
            for compression in self._compressions:
                compression.update(rows, hidden_states, cached)
        num_entries = (rows.positions + 1) // self._compressor.rate
        if self._indexer is None:
            return torch.arange(int(num_entries.max())).expand(len(num_entries), -1), num_entries
        return self._chosen(rows, hidden_states, residual, cached, angles), num_entries.clamp(
            max=int(self._indexer.module.index_topk)
        )

    def _chosen(
        self,
        rows: StepRows,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        cached: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """The entries that the indexer scores highest, the earlier ones of those with one score: [T, top_k]."""
        assert self._indexer is not None
        indexer = self._indexer.module
        with self._exact():
            query, weights = indexer.q_b_proj(residual), indexer.scorer.weights_proj(hidden_states)[0]
        query = turned(query.view(len(rows.positions), -1, self._indexer.dim), *angles)
        weights = weights * indexer.scorer.weights_scaling
        top_k, scale = int(indexer.index_topk), float(indexer.scorer.softmax_scale)
        chosen = rows.positions.new_zeros(len(rows.positions), top_k)
        columns = slice(self._indexer.entry, self._indexer.entry + self._indexer.dim)
        for part in rows.sequences():
            counts = (rows.positions[part] + 1) // self._indexer.rate
            total = int(counts.max())
            if not total:
                continue
            ends = (torch.arange(total) + 1) * self._indexer.rate - 1
            entries = cached[rows.slots(ends[None], part[:1])[0], columns]
            numbers = torch.arange(total, dtype=torch.int32)[None]
            pages = RowPages(numbers, 1, torch.zeros_like(counts), counts)
            call = TopkCall(query[part], weights[part], entries, pages, scale, min(top_k, total))
            best, found = cpu.select_topk_positions(call, self.config.require_pool())
            best = best.long().masked_fill(torch.arange(best.shape[1]) >= found[:, None], 0)  # the first ones count
            chosen[part, : best.shape[1]] = best
        return chosen

    def _attend(
        self, rows: StepRows, query: torch.Tensor, keys: torch.Tensor, entries: torch.Tensor, num_entries: torch.Tensor
    ) -> torch.Tensor:
        """[T, heads, D]. Every row has a table of its own: first entries, then the tokens of its window."""
        inner: Any = self.inner
        units = self.cached_dim // self.head_dim
        self._check_slots(len(keys))
        lens = num_entries + (rows.positions + 1).clamp(max=self.window)
        at = torch.arange(int(lens.max()))
        is_entry = at < num_entries[:, None]
        token = rows.positions[:, None] + 1 + at - lens[:, None]
        table = rows.slots(token.clamp(min=0).minimum(rows.positions[:, None])) * units
        if self._compressor is not None and entries.shape[1]:
            entry = entries.gather(1, at.clamp(max=entries.shape[1] - 1).expand(len(lens), -1))
            ends = ((entry + 1) * self._compressor.rate - 1).minimum(rows.positions[:, None])
            table = torch.where(is_entry, rows.slots(ends) * units + 1, table)
        flat = keys.view(-1, 1, self.head_dim)
        chosen = TopkPositions(table.to(torch.int32).contiguous(), lens.to(torch.int32))
        sinks = inner.sinks.detach()
        call = AttentionCall(query.contiguous(), flat, flat, chosen.pages, float(inner.scaling), sinks=sinks)
        return cpu.attention(call, self.config.require_pool())

"""Embeddings of n-grams that a layer adds to its residual streams (Qwen4's per-layer embedding).

    T rows, N ngram_size, S residual streams of H columns, E columns of all that is looked up for a row

    row t looks up, for n = 2 .. N and each of several hashes, an embedding of its last n tokens: E columns together;
    tokens before the end of an earlier text (eos) count as eos
    value = value_proj(E); key, query = norms of key_proj(E) and of the streams; score = key . query / sqrt(H)
    out = v + silu(conv(norm(v))),  v = sigmoid(sign(score) sqrt(|score|)) value, stream by stream

The convolution looks N, 2 N, ... rows back. Both it and the last tokens are states of a sequence like those of any
recurrent layer: shifted rows, which the kernel for short convolutions moves along (a shift is one with a single tap).
The table is large and stays where its file is mapped; only rows that are asked for are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.types import RawTensor
from ktransformers.operators.base import OperatorConfig, Placement, Requirements, expect_shape
from ktransformers.operators.context import ForwardContext, StateStep
from ktransformers.operators.recurrent.base import RecurrentOperator
from ktransformers.operators.wrapper import DenseState
from ktransformers.weights.source import WeightSource

__all__ = ["KPerLayerEmbedding", "hash_multipliers"]

_MOST_SHIFT = 7  # rows that the kernel of short convolutions looks back
_EXACT = 1 << 24  # whole numbers that fp32 holds
_SHARD = re.compile(r"\.shard_(\d{1,9})\.")
_MASK = (1 << 64) - 1
_LAYER_PRIME = 10007
_COMPUTED = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def _split_mix(state: int) -> int:
    """The output of SplitMix64 (Steele, Lea, Flood 2014) behind `state`."""
    mixed = (state + 0x9E3779B97F4A7C15) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> shift) * factor & _MASK
    return mixed ^ mixed >> 31


def hash_multipliers(vocab_size: int, ngram_size: int, layer_index: int, seed: int) -> list[int]:
    """Return odd factors of a token and of those before it in the hash of an n-gram; products with ids stay
    below 2^63.
    """
    half = max(1, ((1 << 63) - 1) // max(vocab_size, 1) // 2)
    first = seed + _LAYER_PRIME * layer_index
    states = ((first + 0x9E3779B97F4A7C15 * (index + 1)) & _MASK for index in range(ngram_size))
    return [2 * (_split_mix(state) % half) + 1 for state in states]


class KPerLayerEmbedding(RecurrentOperator):
    """Looked-up n-grams as an update of residual streams: [1, T, S H] and ids [1, T] in, [1, T, S H] out."""

    OPS: ClassVar[dict[str, str]] = {"KPerLayerEmbedding": "rows of a mapped table, shifted rows as states"}
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"ple_embedding", "conv1d"})
    CHILDREN: ClassVar[tuple[frozenset[str], ...]] = (
        frozenset({"ple_embedding", "key_proj", "value_proj", "norm_key", "norm_query", "norm_conv", "conv1d"}),
    )
    NUMBERS: ClassVar[tuple[str, ...]] = ("hidden_size", "hc_count", "short_conv_state_len")

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        inner: Any = module
        grams = inner.ple_embedding
        if self.device.is_gpu:
            raise UnsupportedError(f"{key}: steps on a GPU bring no tokens to their layers; place it on cpu")
        self.eos, self.ngram_size = int(grams.eos_token_id), int(grams.ngram_size)
        self.dilation = int(self.conv.dilation[0])
        if max(self.dilation, self.ngram_size - 1) > _MOST_SHIFT or int(grams.unigram_vocab_size) >= _EXACT:
            raise UnsupportedError(f"{key}: n-grams of {self.ngram_size} tokens, looked up {self.dilation} rows back")
        sizes = int(grams.unigram_vocab_size), self.ngram_size, int(grams.ple_layer_index), int(grams.seed)
        self.factors = hash_multipliers(*sizes)
        self._sizes = torch.tensor(grams.head_vocab_sizes, dtype=torch.int64).view(self.ngram_size - 1, -1)
        self._offsets = torch.tensor(grams.head_offsets, dtype=torch.int64).view(self.ngram_size - 1, -1)
        self._table_shape = tuple(grams.ngram_embedding.weight.shape)
        self._parts: list[RawTensor] = []
        self._starts = torch.zeros(1, dtype=torch.int64)

    # What it holds.

    @override
    def state_parts(self) -> Mapping[str, tuple[int, ...]]:
        channels, taps = int(self.conv.in_channels), int(self.conv.kernel_size[0])
        shifted = {f"ngram_lag{lag}": (self.dilation, channels) for lag in range(1, taps)}
        return {**shifted, "ngram_tokens": (self.ngram_size - 1, self.ngram_size - 1)}

    @override
    def _states(self) -> list[DenseState]:
        return [DenseState(self.conv, f"{self.key}.conv1d", self.device, torch.float32)]

    @property
    def _table_name(self) -> str:
        return f"{self.key}.ple_embedding.ngram_embedding.weight"

    def _computed(self, source: WeightSource) -> Iterator[tuple[str, list[int]]]:
        """Stored names of numbers that follow from the config, and what they have to be."""
        values = (self.factors, self._sizes.flatten().tolist(), self._offsets.flatten().tolist())
        inside = self.key[self.key.find("layers.") :]
        ends = {f"{inside}.ple_embedding.{name}": value for name, value in zip(_COMPUTED, values, strict=True)}
        for stored in source.stored_names():
            found = next((value for end, value in ends.items() if stored.endswith(end)), None)
            if found is not None:
                yield stored, found

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        needs = super().requirements(source)
        needs.add("cpu", expect_shape(source.find(self._table_name), self._table_name, self._table_shape))
        needs.stored_names.update(name for name, _ in self._computed(source))
        return needs

    @override
    def load(self, source: WeightSource) -> None:
        super().load(source)
        for name, values in self._computed(source):
            stored = source.stored_bytes(name)
            if stored is not None and bytes(stored.numpy()) != torch.tensor(values).numpy().tobytes():
                raise TensorMismatchError(f"tensor {name} is not what the model's config gives for it")
        info = expect_shape(source.find(self._table_name), self._table_name, self._table_shape)
        shards = sorted((name for name in info.stored_names if _SHARD.search(name)), key=_shard_number)
        self._parts = [source.tensor(name) for name in shards or [self._table_name]]
        lengths = torch.tensor([part.rows for part in self._parts])
        self._starts = lengths.cumsum(0) - lengths

    # A step.

    @override
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the update of residual streams. args: token ids [1, T]; what comes behind is transformers' own."""
        context: ForwardContext | None = kwargs.get("forward_context")
        if context is None or context.cache.states is None or context.states is None:
            raise UnsupportedError(f"{self.key} is given no states: it runs outside of the engine")
        ids: Tensor = args[0]
        with self._math():
            out = self._update(
                hidden_states[0], ids[0].long(), context.cache.states.layer(self.layer_idx), context.states
            )
        return out[None]

    @override
    def mix(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        raise UnsupportedError(f"{self.key} needs the tokens of its rows")

    def _update(self, rows: Tensor, ids: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        inner: Any = self.inner
        shape = (len(rows), int(inner.hc_count), int(inner.hidden_size))
        found = self._looked_up(self._ngrams(ids, states, step))
        key, query = inner.norm_key(inner.key_proj(found)).view(shape), inner.norm_query(rows).view(shape)
        score = (key * query).sum(dim=-1, keepdim=True) / math.sqrt(shape[-1])
        score = score.abs().clamp_min(1e-6).sqrt() * score.sign()
        values = (torch.sigmoid(score) * inner.value_proj(found)[:, None]).flatten(1)
        out: Tensor = values + self._convolved(inner.norm_conv(values), states, step)
        return out

    def _convolved(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        taps = self.conv.weight[:, 0].unbind(-1)
        total, lagging = rows * taps[-1], rows
        for lag in range(1, len(taps)):
            lagging = self._shifted(lagging, self.dilation, states[f"ngram_lag{lag}"], step)
            total = total + lagging * taps[-1 - lag]
        return functional.silu(total)

    def _shifted(self, rows: Tensor, count: int, state: Tensor, step: StateStep) -> Tensor:
        """Each sequence's rows [T, C], `count` rows later; zeros before its first one."""
        weight = torch.zeros(rows.shape[1], count + 1)
        weight[:, 0] = 1.0
        return self.scans.causal_conv(rows.contiguous(), weight, None, state, step, "none")

    def _ngrams(self, ids: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        """Rows of the table for ids [T], int64 [T, lookups]."""
        before = self.ngram_size - 1
        # As numbers + 1: where there is no earlier token, the state says 0.
        weight = functional.pad(torch.eye(before).flip(1), (0, 1))  # channel c looks back c + 1 rows
        given = (ids + 1).float()[:, None].expand(-1, before).contiguous()
        earlier = self.scans.causal_conv(given, weight, None, states["ngram_tokens"], step, "none").long() - 1
        mixed, is_cut, found = ids * self.factors[0], torch.zeros_like(ids, dtype=torch.bool), []
        for back in range(1, self.ngram_size):
            token = earlier[:, back - 1]
            token = torch.where(is_cut | (token < 0), self.eos, token)
            is_cut = is_cut | (token == self.eos)
            mixed = mixed ^ token * self.factors[back]
            found.append(torch.remainder(mixed[:, None], self._sizes[back - 1]) + self._offsets[back - 1])
        return torch.cat(found, dim=-1)

    def _looked_up(self, numbers: Tensor) -> Tensor:
        """fp32 [T, E] of rows [T, lookups] of the table."""
        pool, flat = self.config.require_pool(), numbers.flatten()
        if len(self._parts) == 1:
            return cpu.dequantize_rows(self._parts[0], flat, pool).view(len(numbers), -1)
        out = torch.empty(len(flat), self._table_shape[1])
        parts = torch.searchsorted(self._starts, flat, right=True) - 1
        for part in sorted(set(parts.tolist())):
            at = (parts == part).nonzero()[:, 0]
            out[at] = cpu.dequantize_rows(self._parts[part], flat[at] - self._starts[part], pool)
        return out.view(len(numbers), -1)


def _shard_number(name: str) -> int:
    found = _SHARD.search(name)
    return 0 if found is None else int(found[1])

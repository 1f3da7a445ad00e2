"""Embeddings of n-grams that a layer adds to its residual streams (Qwen4's per-layer embedding).

    T rows, N ngram_size, S residual streams of H columns, E columns of all that is looked up for a row

    row t looks up, for n = 2 .. N and each of several hashes, an embedding of its last n tokens: E columns together;
    tokens before the end of an earlier text (eos) count as eos
    value = value_proj(E); key, query = norms of key_proj(E) and of the streams; score = key . query / sqrt(H)
    out = v + silu(conv(norm(v))),  v = sigmoid(sign(score) sqrt(|score|)) value, stream by stream

The convolution looks N, 2 N, ... rows back. Both it and the last tokens are states of a sequence like those of any
recurrent layer: shifted rows, which the kernel for short convolutions moves along (a shift is one with a single tap).
The table is large and stays in its file, of which only rows are read that are asked for: where it is mapped, or, if the
model's experts stay in files too, by a store of rows, since what is mapped needs memory that the experts have. Tokens
are known to the CPU alone, so that it looks up, whatever device the layer is on: with a GPU before the step, as
embeddings of tokens are (engine.step.lookup), and the layer gets what was found in the place of token ids.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from ktransformers.cache.state import StateShape
from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.types import QuantType, RawTensor
from ktransformers.models.ngram_hash import hash_multipliers
from ktransformers.operators.base import OperatorConfig, Placement, Requirements, expect_shape
from ktransformers.operators.context import ForwardContext, StateStep
from ktransformers.operators.device import CPU, to_input
from ktransformers.operators.exact import exact_math
from ktransformers.operators.recurrent.base import RecurrentOperator
from ktransformers.operators.recurrent.scans import Scans
from ktransformers.operators.wrapper import DenseState
from ktransformers.weights.mapped_file import place_in_file
from ktransformers.weights.source import WeightSource

__all__ = ["KPerLayerEmbedding"]

_MOST_SHIFT = 7  # rows that the kernel of short convolutions looks back
_EXACT = 1 << 24  # whole numbers that fp32 holds
_SHARD = re.compile(r"\.shard_(\d{1,9})\.")
_COMPUTED = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
_FP8, _SCALE = "F8_E4M3", ".ple_embedding.ngram_embedding.weight_scale"
_SCALE_TYPES = {2: torch.bfloat16, 4: torch.float32}
"""By number of bytes."""
_TOKENS = "ngram_tokens"  # the part of the state with the last tokens


class KPerLayerEmbedding(RecurrentOperator):
    """Looked-up n-grams as an update of residual streams: [1, T, S H] and ids [1, T] in, [1, T, S H] out. In the place
    of ids what was looked up for all layers, [1, T, C], of which its own columns are the E from `column` on.
    """

    OPS: ClassVar[dict[str, str]] = {"KPerLayerEmbedding": "rows of a table in a file, shifted rows as states"}
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"ple_embedding", "conv1d"})
    CHILDREN: ClassVar[tuple[frozenset[str], ...]] = (
        frozenset({"ple_embedding", "key_proj", "value_proj", "norm_key", "norm_query", "norm_conv", "conv1d"}),
    )
    NUMBERS: ClassVar[tuple[str, ...]] = ("hidden_size", "hc_count", "short_conv_state_len")

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        inner: Any = module
        grams = inner.ple_embedding
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
        self._rows: cpu.RowStore | None = None  # reads them; None: where they are mapped
        self._fp8_scale: float | None = None  # of a table in FP8, whose parts are its bytes
        self._lookup = Scans(CPU, config.pool)
        self.column = 0  # the first one of what is looked up for it, among what is for all layers

    # What it holds.

    @override
    def state_parts(self) -> Mapping[str, tuple[int, ...]]:
        channels, taps = int(self.conv.in_channels), int(self.conv.kernel_size[0])
        shifted = {f"ngram_lag{lag}": (self.dilation, channels) for lag in range(1, taps)}
        return {**shifted, _TOKENS: (self.ngram_size - 1, self.ngram_size - 1)}

    @override
    def state_shape(self) -> StateShape:
        return replace(super().state_shape(), host_parts=frozenset({_TOKENS}))

    @property
    def looked_up_dim(self) -> int:
        """Number E of columns that are looked up for a row."""
        return self._sizes.numel() * int(self._table_shape[1])

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
        info = expect_shape(source.find(self._table_name), self._table_name, self._table_shape)
        kept = 0 if self.config.expert_files is None else cpu.ROW_CACHE_NBYTES
        needs.add_table(source, info, as_stored=info.stored_type == _FP8, kept_nbytes=kept)
        needs.stored_names.update(name for name, _ in self._computed(source))
        needs.stored_names.update(self._scale_names(source))
        return needs

    def _scale_names(self, source: WeightSource) -> list[str]:
        """The stored name of the one scale of a table in FP8, if there is any."""
        end = self.key[self.key.find("layers.") :] + _SCALE
        return [name for name in source.stored_names() if name.endswith(end)]

    @override
    def load(self, source: WeightSource) -> None:
        super().load(source)
        for name, values in self._computed(source):
            stored = source.stored_bytes(name)
            if stored is not None and bytes(stored.numpy()) != torch.tensor(values).numpy().tobytes():
                raise TensorMismatchError(f"tensor {name} is not what the model's config gives for it")
        info = expect_shape(source.find(self._table_name), self._table_name, self._table_shape)
        shards = sorted((name for name in info.stored_names if _SHARD.search(name)), key=_shard_number)
        if info.stored_type == _FP8:
            self._load_fp8(source, shards or [name for name in info.stored_names if not name.endswith(_SCALE)])
        else:
            self._parts = [source.tensor(name) for name in shards or [self._table_name]]
        files = self.config.expert_files
        if files is not None and all(place_in_file(part.data) is not None for part in self._parts):
            self._rows = files.add_table(self._parts, self.config.require_pool())

    # A step.

    def look_up(self, ids: Tensor, context: ForwardContext, out: Tensor | None = None) -> Tensor:
        """Look up the n-grams of a step's rows, int64 [T]: fp32 [T, E], written to `out` if that is given. Goes on with
        the last tokens of its sequences, so that it is called once for each step, in their order.

        context: of the step, on the CPU. Raises UnsupportedError without states.
        """
        states = self._states_of(context)
        assert context.states is not None, "the cache has states, and the step names none"
        numbers = self._ngrams(ids, states, context.states)
        flat = None if out is None else out.view(-1, self._table_shape[1])
        if self._fp8_scale is None:
            return self._gather(numbers.flatten(), flat).view(len(ids), -1)
        pairs = self._gather(numbers.flatten()).view(torch.int32) >> 16
        codes = pairs.to(torch.int16).view(torch.float8_e4m3fn)
        rows = torch.mul(codes.float(), self._fp8_scale, out=flat)
        return rows.view(len(ids), -1)

    def _gather(self, numbers: Tensor, out: Tensor | None = None) -> Tensor:
        if self._rows is not None:
            return self._rows.gather(numbers, out)
        return cpu.gather_rows(self._parts, numbers, self.config.require_pool(), out)

    def _load_fp8(self, source: WeightSource, shards: list[str]) -> None:
        """Take the bytes of a table in FP8, two of them for a BF16 number: they come back as they are. One scale is for
        all. Raises TensorMismatchError without it.
        """
        scales = [source.stored_bytes(name) for name in self._scale_names(source)]
        if len(scales) != 1 or scales[0] is None or len(scales[0]) not in _SCALE_TYPES:
            raise TensorMismatchError(f"the table of {self.key} is FP8, and its one scale {_SCALE} is not there")
        self._fp8_scale = float(scales[0].clone().view(_SCALE_TYPES[len(scales[0])]))
        width = self._table_shape[1]
        for name in shards:
            data = source.stored_bytes(name)
            assert data is not None, "FP8 is in files only"
            self._parts.append(RawTensor(data, QuantType.BF16, (len(data) // width, width // 2)))

    def _states_of(self, context: ForwardContext | None) -> Mapping[str, Tensor]:
        if context is None or context.cache.states is None:
            raise UnsupportedError(f"{self.key} is given no states: it runs outside of the engine")
        return context.cache.states.layer(self.layer_idx)

    @override
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the update of residual streams. args: token ids [1, T], or what was looked up; what comes behind is
        transformers' own.
        """
        context: ForwardContext | None = kwargs.get("forward_context")
        states = self._states_of(context)
        rows = self.device.to_device(hidden_states[0])
        assert context is not None, "there are no states without one"
        step = context.on(rows.device).states
        assert step is not None, "the cache has states, and the step names none"
        given: Tensor = args[0][0]
        with exact_math(self):
            if given.is_floating_point():
                found = given[:, self.column : self.column + self.looked_up_dim]
            else:
                found = self.look_up(given.long(), context)
            out = self._update(rows, self.device.to_device(found), states, step)
        return to_input(out, hidden_states)[None]

    @override
    def mix(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        raise UnsupportedError(f"{self.key} needs the tokens of its rows")

    def _update(self, rows: Tensor, found: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        inner: Any = self.inner
        shape = (len(rows), int(inner.hc_count), int(inner.hidden_size))
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
        weight = torch.zeros(rows.shape[1], count + 1, device=rows.device)
        weight[:, 0] = 1.0
        return self.scans.causal_conv(rows.contiguous(), weight, None, state, step, "none")

    def _ngrams(self, ids: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        """Rows of the table for ids [T], int64 [T, lookups]."""
        before = self.ngram_size - 1
        # As numbers + 1: where there is no earlier token, the state says 0.
        weight = functional.pad(torch.eye(before).flip(1), (0, 1))  # channel c looks back c + 1 rows
        given = (ids + 1).float()[:, None].expand(-1, before).contiguous()
        earlier = self._lookup.causal_conv(given, weight, None, states[_TOKENS], step, "none").long() - 1
        mixed, is_cut, found = ids * self.factors[0], torch.zeros_like(ids, dtype=torch.bool), []
        for back in range(1, self.ngram_size):
            token = earlier[:, back - 1]
            token = torch.where(is_cut | (token < 0), self.eos, token)
            is_cut = is_cut | (token == self.eos)
            mixed = mixed ^ token * self.factors[back]
            found.append(torch.remainder(mixed[:, None], self._sizes[back - 1]) + self._offsets[back - 1])
        return torch.cat(found, dim=-1)


def _shard_number(name: str) -> int:
    found = _SHARD.search(name)
    return 0 if found is None else int(found[1])

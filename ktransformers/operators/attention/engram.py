"""Embeddings of n-grams from a table in a file, which a layer adds to its streams of hidden states (Engram).

    T rows, N streams of H columns, L look-ups of a row of E columns each (sizes of n-grams, and hashes of each)

    found       = the L rows of the table for the last tokens up to a row's own, side by side (models/deepseek_v41)
    keys, value = kv_proj(found), N + 1 parts of H columns
    score[n]    = norm(stream[n]) q_weight[n] . norm(keys[n]) k_weight[n] / sqrt(H)
    stream[n]  += sigmoid(sign(score[n]) sqrt(max(|score[n]|, 1e-6))) value

Tables are FP8 with a power of two for 32 columns of a row, and larger than memory: they stay in their files, of which
rows are read that are asked for. A row's token lies in the last column of the layer's rows of the cache, from where
later rows of its sequence have it: pages are shared, kept and moved with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from ktransformers.errors import ConfigError, TensorMismatchError, UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.types import QuantType, RawTensor
from ktransformers.models.deepseek_v41.hashing import EngramLayout, table_rows, token_map
from ktransformers.operators.attention.compressed import StepRows
from ktransformers.operators.base import OperatorConfig, Placement, Requirements, expect_shape
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.exact import NativeMathMode
from ktransformers.operators.wrapper import DenseState, WrapperOperator
from ktransformers.weights.mapped_file import place_in_file
from ktransformers.weights.source import TensorInfo, WeightSource

if TYPE_CHECKING:
    from ktransformers.models.deepseek_v41.modeling import DeepseekV41Engram

__all__ = ["KEngram"]

_GROUP = 32  # columns of a row under one exponent
_LEAST = 1e-6


class KEngram(WrapperOperator):
    """Adds n-grams to streams [1, T, N, H], by token ids [1, T]."""

    OPS: ClassVar[dict[str, str]] = {"KEngram": "rows of a table in a file"}
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"embed"})

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        if not isinstance(getattr(module, "layout", None), EngramLayout):
            raise UnsupportedError(f"KEngram cannot replace {key} ({type(module).__name__}): it has no layout")
        if self.device.is_gpu:
            raise UnsupportedError(f"{key}: tables of n-grams are looked up on the CPU; place it there")
        self.layer_idx, self.layout = self._module.layer_idx, self._module.layout
        self._shape = tuple(self._module.embed.weight.shape)
        self._numbers = torch.empty(0, dtype=torch.int64)  # of tokens, by id
        self._padding = 0
        self._table: list[RawTensor] = []  # of the rows' columns; of FP8 their bytes in pairs, then their exponents
        self._stores: list[cpu.RowStore] = []  # read these; none: where they are mapped

    @property
    def _module(self) -> DeepseekV41Engram:
        return cast("DeepseekV41Engram", self.inner)

    # What it holds.

    @override
    def state(self) -> DenseState:
        return DenseState(self.inner, self.key, self.device, torch.float32)

    @override
    def bypassed(self) -> Iterable[nn.Module]:
        return (self.inner, self.inner.get_submodule("embed"))

    def _found(self, source: WeightSource) -> TensorInfo:
        name = f"{self.key}.embed.weight"
        return expect_shape(source.find(name), name, self._shape)

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        needs, info = super().requirements(source), self._found(source)
        kept = 0 if self.config.expert_files is None else cpu.ROW_CACHE_NBYTES
        needs.add_table(source, info, as_stored=_is_scaled(info), kept_nbytes=kept)
        return needs

    @override
    def load(self, source: WeightSource) -> None:
        super().load(source)
        inner = self._module
        numbers = torch.tensor(token_map(inner.model_folder, inner.num_numbers))
        pad, facts = inner.pad_token_id, self.config.facts
        if not 0 <= pad < len(numbers):
            raise ConfigError(f"engram_pad_token_id {pad} is none of the tokenizer's {len(numbers)} tokens")
        self._padding = int(numbers[pad])
        self._numbers = torch.full((facts.vocab_size + facts.num_extra_ids,), self._padding)  # ids without a token
        self._numbers[: len(numbers)] = numbers[: len(self._numbers)]
        info = self._found(source)
        if _is_scaled(info):
            self._table = self._pairs(source, info)
        else:
            self._table = [source.tensor(f"{self.key}.embed.weight")]
        files = self.config.expert_files
        if files is not None and all(place_in_file(part.data) is not None for part in self._table):
            self._stores = [files.add_table([part], self.config.require_pool()) for part in self._table]

    def _pairs(self, source: WeightSource, info: TensorInfo) -> list[RawTensor]:
        """The bytes of an FP8 table and of its exponents, two for each BF16 number: they come back as they are."""
        rows, columns = self._shape
        sizes = {rows * columns: columns, rows * columns // _GROUP: columns // _GROUP}
        found: dict[int, RawTensor] = {}
        for name in info.stored_names:
            data = source.stored_bytes(name)
            width = 0 if data is None else sizes.get(len(data), 0)
            if data is not None and width:
                found[width] = RawTensor(data, QuantType.BF16, (rows, width // 2))
        if len(found) != 2 or columns % (2 * _GROUP):
            raise TensorMismatchError(
                f"the table of {self.key} is FP8 [{rows}, {columns}]; it needs an exponent for {_GROUP} columns of a "
                f"row beside it (embed.scale, F8_E8M0 [{rows}, {columns // _GROUP}]), and an even number of these"
            )
        return [found[columns], found[columns // _GROUP]]

    # A step.

    @override
    def forward(
        self,
        streams: Tensor,
        input_ids: Tensor,
        forward_context: ForwardContext | None = None,
        **kwargs: object,
    ) -> Tensor:
        if forward_context is None:
            raise UnsupportedError(f"{self.key} runs inside of the engine only: it needs a context")
        pool = self.config.require_pool()
        rows = StepRows.of(forward_context)
        found = self._looked_up(self._hashed(self._numbers[input_ids[0].long()], rows))
        inner = self._module
        with NativeMathMode(pool):
            *keys, value = inner.kv_proj(found[None])[0].chunk(inner.hc_mult + 1, dim=-1)
            parts = []
            for stream, key, q_weight, k_weight in zip(
                streams[0].unbind(1), keys, inner.q_weight, inner.k_weight, strict=True
            ):
                query = cpu.rms_norm(stream.contiguous(), q_weight, inner.norm_eps, pool)
                key = cpu.rms_norm(key.contiguous(), k_weight, inner.norm_eps, pool)
                score = (query * key).sum(dim=-1, keepdim=True) / math.sqrt(query.shape[-1])
                gate = torch.sigmoid(score.abs().clamp_min(_LEAST).sqrt().copysign(score))
                parts.append(stream + gate * value)
            return torch.stack(parts, dim=1)[None]

    def _hashed(self, tokens: Tensor, rows: StepRows) -> Tensor:
        """Rows of the table for tokens [T] by their numbers, int64 [T, L]. Keeps them for later rows."""
        context = rows.context
        kept = context.cache.layer(self.layer_idx)[0][:, 0, -1]
        kept[context.slot_mapping] = tokens.float()
        numbers = [tokens]
        for back in range(1, len(self.layout.multipliers)):
            position = rows.positions - back
            earlier = kept[rows.slots(position.clamp(min=0))].long()
            numbers.append(torch.where(position < 0, self._padding, earlier))
        return table_rows(self.layout, numbers)

    def _looked_up(self, numbers: Tensor) -> Tensor:
        """fp32 [T, L E] of rows [T, L] of the table."""
        pool, flat = self.config.require_pool(), numbers.flatten()
        if self._stores:
            gathered = [store.gather(flat, None) for store in self._stores]
        else:
            gathered = [cpu.gather_rows([part], flat, pool, None) for part in self._table]
        if len(gathered) == 1:
            return gathered[0].view(len(numbers), -1)
        codes, exponents = ((one.view(torch.int32) >> 16).to(torch.int16) for one in gathered)
        values = codes.view(torch.float8_e4m3fn).float().view(len(flat), -1, _GROUP)
        powers = exponents.view(torch.float8_e8m0fnu).float()
        return (values * powers[..., None]).view(len(numbers), -1)


def _is_scaled(info: TensorInfo) -> bool:
    """Whether a table has scales beside it, as FP8 has."""
    return len(info.stored_names) > 1

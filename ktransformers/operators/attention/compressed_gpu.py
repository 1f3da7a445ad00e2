"""Attention over a window and over compressed keys on a GPU. What it computes: operators/attention/compressed.py.

Grids and shapes depend on the rows of a step and on its block table alone, so that steps can be replayed. What a row
attends to becomes a block table for pages of one position, over the cache seen as parts of D columns: keys and entries
lie beside each other in it, and the kernel of latent attention reads either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ktransformers.errors import UnsupportedError
from ktransformers.kernels.attention_call import AttentionCall, RowPages, TopkCall
from ktransformers.kernels.triton.attention.compressed import (
    Entries,
    attended,
    keep_values,
    make_entries,
    turn,
)
from ktransformers.kernels.triton.attention.latent import MAX_LATENT_ROWS, expand
from ktransformers.kernels.triton.attention.mla import mla_attention
from ktransformers.kernels.triton.attention.topk_positions import select_topk_positions
from ktransformers.operators.attention.rope import KRotaryEmbedding
from ktransformers.operators.attention.topk_positions import TopkPositions
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import Device, use
from ktransformers.operators.linear.joined import JoinedLinears
from ktransformers.operators.norm import KRMSNorm
from ktransformers.operators.recognize.norm import recognize_norm, recognize_weightless_norm
from ktransformers.operators.recognize.probe import close

__all__ = ["CompressedSpec", "GpuCompressed", "Series", "angles_of"]

_MAX_LISTED = 1 << 24  # numbers of what rows attend to that are kept at a time
_PROBED = (0, 1, 7, 1000)


def angles_of(module: nn.Module, kind: str, key: str) -> tuple[torch.Tensor, float]:
    """Return the frequencies, fp32 [P / 2], and the factor of a rotary embedding: cos(position frequency) factor, and
    sin.

    kind: of layers that it is asked for. Raises UnsupportedError for one that computes something else.
    """
    inner: Any = module.inner if isinstance(module, KRotaryEmbedding) else module
    frequencies, factor = getattr(inner, f"{kind}_inv_freq", None), getattr(inner, f"{kind}_attention_scaling", None)
    if isinstance(frequencies, torch.Tensor) and isinstance(factor, int | float):
        positions = torch.tensor(_PROBED, device=frequencies.device)
        asked = inner(torch.empty(1, 1, 1, device=frequencies.device), positions[None], layer_type=kind)
        angles = positions[:, None].float() * frequencies.float()
        if all(close(got[0], want * factor) for got, want in zip(asked, (angles.cos(), angles.sin()), strict=True)):
            return frequencies.float(), float(factor)
    raise UnsupportedError(f"{key}: its angles are not those of fixed frequencies; place it on cpu")


@dataclass(frozen=True, slots=True)
class Series:
    """What one compressor keeps in the cache's rows: see `kernels.triton.attention.compressed.Entries`."""

    module: Any
    rate: int
    series: int
    entry: int
    values: int

    def entries(self, bias: torch.Tensor, device: Device, key: str) -> Entries:
        """Return the compressor's entries as kernels take them, with its weights on the device. bias: fp32 [M, series
        D], of positions.
        """
        norm = self.module.kv_norm
        spec = norm.spec if isinstance(norm, KRMSNorm) else recognize_norm(norm)
        if spec is None:
            raise UnsupportedError(f"{key}: the norm of its entries is not RMSNorm; place it on cpu")
        frequencies, factor = angles_of(self.module.rotary_emb, self.module.rope_layer_type, key)
        weight = device.move(norm.weight.float())
        return Entries(
            self.rate, self.series, self.entry, self.values, bias, weight, spec.eps, device.move(frequencies), factor
        )


@dataclass(frozen=True, slots=True)
class Choosing:
    """How an indexer chooses entries. entries: its own, by which it scores those of the layer. scale: of products.
    head_scale: of the weights of its num_heads heads."""

    entries: Entries
    num_chosen: int
    scale: float
    head_scale: float
    num_heads: int

    def choose(self, query: torch.Tensor, weights: torch.Tensor, cached: torch.Tensor, pages: RowPages) -> torch.Tensor:
        """Choose the entries that rows see, int32 [T, K] in ascending order, as numbers of runs of `rate` slots.

        query: [T, heads, D], rotated, in the type of cached [slots, columns]. weights: fp32 [T, heads]. An entry lies
        in the last slot of its run, so that the runs are a cache with smaller pages. Raises UnsupportedError for pages
        that do not consist of runs.
        """
        rate, size, first = self.entries.rate, pages.page_size, self.entries.entry
        if size % rate and size != len(cached):
            raise UnsupportedError(f"pages of {size} tokens are not made of entries of {rate}: change --page_size")
        if pages.room < rate:  # there is no entry
            return torch.empty(len(query), 0, dtype=torch.int32, device=query.device)
        runs = cached[: len(cached) // rate * rate].view(-1, rate, cached.shape[1])
        keys = runs[:, rate - 1, first : first + self.entries.dim]
        of_runs = RowPages(pages.block_table, size // rate, pages.seq_ids, pages.kv_lens // rate)
        slots, _ = select_topk_positions(TopkCall(query, weights, keys, of_runs, self.scale, self.num_chosen))
        return slots


@dataclass(frozen=True, slots=True)
class Attending:
    """Attention of rows over a window and entries: what rows see and how they attend to it. units: parts of D columns
    in a row of the cache; rate: tokens of an entry, 0 without; most: entries that a row sees at most. sinks: fp32 [H].
    """

    window: int
    units: int
    rate: int
    most: int
    scale: float
    sinks: torch.Tensor

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, pages: RowPages, chosen: torch.Tensor | None
    ) -> torch.Tensor:
        """Return results [T, H, D] of rotated queries [T, H, D] over keys [slots, 1, units D]."""
        rows, _, dim = query.shape
        parts, width = keys.view(-1, 1, dim), self.most + self.window
        out = torch.empty_like(query)
        step = max(_MAX_LISTED // width, 1)
        for first in range(0, rows, step):
            some = slice(first, first + step)
            which = None if chosen is None else chosen[some]
            listed = TopkPositions(
                *attended(pages.of(some), self.window, self.units, width, rate=self.rate, most=self.most, chosen=which)
            )
            call = AttentionCall(query[some], parts, parts[..., :dim], listed.pages, self.scale, sinks=self.sinks)
            mla_attention(call, out=out[some])
        return out


def grouped_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x [T, G, K] with weight [G, K, R], group by group, to [T, G, R]; both of one type."""
    if len(x) <= MAX_LATENT_ROWS:
        return expand(x, weight)
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """Numbers of a layer of compressed attention. units: parts of D columns in a row of the cache. compressor, indexer:
    None without.

    head_eps, key_eps: of the norms of a query's heads, which has no weight, and of keys.
    """

    window: int
    num_heads: int
    head_dim: int
    units: int
    head_eps: float
    key_eps: float
    compressor: Series | None
    indexer: Series | None

    @classmethod
    def check(cls, key: str, module: Any, head_dim: int) -> tuple[float, float]:
        """Return head_eps and key_eps of a module on meta. Raises UnsupportedError for one that the kernels do not
        compute.
        """
        head_eps, key_norm = recognize_weightless_norm(module.q_b_norm), recognize_norm(module.kv_norm)
        if head_eps is None or key_norm is None or key_norm.offset:
            raise UnsupportedError(f"{key}: its norms are not plain RMSNorm; place it on cpu")
        if head_dim < 16 or head_dim & (head_dim - 1):
            raise UnsupportedError(
                f"{key}: compressed attention on a GPU needs heads of a power of two of columns, got {head_dim}; place "
                "it on cpu"
            )
        return head_eps, key_norm.eps


class GpuCompressed:
    """Compressed attention of one layer on its GPU, its children loaded: [T, hidden] to what the output's last
    projection reads.

    inner: the module. o_a: [groups, columns, R] in the device's type. biases: those of positions of the compressor and
    of the indexer, fp32 on the device. max_len: most positions of a sequence.
    """

    def __init__(
        self,
        inner: Any,
        key: str,
        spec: CompressedSpec,
        o_a: torch.Tensor,
        biases: list[torch.Tensor],
        device: Device,
        max_len: int,
    ):
        self._inner, self._spec, self._o_a, self._device = inner, spec, o_a, device
        indexer: Any = None if spec.indexer is None else spec.indexer.module
        self._key_norm = device.move(inner.kv_norm.weight), spec.key_eps
        series = [each for each in (spec.compressor, spec.indexer) if each is not None]
        self._entries = [each.entries(bias, device, key) for each, bias in zip(series, biases, strict=True)]
        self._choosing: Choosing | None = None
        rate, most = (self._entries[0].rate, max_len // self._entries[0].rate) if series else (0, 0)
        if indexer is not None and most > int(indexer.index_topk):  # else a row sees all of them
            most = int(indexer.index_topk)
            scale, head_scale = float(indexer.scorer.softmax_scale), float(indexer.scorer.weights_scaling)
            self._choosing = Choosing(self._entries[1], most, scale, head_scale, int(indexer.num_heads))
        sinks = device.move(inner.sinks.detach().float())
        self._attending = Attending(spec.window, spec.units, rate, most, float(inner.scaling), sinks)
        self._narrow = JoinedLinears([inner.q_a_proj, inner.kv_proj])
        of_hidden = [part for each in series for part in (each.module.kv_proj, each.module.gate_proj)]
        of_query = [inner.q_b_proj]
        if self._choosing is not None:
            of_hidden.append(indexer.scorer.weights_proj)
            of_query.append(indexer.q_b_proj)
        self._values = JoinedLinears(of_hidden) if series else None
        self._queries = JoinedLinears(of_query)

    def __call__(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], context: ForwardContext, keys: torch.Tensor
    ) -> torch.Tensor:
        """[1, T, groups R] of rows [T, hidden]. angles: cos and sin [T, P / 2]. context: on the device of keys [slots,
        1, columns], to which what the rows leave is written."""
        use(keys.device)
        spec, slots = self._spec, context.slot_mapping
        pages = context.pages
        compressed, key = self._narrow(x)
        residual = self._inner.q_a_norm(compressed[None])[0]
        made = self._values(x) if self._values is not None else []
        queries = [
            part.view(len(x), heads, -1) for part, heads in zip(self._queries(residual), self._heads, strict=True)
        ]
        turn(key[:, None], *angles, norm=self._key_norm, cache=keys, slot_mapping=slots)
        for i, each in enumerate(self._entries):
            keep_values(made[2 * i], made[2 * i + 1], keys[:, 0], each.values, slots)
            make_entries(keys[:, 0], each, slots, pages)
        chosen = None
        if self._choosing is not None:
            weights = made[-1].float() * self._choosing.head_scale
            chosen = self._choosing.choose(turn(queries.pop(), *angles).to(keys.dtype), weights, keys[:, 0], pages)
        self._device.time_part("attention")
        # The largest tensors of a step: of a long one, each goes as soon as the next is there.
        query = turn(queries.pop(), *angles, norm=(None, spec.head_eps)).to(keys.dtype)
        out = self._attending.attend(query, keys, pages, chosen)
        del query
        out = turn(out, *angles, is_back=True)
        self._device.time_part("linear")
        groups, columns, _ = self._o_a.shape
        return grouped_product(out.view(-1, groups, columns), self._o_a).view(1, len(x), -1)

    def keep_keys(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], context: ForwardContext, keys: torch.Tensor
    ) -> None:
        """Write the keys of rows [T, hidden] alone, otherwise as a call."""
        use(keys.device)
        _, key = self._narrow(x)
        turn(key[:, None], *angles, norm=self._key_norm, cache=keys, slot_mapping=context.slot_mapping)

    @property
    def _heads(self) -> list[int]:
        """Heads of what `_queries` makes."""
        return [self._spec.num_heads] + ([] if self._choosing is None else [self._choosing.num_heads])

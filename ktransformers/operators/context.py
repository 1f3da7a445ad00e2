"""The record by which operators know which rows of a flattened step belong to which sequence.

A step carries the tokens of all its sequences in one row axis: `input_ids [1, T]`, `position_ids [1, T]`. The engine
builds a ForwardContext per step; Hugging Face modules hand it down as the keyword argument `forward_context`.

    T rows (tokens) of this step, S sequences, P pages per sequence at most

    slot_mapping[t]            cache slot that row t's key and value are written to
    seq_ids[t]                 which row of block_table belongs to row t
    kv_lens[t]                 positions row t attends to, itself included (its position + 1)
    block_table[s, p]          page that holds positions p * page_size .. (p + 1) * page_size - 1 of sequence s
    states                     which states recurrent layers continue (kernels.types.StateStep); None without them
    token_ids[t]               row t's token, where layers that look it up get hidden states; None where they get ids
    turned[t]                  row t's rotary position, where it may be another than kv_lens[t] - 1; None: it is not
    pictures                   which rows show parts of pictures (PictureRows); None where none does
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

from ktransformers.cache.paged import LayerShape, Scales
from ktransformers.cache.state import StateCache
from ktransformers.core import Phase
from ktransformers.kernels.attention_call import RowPages
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.types import StateStep

__all__ = ["ForwardContext", "LayerCache", "PictureRows", "StateStep"]

_T = TypeVar("_T")


class LayerCache(Protocol):
    """Cache in which layers keep keys and values: [slots, kv_heads, key_dim] and [slots, kv_heads, value_dim] each.

    For MLA the cache stores the latent: kv_heads is 1, key_dim is kv_lora_rank + qk_rope_head_dim, and `values` is a
    view of the first kv_lora_rank columns of `keys`.
    """

    @property
    def states(self) -> StateCache | None:
        """States of recurrent layers; None where no layer is recurrent."""
        ...

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a layer."""
        ...

    def scales(self, layer_idx: int) -> Scales:
        """Return the scales of a layer's keys and values of 8 bits, see cache.paged."""
        ...

    def shape(self, layer_idx: int) -> LayerShape:
        """Return what a layer caches, and whose it is."""
        ...

    def index_keys(self, layer_idx: int) -> torch.Tensor:
        """Return the keys of a layer's indexer, [slots, index_dim]."""
        ...

    def is_on_gpu(self, layer_idx: int) -> bool:
        """Whether kernels of a GPU are to read a layer's keys and values."""
        ...


@dataclass(frozen=True, slots=True)
class PictureRows:
    """The N rows of a step that show parts of pictures. It may have none of them, and positions of three axes.

    rows: int64 [N], ascending. hidden: [N, H], in place of what the embedding has for tokens. by_layer: [N, H] each, to
    be added to the hidden states of these rows behind the layers of these numbers (deepstack); -1: in front of the
    first. ends: int32 [T], where rows of the step see all of their picture, or of their prompt: positions up to the end
    of that, for others up to their own; None: no row sees what is behind it. ends_in_full, ends_in_windows: which
    layers that is true of: those that see all positions, and those that see the last ones, counted from the row's own.
    starts: int32 [T], the first position of its picture, or its own, which a row sees where its window begins behind
    that, too; None: it does not. pool_starts: int64 [3, T], rotary positions of the first positions of pools that rows
    end, where layers have pools. routed: int64 [M], ascending, rows that are routed to experts for pictures; None:
    layers have no such. added_to: the token whose embedding `hidden` is added to; None: it takes its place. gaps: int64
    [2, G], sequences of the step and positions between pictures that rows in front of them do not see; None: there are
    none.
    """

    rows: torch.Tensor
    hidden: torch.Tensor
    by_layer: Mapping[int, torch.Tensor] = field(default_factory=dict)
    ends: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    pool_starts: torch.Tensor | None = None
    ends_in_full: bool = False
    ends_in_windows: bool = False
    routed: torch.Tensor | None = None
    added_to: int | None = None
    gaps: torch.Tensor | None = None

    @property
    def is_planned(self) -> bool:
        """Whether layers do more with these rows than add to them, by what the host knows of each step."""
        return any(part is not None for part in (self.ends, self.pool_starts, self.routed))

    def to(self, device: torch.device) -> PictureRows:
        """Return the same on `device`, for its layers: without what only the embedding's place needs."""
        by_layer = {layer: part.to(device) for layer, part in self.by_layer.items()}
        names = ("ends", "starts", "pool_starts", "gaps")
        moved = {name: part.to(device) for name in names if (part := getattr(self, name)) is not None}
        return replace(self, rows=self.rows.to(device), by_layer=by_layer, **moved)

    def block(self, rows: slice) -> PictureRows | None:
        """Return what attention of some rows knows, of a step whose rows see no picture as a whole."""
        if self.pool_starts is None:
            return None
        return PictureRows(self.rows[:0], self.hidden[:0], pool_starts=self.pool_starts[:, rows].clone())

    def add_behind(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [1, T, H] or [T, H] behind layer `layer`, with what is added to them there. -1: in
        front of the first one."""
        if layer not in self.by_layer:
            return hidden_states
        more = self.by_layer[layer].to(hidden_states.device, hidden_states.dtype)
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return flat.index_add(0, self.rows.to(hidden_states.device), more).view(hidden_states.shape)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Rows, sequences and cache of one step, for operators; see the module's docstring. Built by `engine.step.context`
    on the CPU; `replicated` puts it on other devices too.

    is_replayable: the step is, or may be, captured in a CUDA graph, so that nothing about it may be planned on the
    host, and its tensors are on its device alone. replicas: the same step on other devices. blocks: the same step in
    parts, whose rows attention and layers with a state take one part after another, as if they were steps; none where
    they take it whole.
    """

    cache: LayerCache
    pool: WorkerPool
    phase: Phase
    page_size: int
    slot_mapping: torch.Tensor  # int64 [T]
    seq_ids: torch.Tensor  # int32 [T]
    kv_lens: torch.Tensor  # int32 [T]
    block_table: torch.Tensor  # int32 [S, P]
    states: StateStep | None = None
    token_ids: torch.Tensor | None = None  # int64 [T]
    turned: torch.Tensor | None = None  # int64 [T]
    pictures: PictureRows | None = None
    is_replayable: bool = False
    replicas: Mapping[torch.device, ForwardContext] = field(default_factory=dict)
    blocks: tuple[ForwardContext, ...] = ()
    _moved: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _derived: dict[tuple[str, int], tuple[torch.Tensor, Any]] = field(default_factory=dict)

    @property
    def pages(self) -> RowPages:
        """The part of the cache that the rows see, as kernels of attention take it."""
        return RowPages(self.block_table, self.page_size, self.seq_ids, self.kv_lens)

    def on(self, device: torch.device) -> ForwardContext:
        """Return the context with its tensors on `device`. Raises KeyError when the step was not made ready for it."""
        return self if self.slot_mapping.device == device else self.replicas[device]

    def replicated(self, devices: Iterable[torch.device]) -> ForwardContext:
        """Return a copy that `on` has for each of `devices`."""
        replicas = {device: self._copy(device) for device in devices if device != self.slot_mapping.device}
        blocks = tuple(block.replicated(replicas) for block in self.blocks)
        return replace(self, replicas=replicas, blocks=blocks, _moved={}, _derived={})

    def in_blocks(self, most: int) -> ForwardContext:
        """Return a copy with blocks of at most so many rows. Its tensors are on the CPU; the rows of a sequence are
        neighbours, and sequences in the order of block_table.
        """
        num_rows = len(self.slot_mapping)
        parts = (slice(at, min(at + most, num_rows)) for at in range(0, num_rows, most))
        return replace(self, blocks=tuple(map(self._block, parts)))

    def _block(self, rows: slice) -> ForwardContext:
        seqs = slice(int(self.seq_ids[rows.start]), int(self.seq_ids[rows.stop - 1]) + 1)
        kv_lens = self.kv_lens[rows].clone()
        return replace(
            self,
            slot_mapping=self.slot_mapping[rows].clone(),
            seq_ids=self.seq_ids[rows] - seqs.start,
            kv_lens=kv_lens,
            block_table=self.block_table[seqs].clone(),
            states=None if self.states is None else self.states.part(rows, seqs, kv_lens),
            token_ids=None if self.token_ids is None else self.token_ids[rows].clone(),
            turned=None if self.turned is None else self.turned[rows].clone(),
            pictures=None if self.pictures is None else self.pictures.block(rows),
            _moved={},
            _derived={},
        )

    def _copy(self, device: torch.device) -> ForwardContext:
        moved = {name: getattr(self, name).to(device) for name in ("slot_mapping", "seq_ids", "kv_lens", "block_table")}
        states = None if self.states is None else self.states.to(device, moved["kv_lens"])
        ids, turned = (None if part is None else part.to(device) for part in (self.token_ids, self.turned))
        pictures = None if self.pictures is None else self.pictures.to(device)
        return replace(
            self,
            **moved,
            states=states,
            token_ids=ids,
            turned=turned,
            pictures=pictures,
            replicas={},
            blocks=(),
            _moved={},
            _derived={},
        )

    def moved(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return `tensor` on `device`, copied once per step however many layers ask."""
        if tensor.device == device:
            return tensor
        key = (id(tensor), device)
        if key not in self._moved:
            self._moved[key] = (tensor, tensor.to(device))  # holding the original keeps its id its own
        return self._moved[key][1]

    def forget_derived(self) -> None:
        """Forget what was made of the tensors: for a step whose tensors are written in place for the next one."""
        self._moved.clear()
        self._derived.clear()

    def derived(self, what: str, tensor: torch.Tensor, make: Callable[[torch.Tensor], _T]) -> _T:
        """Return `make(tensor)`, made once per step however many layers ask. what: names it; all that ask for a name of
        one tensor must want the same.
        """
        key = (what, id(tensor))
        if key not in self._derived:
            self._derived[key] = (tensor, make(tensor))
        made: _T = self._derived[key][1]
        return made

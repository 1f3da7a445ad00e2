"""The record that tells operators which rows of a flattened step belong to which sequence.

A step carries the tokens of all its sequences in one row axis: `input_ids [1, T]`, `position_ids [1, T]`. The engine
builds a ForwardContext per step; Hugging Face modules hand it down as the keyword argument `forward_context`.

    T rows (tokens) of this step, S sequences, P pages per sequence at most

    slot_mapping[t]            cache slot that row t's key and value are written to
    seq_ids[t]                 which row of block_table belongs to row t
    kv_lens[t]                 positions row t attends to, itself included (its position + 1)
    block_table[s, p]          page that holds positions p * page_size .. (p + 1) * page_size - 1 of sequence s
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ktransformers.core import Phase
from ktransformers.kernels.native import WorkerPool

__all__ = ["ForwardContext", "LayerCache"]


class LayerCache(Protocol):
    """Where one layer's keys and values live: fp32 [slots, kv_heads, key_dim] and [slots, kv_heads, value_dim].

    For MLA the cache stores the latent: kv_heads is 1, key_dim is kv_lora_rank + qk_rope_head_dim, and `values` is a
    view of the first kv_lora_rank columns of `keys`.
    """

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """See the module's docstring. All tensors are int64 or int32 on the CPU; built by `engine.context`."""

    cache: LayerCache
    pool: WorkerPool
    phase: Phase
    page_size: int
    slot_mapping: torch.Tensor  # int64 [T]
    seq_ids: torch.Tensor  # int32 [T]
    kv_lens: torch.Tensor  # int32 [T]
    block_table: torch.Tensor  # int32 [S, P]

"""The indexer of MiniMax-M3: for each KV head it chooses blocks of positions that its query heads attend to.

    T rows, H index heads (as many as KV heads), D columns of one, P rotary columns

score[t, h, b] = max over positions j of block b of q[t, h] . k[j]. The index_topk_blocks best blocks are chosen, of
equal scores the lower ones, the last index_local_blocks always. Keys k, one for all heads, are cached beside the
layer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.attention_call import TopkCall
from ktransformers.kernels.triton.attention.rope import rope_to_cache
from ktransformers.kernels.triton.attention.topk_positions import select_topk_positions as triton_choose
from ktransformers.operators.attention.rotation import rotated_columns
from ktransformers.operators.attention.sparse_indexer import SparseIndexer
from ktransformers.operators.attention.topk_positions import TopkPositions
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import use
from ktransformers.operators.recognize.block_indexer import BlockSpec, recognize_block_indexer

__all__ = ["BlockIndex", "KBlockIndexer"]


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """Inputs of a step's choice of blocks: normed queries [T, H, D] and keys [T, 1, D], and angles [T, P].

    Angles are given twice side by side; the first P columns are rotated in halves.
    """

    q: torch.Tensor
    k: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    spec: BlockSpec

    def choose(self, context: ForwardContext, layer_idx: int) -> TopkPositions | None:
        """Cache the keys; return what rows and heads attend to, the heads of a row side by side.

        None where all of them see so few positions that they take them all. context: on the device of the cache.
        """
        keys, spec = context.cache.index_keys(layer_idx), self.spec
        pages = context.pages
        if context.cache.is_on_gpu(layer_idx):
            q, longest = self._cached_on_gpu(keys, context), pages.room
        else:
            angles = self.cos[..., : self.cos.shape[-1] // 2], self.sin[..., : self.sin.shape[-1] // 2]
            q = rotated_columns(self.q, *angles).contiguous()
            keys[context.slot_mapping] = rotated_columns(self.k, *angles)[:, 0]
            longest = int(pages.kv_lens.max()) if len(q) else 0
        if longest <= spec.num_chosen * spec.block:
            return None
        call = TopkCall(q, None, keys, pages, 1.0, spec.num_chosen, block=spec.block, num_local=spec.num_local)
        if context.cache.is_on_gpu(layer_idx):
            return TopkPositions(*triton_choose(call))
        return TopkPositions(*cpu.select_topk_positions(call, context.pool))

    def _cached_on_gpu(self, keys: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Writes the keys; returns the rotated queries."""
        use(keys.device)
        rotary, cache = self.cos.shape[-1], keys[:, None]
        if rotary == self.k.shape[-1]:
            raise UnsupportedError(
                "an indexer that rotates all of its columns is not supported on a GPU; place it on cpu"
            )
        # What is not rotated goes to the cache as "values", which it would anyway: the kernel wants some.
        return rope_to_cache(
            self.q, self.k, self.k[..., rotary:], self.cos, self.sin, cache, cache[..., rotary:], context.slot_mapping,
            rotary_dim=rotary, q_out=torch.empty(self.q.shape, dtype=keys.dtype, device=keys.device),
        )  # fmt: skip


class KBlockIndexer(SparseIndexer):
    """Makes the queries and keys by which blocks are chosen; the attention that it is a child of makes the choice."""

    OPS: ClassVar[dict[str, str]] = {
        "KBlockIndexerNative": "native scores and choice",
        "KBlockIndexerTriton": "Triton scores, torch's choice",
    }

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        if not self.is_used:
            return
        spec = recognize_block_indexer(module)
        if spec is None:
            raise UnsupportedError(
                f"{key} ({type(module).__name__}) is no indexer that KBlockIndexer knows; --sparse_attention off runs "
                "the model without it, attending to all positions"
            )
        self.spec, self.index_dim = spec, spec.head_dim

    @override
    def op(self, phase: Phase) -> str:
        return "KBlockIndexerTriton" if self.device.is_gpu else "KBlockIndexerNative"

    @override
    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, *args: Any, **kwargs: Any
    ) -> BlockIndex | None:
        """Return what the module's attention passes to the attention function as block_indices; None: all positions."""
        if not self.is_used:
            return None
        inner: Any = self.inner
        spec = self.spec
        q = inner.q_norm(inner.q_proj(hidden_states).view(-1, spec.num_heads, spec.head_dim))
        k = inner.k_norm(inner.k_proj(hidden_states).view(-1, 1, spec.head_dim))
        cos, sin = (part[0, :, : spec.head_dim] for part in position_embeddings)
        return BlockIndex(q, k, cos, sin, spec)

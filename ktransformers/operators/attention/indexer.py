"""The lightning indexer of DeepSeek-V3.2 and GLM-5: it chooses the positions that latent attention attends to.

    T rows, H index heads, D columns of one, of which the first P are rotated

    score[t, j] = sum_h w[t, h] max(q[t, h] . k[j] / sqrt(D), 0)        w = weights_proj(x) / sqrt(H)

The best index_topk positions are chosen, of equal scores the lower ones. Keys k, one for all heads, are cached beside
the latents. The published code turns q and k by a Hadamard matrix before it rounds them to FP8; that keeps dot products
and nothing is rounded here, so it is left out, as in transformers.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.attention_call import TopkCall
from ktransformers.kernels.triton.attention.rope import rope_to_cache
from ktransformers.kernels.triton.attention.topk_positions import select_topk_positions
from ktransformers.operators.attention.rotation import rotated_columns
from ktransformers.operators.attention.sparse_indexer import SparseIndexer
from ktransformers.operators.attention.topk_positions import TopkPositions
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import use
from ktransformers.operators.recognize.indexer import recognize_indexer

__all__ = ["KIndexer"]


class KIndexer(SparseIndexer):
    """Chooses positions for the latent attention that it is a child of; its projections are operators of their own."""

    OPS: ClassVar[dict[str, str]] = {
        "KIndexerNative": "native scores and choice",
        "KIndexerTriton": "Triton scores, torch's choice",
    }

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        if not self.is_used:
            return
        spec = recognize_indexer(module)
        if spec is None:
            raise UnsupportedError(
                f"{key} ({type(module).__name__}) is no indexer that KIndexer knows; --sparse_attention off runs the "
                "model without it, attending to all positions"
            )
        if spec.num_heads > cpu.MAX_INDEX_HEADS:
            raise UnsupportedError(f"{key} has {spec.num_heads} heads; up to {cpu.MAX_INDEX_HEADS} are supported")
        if self.device.is_gpu and spec.rotary_dim == spec.head_dim:
            raise UnsupportedError(
                f"{key} rotates all of its columns, which is not supported on a GPU; place it on cpu"
            )
        self.spec, self.index_dim = spec, spec.head_dim

    @override
    def op(self, phase: Phase) -> str:
        return "KIndexerTriton" if self.device.is_gpu else "KIndexerNative"

    def choose(
        self,
        x: torch.Tensor,
        query: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        context: ForwardContext,
        keys: torch.Tensor,
    ) -> TopkPositions | None:
        """Choose what the rows attend to; None where all of them see so few positions that they take them all.

        x: [1, T, hidden]. query: the compressed query, [1, T, q_lora_rank]. angles: cos and sin [T, P / 2]. context: on
        the device of keys [slots, D], this layer's, to which those of x are written.
        """
        inner, spec = self.inner_module, self.spec
        q = inner.wq_b(query).view(-1, spec.num_heads, spec.head_dim)
        k = inner.k_norm(inner.wk(x)).view(-1, 1, spec.head_dim)
        q, k = (spec.rotated_first(part) for part in (q, k))
        weights = inner.weights_proj(x)[0].float() * spec.head_scale
        if self.device.is_gpu:
            return self._choose_on_gpu(q, k, weights, angles, context, keys)
        q, k = (rotated_columns(part, *angles, is_interleaved=spec.is_interleaved) for part in (q, k))
        keys[context.slot_mapping] = k[:, 0]
        if not len(q) or int(context.kv_lens.max()) <= spec.num_chosen:
            return None
        call = TopkCall(q, weights.contiguous(), keys, context.pages, spec.scale, spec.num_chosen)
        return TopkPositions(*cpu.select_topk_positions(call, self.config.require_pool()))

    @property
    def inner_module(self) -> Any:
        """Return the wrapped module, for its children."""
        return self.inner

    def _choose_on_gpu(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        context: ForwardContext,
        keys: torch.Tensor,
    ) -> TopkPositions | None:
        """How long sequences are is known on the device alone, so that steps can be replayed."""
        use(keys.device)
        spec, rotary = self.spec, self.spec.rotary_dim
        cache = keys[:, None]
        # What is not rotated goes to the cache as "values", which it would anyway: the kernel wants some.
        q = rope_to_cache(
            q, k, k[..., rotary:], *angles, cache, cache[..., rotary:], context.slot_mapping,
            rotary_dim=rotary, is_interleaved=spec.is_interleaved,
            q_out=torch.empty(q.shape, dtype=keys.dtype, device=keys.device),
        )  # fmt: skip
        pages = context.pages
        if pages.room <= spec.num_chosen:
            return None
        return TopkPositions(*select_topk_positions(TopkCall(q, weights, keys, pages, spec.scale, spec.num_chosen)))

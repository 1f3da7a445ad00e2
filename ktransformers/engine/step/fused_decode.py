"""The forward pass of a model whose decoder layers are one native call, without the model's own code around them.

The code of `transformers` that leads from tokens to layers and from there to logits (masks, records of outputs,
checks) takes 0.7 ms a step, whatever the step: the caches are cold each time. What the usual model computes there is

    rows = embedding(tokens); angles = rotation(positions); rows = layers(rows, angles); logits = head(norm(rows))

Whether a model does just that is found by computing it both ways: the logits are the same, bit for bit, or the model
keeps its own code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.cache.paged import LayerShape
from ktransformers.engine.model.mtp import MtpInput
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.engine.step.hidden import LastHiddenHook
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.expert_store import ReadError
from ktransformers.operators.attention.rope import KRotaryEmbedding
from ktransformers.operators.layers.native_stack import NativeStack
from ktransformers.operators.layers.traced import PROBE_ROWS, layer_list, probe_context, probe_ids, probe_logits
from ktransformers.operators.linear.embedding import KEmbedding
from ktransformers.operators.linear.linear import KTransformersLinear
from ktransformers.operators.norm import KRMSNorm
from ktransformers.operators.recorder import is_watched

__all__ = ["FusedDecode", "find_fused_decode"]

logger = logging.getLogger(__name__)

_KINDS = (KEmbedding | MtpInput, KRotaryEmbedding, KRMSNorm)


@dataclass(frozen=True, slots=True, eq=False)
class FusedDecode:
    """A step on the CPU that calls the native layers directly, without the model's own Python forward.

    watched: modules whose forward it skips; while one of them is watched, the model's own forward runs instead.
    """

    embedding: nn.Module
    rotation: nn.Module
    layers: nn.Module
    norm: nn.Module
    head: KTransformersLinear
    watched: tuple[nn.Module, ...]

    @property
    def is_wanted(self) -> bool:
        """Whether nothing watches what the model's own code does."""
        return not any(map(is_watched, self.watched))

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: the tokens that have logits."""
        assert self.head.native is not None, "a head that is not loaded"
        return self.head.native[0].shape[0]

    def logits(
        self,
        batch: ForwardBatch,
        meanwhile: Callable[[], None] | None = None,
        last_hidden: LastHiddenHook | None = None,
    ) -> Tensor:
        """Run a step on the CPU; return its logits, fp32 [N, vocab_size].

        meanwhile: called right before the layers, the one part that leaves Python to others for long. last_hidden:
        keeps all rows behind the norm, or in front of it.
        """
        rows: Tensor = self.embedding(batch.token_ids[None])
        angles = self.rotation(rows, batch.positions[None])
        if meanwhile is not None:
            meanwhile()
        rows = self.layers(rows, forward_context=batch.context, position_embeddings=angles)
        norms_all = last_hidden is not None and last_hidden.is_normed
        if norms_all:
            rows = self.norm(rows)
        if last_hidden is not None:
            last_hidden.keep(rows[0])
        keep = batch.keep
        kept = rows if keep.shape[0] == rows.shape[1] == 1 else rows[:, keep]  # len() of a tensor is slow Python
        logits: Tensor = self.head(kept if norms_all else self.norm(kept))
        return logits[0]


@torch.inference_mode()
def find_fused_decode(model: Any, shapes: list[LayerShape], pool: WorkerPool, longest: int) -> FusedDecode | None:
    """Build the fused step of a loaded model that is all on the CPU; None where its layers do not allow one.

    longest: most positions of a sequence.
    """
    short = _parts(model)
    if short is None:
        return None
    ids = probe_ids(short.vocab_size)
    for first, keep in ((0, [0, PROBE_ROWS - 1]), (max(longest - PROBE_ROWS, 0), list(range(PROBE_ROWS)))):
        positions, kept = torch.arange(PROBE_ROWS) + first, torch.tensor(keep)
        try:
            got = short.logits(ForwardBatch(ids, positions, probe_context(shapes, pool, PROBE_ROWS), kept)).clone()
        except ReadError:
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            logger.debug("the model keeps its own forward: %s", error)
            return None
        want = probe_logits(model, shapes, pool, ids, positions, kept)
        if not torch.equal(got, want):
            logger.debug("the model keeps its own forward, which computes something else")
            return None
    return short


def _parts(model: Any) -> FusedDecode | None:
    """The parts of a model of the usual kind, by what they are: native ones, which nothing has to watch over
    (operators/exact.py)."""
    layers, head = layer_list(model), getattr(model, "lm_head", None)
    base = getattr(model, "base_model", None)
    if layers is None or len(layers) != 1 or not isinstance(layers[0], NativeStack) or head is None or base is None:
        return None
    inner = getattr(base, "inner", base)
    if not isinstance(head, KTransformersLinear) or head.native is None:
        return None
    found = [[child for child in inner.children() if isinstance(child, kind)] for kind in _KINDS]
    if any(len(children) != 1 for children in found):
        return None
    embedding, rotation, norm = (children[0] for children in found)
    if not isinstance(norm, KRMSNorm) or norm.spec is None:
        return None
    return FusedDecode(embedding, rotation, layers[0], norm, head, tuple({model, base, inner}))

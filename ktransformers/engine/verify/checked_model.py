"""A loaded model that is checked: its steps on a cache of their own, which rounds nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ktransformers.cache.paged import LayerShape
from ktransformers.cache.static import StaticCache
from ktransformers.engine.step.context import ForwardBatch, static_context
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.layout import StepLayout
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.kernels.cpu import WorkerPool

__all__ = ["CheckedModel"]


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A loaded causal LM, its operators in place, with what its steps take. shapes: of its cache, layer by layer."""

    model: Any
    shapes: list[LayerShape]
    pool: WorkerPool
    layout: StepLayout

    def cache(self, max_len: int) -> StaticCache:
        """Return an empty cache for one sequence of `max_len` tokens, in types that round nothing."""
        return StaticCache([shape.unrounded() for shape in self.shapes], max_len)

    def step(self, ids: torch.Tensor, cache: StaticCache, start: int, keep: torch.Tensor) -> torch.Tensor:
        """Run a step of tokens, int64 [T], behind the `start` that are cached; return the logits of the rows that are
        kept, int64 [N] -> [N, vocab].
        """
        runner = ModelRunner(ForwardPass(self.model, self.pool, self.layout, announce=False))
        context = static_context(cache, self.pool, start, len(ids))
        return runner.step(ForwardBatch(ids, torch.arange(start, start + len(ids)), context, keep))

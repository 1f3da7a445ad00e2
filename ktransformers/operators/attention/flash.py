"""Prefill attention on a GPU by FlashInfer: planned once a step and shape, run by every layer of that shape.

A step's splitting follows from its context on the CPU, which eager steps have beside its replicas on the GPU. Knows
contexts and shapes; not who chose FlashInfer (engine/plan/attention.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ktransformers.core import Phase
from ktransformers.kernels.flashinfer import FlashInfer, PageTable, Shape, pages_of
from ktransformers.operators.context import ForwardContext

__all__ = ["Attend", "FlashLayer", "FlashSteps"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [T, Hq, Dk] and a layer's cache, keys and values [slots, Hkv, D], to the rows' results [T, Hq, Dv]."""


class FlashSteps:
    """FlashInfer and its plans for the step that runs, shared by the layers on one device."""

    def __init__(self, kernels: FlashInfer):
        self.kernels = kernels
        self._step: Tensor | None = None  # of the step that was planned last; each has tensors of its own
        self._pages: PageTable | None = None
        self._planned: set[Shape] = set()

    def plan(self, shape: Shape, context: ForwardContext) -> None:
        """Prepare a step for layers of `shape`, if no layer has yet. context: with tensors on the CPU."""
        if self._step is not context.seq_ids or self._pages is None:
            self._pages = pages_of(context.seq_ids, context.kv_lens, context.block_table, context.page_size)
            self._step = context.seq_ids
            self._planned.clear()
        if shape not in self._planned:
            self.kernels.plan(shape, self._pages)
            self._planned.add(shape)


@dataclass(frozen=True, slots=True)
class FlashLayer:
    """FlashInfer for layers of one shape. is_required: in all prefill steps, whatever else might be faster."""

    shape: Shape
    steps: FlashSteps
    is_required: bool = False

    def of(self, context: ForwardContext) -> Attend | None:
        """Return how a layer attends in the step of `context`, as the model was given it; None: with the Triton
        kernels.

        Steps that CUDA graphs replay have contexts with nothing on the CPU.
        """
        if context.phase is not Phase.PREFILL or context.is_replayable:
            return None
        self.steps.plan(self.shape, context)
        return lambda q, keys, values: self.steps.kernels.run(self.shape, q, keys, values)

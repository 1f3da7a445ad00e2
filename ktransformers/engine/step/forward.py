"""The forward pass of a loaded model, on inputs where it wants them. Knows no sequences, no padding, no graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.engine.step.context import ForwardBatch
from ktransformers.engine.step.fused_decode import FusedDecode
from ktransformers.engine.step.hidden import LastHiddenHook
from ktransformers.engine.step.layout import StepLayout
from ktransformers.engine.step.lookup import TokenLookup
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import CPU
from ktransformers.operators.exact import NativeMathMode, modules_on_torch
from ktransformers.operators.layers.pictures import adding_pictures, is_later_stage

__all__ = ["ForwardPass", "StepInputs", "batched_positions", "shown_tokens"]

logger = logging.getLogger(__name__)

_USUAL = "rotary_emb.inner"
"""A module that computes a table with a few products in most families: that is worth no line."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step on the devices of the layers.

    hidden_states: [1, T, width], what the layout's embedding gave, and positions int64 [1, T], or [3, 1, T] of three
    axes, on the first layer's device; keep: int64 [N] rows, on the last layer's. context: replicated on all of them.
    """

    hidden_states: Tensor
    positions: Tensor
    keep: Tensor
    context: ForwardContext


class ForwardPass:
    """A loaded model's forward, which steps of every kind share.

    layout: the devices of its layers, None where all are on the CPU. announce: whether modules that keep torch's
    forward get a line in the log. short: what steps on the CPU take, where a model has it. last_hidden: the
    forward hook that keeps the hidden states of each step for a drafter; None without one. math: what
    modules that keep torch's code run in. block_rows: steps of more rows on GPUs attend in blocks of so many
    (ForwardContext.blocks); 0: none does.
    """

    def __init__(self, model: Any, pool: WorkerPool, layout: StepLayout | None = None, *, announce: bool = True):
        self.model, self.pool = model, pool
        self.short: FusedDecode | None = None
        self.last_hidden: LastHiddenHook | None = None
        self.block_rows = 0
        self.layout = None if layout is None or layout.is_cpu else layout
        self._whole_layout = layout
        self.lookup = None if self.layout is None else TokenLookup(self.layout)
        left = modules_on_torch(model) if self.layout is None or CPU in self.layout.devices else []
        unusual = [name for name in left if not name.endswith(_USUAL)]
        if unusual and announce:
            more = f" and {len(unusual) - 1} more modules keep" if unusual[1:] else " keeps"
            logger.info("%s%s the model's own forward, on native products", unusual[0] or "the model", more)
        self.math: AbstractContextManager[Any] = NativeMathMode(pool) if left else nullcontext()

    @property
    def embedding(self) -> nn.Module:
        """The model's embedding: int64 [...] ids on the CPU -> [..., H], without what single layers look up."""
        if self.layout is not None:
            return self.layout.table
        base = self.model.base_model
        found: nn.Module = getattr(base, "inner", base).get_input_embeddings()
        return found

    def on_cpu(self, batch: ForwardBatch, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """Run a step on the CPU; return its logits, fp32 [N, vocab_size].

        meanwhile: called once before the layers. To be called in inference mode, which takes a while to enter.
        """
        has_pictures = batch.context.pictures is not None
        if not has_pictures and self.short is not None and self.short.is_wanted:
            return self.short.logits(batch, meanwhile, self.last_hidden)
        if meanwhile is not None:
            meanwhile()
        if has_pictures:
            return self._with_pictures(batch)
        tokens, positions = batch.token_ids[None], batch.positions[None]
        return self._logits(input_ids=tokens, positions=positions, keep=batch.keep, context=batch.context)

    def _with_pictures(self, batch: ForwardBatch) -> Tensor:
        """`on_cpu` of a step that shows pictures, by the model's own forward."""
        layout = self._whole_layout
        assert layout is not None, "only models that were planned show pictures"
        token_ids = shown_tokens(batch)
        context = replace(batch.context, token_ids=token_ids)
        embedded = self.shown(TokenLookup(layout).on_host(token_ids, context), context)
        tokens = layout.split(embedded[None])
        return self._logits(positions=batched_positions(batch.positions), keep=batch.keep, context=context, **tokens)

    def shown(self, embedded: Tensor, context: ForwardContext) -> Tensor:
        """Return what the embedding gave, [T, width], with pictures in their rows, unless another stage gave it."""
        pictures = context.pictures
        if pictures is None or is_later_stage(self.model):
            return embedded
        hidden = pictures.hidden.to(embedded.device, embedded.dtype)
        embedded, rows = embedded.clone(), pictures.rows.to(embedded.device)  # some tables lend their memory
        if pictures.added_to is not None:
            hidden = hidden + embedded[rows, : hidden.shape[-1]]
        embedded[rows, : hidden.shape[-1]] = hidden
        return embedded

    @torch.inference_mode()
    def inputs_of(self, batch: ForwardBatch) -> StepInputs:
        """Bring a step to the GPU: rows are looked up where the table is, then everything moves once."""
        layout = self.layout
        assert layout is not None, "steps on the CPU stay there"
        assert self.lookup is not None, "it is there where the layout is"
        token_ids = shown_tokens(batch)
        context = replace(batch.context, token_ids=token_ids)
        if 0 < self.block_rows < len(batch):
            context = context.in_blocks(self.block_rows)
        return StepInputs(
            hidden_states=self.shown(self.lookup(token_ids, context), context)[None],
            positions=layout.entry.move(batched_positions(batch.positions)),
            keep=layout.last.move(batch.keep),
            context=context.replicated(device.torch_device for device in layout.devices),
        )

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> Tensor:
        """Run a step from inputs that are on the GPU to logits [N, vocab_size] there. What a graph captures."""
        assert self.layout is not None, "steps on the CPU have no inputs elsewhere"
        for device in self.layout.devices:
            if device.is_gpu:
                device.begin_step(inputs.context.on(device.torch_device).slot_mapping)
                device.time_part("other", -1)
        tokens = self.layout.split(inputs.hidden_states)
        return self._logits(positions=inputs.positions, keep=inputs.keep, context=inputs.context, **tokens)

    def _logits(self, *, positions: Tensor, keep: Tensor, context: ForwardContext, **tokens: Tensor) -> Tensor:
        kept = nullcontext() if self.last_hidden is None else self.last_hidden.open()
        with self.math, kept, adding_pictures(self.model, context):
            output = self.model(
                **tokens, position_ids=positions, use_cache=False, logits_to_keep=keep, forward_context=context
            )
        logits: Tensor = output.logits[0]
        return logits


def shown_tokens(batch: ForwardBatch) -> Tensor:
    """Return the tokens of a step, int64 [T], where rows of pictures have the one that they are added to."""
    pictures = batch.context.pictures
    if pictures is None or pictures.added_to is None:
        return batch.token_ids
    return batch.token_ids.index_fill(0, pictures.rows, pictures.added_to)


def batched_positions(positions: Tensor) -> Tensor:
    """Return positions [T] or [3, T] as models take them: [1, T] or [3, 1, T]."""
    return positions[None] if positions.dim() == 1 else positions[:, None]

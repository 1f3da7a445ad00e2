"""Looks up a step's tokens in the embedding table, and n-grams for layers that add them, and brings what it finds to
the GPU of the first layer: one row for each token.

Rows of many tokens are written straight to pinned memory and rounded on the GPU: on the CPU a rounded copy in memory
that is new each time takes one thread longer than the look-up takes all of them. Knows modules; no graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ktransformers.engine.step.layout import StepLayout
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import use
from ktransformers.operators.linear.embedding import KEmbedding

__all__ = ["STAGED_ROWS", "TokenLookup"]

STAGED_ROWS = 64
"""Rows from which pinned memory of their own is worth it."""


class TokenLookup:
    """Looks up hidden states, and the inputs of layers behind them, on the device of a layout's first layer."""

    def __init__(self, layout: StepLayout):
        self._layout, self._device = layout, layout.entry.torch_device
        self._staged = torch.empty(0)
        made: Any = torch.cuda  # parts of it have no types
        self._is_copied = made.Event(blocking=True) if self._device.type == "cuda" else None

    def on_host(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Look up int64 [T] on the CPU: [T, width] where the embedding is. context: of the step, on the CPU."""
        embedded: Tensor = self._layout.embedding(token_ids[None])[0]
        found = [one.look_up(token_ids, context).to(embedded.device) for one in self._layout.ngrams]
        return torch.cat((embedded, *found), dim=-1) if found else embedded

    def __call__(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Look up a step as `on_host` does: [T, width] on the device, in its type."""
        table, ngrams, count = self._layout.embedding, self._layout.ngrams, len(token_ids)
        if count < STAGED_ROWS or not isinstance(table, KEmbedding) or not table.is_in_rows:
            return self._layout.entry.to_device(self.on_host(token_ids, context))
        if self._is_copied is not None:
            self._is_copied.synchronize()  # the step before may still copy
        widths = [table.embedding_dim, *(one.looked_up_dim for one in ngrams)]
        rows = self._memory(count)
        parts = torch.split(rows, [count * width for width in widths])
        table.look_up(token_ids, parts[0].view(count, -1))
        for one, part in zip(ngrams, parts[1:], strict=True):
            one.look_up(token_ids, context, part.view(count, -1))
        use(self._device)
        moved = rows.to(self._device, non_blocking=True)
        if self._is_copied is not None:
            self._is_copied.record(torch.cuda.current_stream(self._device))
        moved = moved.to(self._layout.entry.dtype, copy=moved is rows)
        there = [part.view(count, -1) for part in torch.split(moved, [len(part) for part in parts])]
        return torch.cat(there, dim=-1) if ngrams else there[0]

    def _memory(self, num_rows: int) -> Tensor:
        """Return fp32 [num_rows * width], overwritten by the next look-up."""
        numel = num_rows * self._layout.width
        if self._staged.numel() < numel:
            self._staged = torch.empty(numel, pin_memory=self._is_copied is not None)
        return self._staged[:numel]

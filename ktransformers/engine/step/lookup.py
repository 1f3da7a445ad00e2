"""Looks up a step's tokens in the embedding table, and brings what it finds to the GPU of the first layer.

Rows of many tokens are written straight to pinned memory and rounded on the GPU: on the CPU a rounded copy in memory
that is new each time takes one thread longer than the look-up takes all of them. Knows modules; no graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ktransformers.engine.step.layout import StepLayout
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

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look up int64 [T] on the CPU: [T, width] on the device, in its type."""
        table = self._layout.embedding
        if len(token_ids) < STAGED_ROWS or not isinstance(table, KEmbedding) or not table.is_in_rows:
            return self._layout.entry.to_device(table(token_ids[None]))[0]
        if self._is_copied is not None:
            self._is_copied.synchronize()  # the step before may still copy
        rows = table.look_up(token_ids, self._memory(len(token_ids)))
        use(self._device)
        moved = rows.to(self._device, non_blocking=True)
        if self._is_copied is not None:
            self._is_copied.record(torch.cuda.current_stream(self._device))
        return moved.to(self._layout.entry.dtype, copy=moved is rows)

    def _memory(self, num_rows: int) -> Tensor:
        """Return fp32 [num_rows, width], overwritten by the next look-up."""
        numel = num_rows * self._layout.width
        if self._staged.numel() < numel:
            self._staged = torch.empty(numel, pin_memory=self._is_copied is not None)
        return self._staged[:numel].view(num_rows, -1)

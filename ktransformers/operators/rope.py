"""Rotary position embedding (Su et al. 2021): cosines and sines looked up in a table instead of computed per step."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import nn

from ktransformers.core import Phase
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["KRotaryEmbedding"]

STATIC_ROPE_TYPES = frozenset({"default", "linear", "yarn", "llama3"})
"""RoPE types whose angles depend on the position alone; others ("dynamic", "longrope") look at the sequence."""

TABLE_STEP = 4096  # positions by which the table grows


class KRotaryEmbedding(WrapperOperator):
    """A rotary embedding module of `transformers`: (x, position_ids [1, T]) in; what the module returns, out.

    The table is filled by the module itself, so every scaling it does is kept: one row per position of (cos, sin)
    [positions, D] or, for DeepSeek-V2, of complex [positions, D / 2].
    """

    KEEPS_BUFFERS: ClassVar[bool] = True  # the table is filled on the CPU
    OPS: ClassVar[dict[str, str]] = {
        "KRotaryTable": "looked up in a table that the module filled",
        "KRotaryTorch": "the module's own forward (angles depend on the sequence)",
    }

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        parameters = list(inspect.signature(module.forward).parameters)
        is_plain = parameters[:2] == ["x", "position_ids"] and len(parameters) == 2
        self.has_table = is_plain and getattr(module, "rope_type", None) in STATIC_ROPE_TYPES
        self._table: tuple[torch.Tensor, ...] = ()

    def op(self, phase: Phase) -> str:
        return "KRotaryTable" if self.has_table else "KRotaryTorch"

    def reserve(self, max_len: int) -> None:
        if self.device.is_gpu:
            self._grow(torch.empty(1, 1, 1), max_len)  # in a step, asking for the largest position would stop the GPU

    def _grow(self, x: torch.Tensor, needed: int) -> None:
        if not self.has_table:
            return
        size = (needed + TABLE_STEP - 1) // TABLE_STEP * TABLE_STEP
        rows = self.inner(x[:1, :1], torch.arange(size, device=x.device)[None])
        self._table = tuple(self.device.move(part[0]) for part in (rows if isinstance(rows, tuple) else (rows,)))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.has_table or (x.dtype is not torch.float32 and not self.device.is_gpu):
            return self._inner_forward(x, position_ids, *args, **kwargs)
        if not self.device.is_gpu:
            needed = int(position_ids.max()) + 1 if position_ids.numel() else 0
            if not self._table or self._table[0].shape[0] < needed:
                self._grow(x, needed)
        at = self.device.move(position_ids)
        parts = tuple(part[at].to(position_ids.device) for part in self._table)
        return parts if len(parts) > 1 else parts[0]

    def _inner_forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, on the CPU where its buffers are. Angles of one step are few."""
        angles = self.inner(x[:, :1].to("cpu", torch.float32), position_ids.cpu(), *args, **kwargs)
        if isinstance(angles, tuple):
            return tuple(part.to(position_ids.device) for part in angles)
        return angles.to(position_ids.device)

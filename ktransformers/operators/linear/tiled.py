"""A projection that takes its inputs in another order than its module makes them."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

__all__ = ["TiledInput"]


class TiledInput(nn.Module):
    """A projection of value heads whose columns lie as Qwen3.5 files have them (weights/gguf/recurrent_forms.py)."""

    def __init__(self, linear: nn.Module, key_heads: int, run: int):
        super().__init__()
        self.linear, self.key_heads, self.run = linear, key_heads, run

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the projection of rows [..., heads x run], whose heads are in the module's order."""
        heads = rows.reshape(*rows.shape[:-1], self.key_heads, -1, self.run)
        out: torch.Tensor = self.linear(heads.transpose(-3, -2).reshape(rows.shape))
        return out

"""A cache for one sequence of bounded length: one page that holds all its positions.

L layers; per layer: keys fp32 [max_len, kv_heads, key_dim], values fp32 [max_len, kv_heads, value_dim]
latent attention (MLA): kv_heads is 1, and values is a view of the first value_dim columns of keys
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["LayerShape", "StaticCache"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer's cache. is_latent: values are part of the keys and take no bytes of their own."""

    kv_heads: int
    key_dim: int
    value_dim: int
    is_latent: bool = False

    def nbytes(self, max_len: int) -> int:
        values = 0 if self.is_latent else self.value_dim
        return 4 * max_len * self.kv_heads * (self.key_dim + values)


class StaticCache:
    """Keys and values of one sequence of at most max_len tokens."""

    def __init__(self, shapes: Sequence[LayerShape], max_len: int):
        self.shapes, self.max_len = tuple(shapes), max_len
        self._layers = [self._allocate(shape) for shape in self.shapes]

    @staticmethod
    def size(shapes: Sequence[LayerShape], max_len: int) -> int:
        """Bytes that a cache of these shapes takes."""
        return sum(shape.nbytes(max_len) for shape in shapes)

    @property
    def nbytes(self) -> int:
        return self.size(self.shapes, self.max_len)

    @property
    def page_size(self) -> int:
        """Positions per page: all of them."""
        return self.max_len

    def _allocate(self, shape: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.zeros(self.max_len, shape.kv_heads, shape.key_dim)
        if shape.is_latent:
            return keys, keys[..., : shape.value_dim]
        return keys, torch.zeros(self.max_len, shape.kv_heads, shape.value_dim)

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of layer `layer_idx`; the attention operator writes to them in place."""
        return self._layers[layer_idx]

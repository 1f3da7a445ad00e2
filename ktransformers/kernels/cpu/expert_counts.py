"""Counts how often each expert is used: exactly, where experts run. Knows kernels and numbers of layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ktransformers.kernels.cpu.moe import MoeKernel
from ktransformers.kernels.extension import extension

__all__ = ["ExpertCounts"]


class ExpertCounts:
    """Counter of experts used, by the kernels that it watches and by what other code adds. Any thread may ask."""

    def __init__(self) -> None:
        self._native = extension.ExpertCounts()

    def watch(self, kernel: MoeKernel) -> None:
        """Count the experts that a kernel computes, and has computed, under its number of a layer."""
        self._native.watch(kernel.layer, kernel.handle)

    def add(self, layer: int, rows: Sequence[int], calls: int = 1) -> None:
        """Add what ran elsewhere: the rows of each expert of a layer, as so many calls of it (0: a part of one)."""
        self._native.add(layer, rows, calls)

    def follow(self, rows: torch.Tensor, before: torch.Tensor) -> None:
        """Add what another counter's `rows` of all layers have gained since `before`, and set `before` to `rows`.

        Both int64 [layers, experts], contiguous, on the CPU. Raises ValueError.
        """
        for name, tensor in (("rows", rows), ("before", before)):
            if tensor.shape != rows.shape or tensor.dim() != 2 or tensor.dtype != torch.int64:
                raise ValueError(f"{name} must be int64 [layers, experts], got {tensor.dtype} {list(tensor.shape)}")
            if not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise ValueError(f"{name} must be contiguous and on the CPU")
        self._native.follow(rows.data_ptr(), before.data_ptr(), *rows.shape)

    def totals(self) -> tuple[int, int, int]:
        """Return the sums of (token, expert) pairs, of layer calls, and of the distinct experts of each call."""
        return self._native.totals()

    def take(self) -> bytes:
        """Return the rows counted since the last call: entries of 8 bytes, layer and expert (u16) and rows (u32),
        little endian.

        Layers without a number (-1) are left out.
        """
        return self._native.take()

"""Quantized matrices of random bits in the layouts of a GPU. Their numbers mean nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.bench.gpu.device import Gpu
from ktransformers.kernels.triton.quant.repack import GpuLayout, layout_nbytes
from ktransformers.kernels.types import WeightType
from ktransformers.operators.linear.matrix import gpu_layout

__all__ = ["random_bytes", "random_matrices", "random_weights"]


def random_bytes(gpu: Gpu, count: int) -> Tensor:
    """Return random bytes [count], uint8, whose bits are small numbers in every format."""
    return torch.randint(0, 32, (count,), dtype=torch.uint8, device=gpu.device)


def _random_matrix(gpu: Gpu, qtype: WeightType, rows: int, cols: int, count: int = 1) -> Tensor:
    """uint8 [bytes of `count` matrices] as they rest on a GPU; in tiles any bits: codes lie all over their tables."""
    layout = gpu_layout(qtype, rows, cols)
    nbytes = count * layout_nbytes(qtype, rows, cols, layout)
    if layout == GpuLayout.CPU_PACKED:
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=gpu.device)
    return random_bytes(gpu, nbytes)


def random_weights(gpu: Gpu, qtype: WeightType, rows: int, cols: int) -> list[Tensor]:
    """Return copies of a matrix [rows, cols] in its GPU layout, more of them than the L2 cache holds."""
    size = layout_nbytes(qtype, rows, cols, gpu_layout(qtype, rows, cols))
    return [_random_matrix(gpu, qtype, rows, cols) for _ in range(gpu.copies(size))]


def random_matrices(gpu: Gpu, qtype: WeightType, rows: int, cols: int, count: int) -> Tensor:
    """Return random matrices [rows, cols] in their GPU layout, as uint8 [count, bytes of one]."""
    return _random_matrix(gpu, qtype, rows, cols, count).view(count, -1)

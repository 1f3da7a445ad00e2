"""Experts as the kernels of moe.py take them: matrices one after another, and what is computed beside products."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ktransformers.kernels.triton.linear.block_int16_gemv import has_block_int16, is_strided
from ktransformers.kernels.triton.linear.planes import is_plane_type
from ktransformers.kernels.triton.quant.cpu_packed_grid import has_grid
from ktransformers.kernels.triton.quant.dequant import check_matrix
from ktransformers.kernels.triton.quant.repack import GpuLayout, layout_nbytes
from ktransformers.kernels.types import Activation, ActivationSpec, ExpertWeights, WeightType

__all__ = [
    "SILU",
    "ExpertMatrices",
    "MoeEpilogue",
    "MoeMatrices",
    "RoutedRows",
    "are_plane_types",
    "takes_block_int16",
]


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """Matrices [rows, cols] of one projection of all experts, one after another.

    data: uint8 [S, bytes of a matrix] (or [S, rows, row_bytes]), contiguous; S slots. layout: of each matrix.
    Raises TypeError or ValueError when sizes do not agree.
    """

    data: Tensor
    qtype: WeightType
    rows: int
    cols: int
    layout: GpuLayout = GpuLayout.ROWS

    def __post_init__(self) -> None:
        check_matrix(self.data, self.qtype, self.rows, self.cols, self.layout, self.slots)

    @property
    def slots(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of one matrix."""
        return layout_nbytes(self.qtype, self.rows, self.cols, self.layout)


@dataclass(frozen=True, slots=True)
class MoeEpilogue:
    """Activation and biases of experts: what they compute beside products.

    activation: of gate and up. biases: None, or those of gate and up, [E, I], and of down, [E, H], fp32, contiguous, on
    the device; by the experts' ids, wherever their matrices are.
    """

    activation: ActivationSpec = field(default_factory=ActivationSpec)
    biases: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of(cls, weights: ExpertWeights, activation: ActivationSpec, device: torch.device) -> MoeEpilogue:
        """Make the epilogue of experts with a gate; a bias that is missing beside others is zero."""
        given = (weights.gate_bias, weights.up_bias, weights.down_bias)
        if all(bias is None for bias in given):
            return cls(activation)
        made = list[Tensor]()
        for bias, part in zip(given, (weights.gate, weights.up, weights.down), strict=True):
            assert part is not None
            zeros = torch.zeros(len(part), part[0].shape[0]) if bias is None else bias
            made.append(zeros.to(device, torch.float32).contiguous())
        return cls(activation, (made[0], made[1], made[2]))

    def check(self, num_experts: int, inner: int, width: int) -> None:
        """Raise TypeError or ValueError for biases of other experts than these."""
        for bias, size in zip(self.biases or (), (inner, inner, width), strict=False):
            if bias.dtype != torch.float32:
                raise TypeError(f"biases must be float32, got {bias.dtype}")
            if bias.shape != (num_experts, size) or not bias.is_contiguous():
                raise ValueError(f"a bias must be contiguous [{num_experts}, {size}], got {tuple(bias.shape)}")

    def options(self) -> dict[str, object]:
        """Return the constants of the kernels; numbers that an activation does not use make no kernels of their own."""
        kind = self.activation.kind
        return {
            "ACT": kind.name,
            "ALPHA": float(self.activation.alpha) if kind is Activation.SWIGLU_OAI else 0.0,
            "LIMIT": float(self.activation.limit) if kind.is_clamped else 0.0,
            "HAS_BIAS": self.biases is not None,
        }


SILU = MoeEpilogue()


@dataclass(frozen=True, slots=True)
class MoeMatrices:
    """The experts of a layer that are there, by slot: gate, up [I, H], of one layout; down [H, I]; types may differ."""

    gate: ExpertMatrices
    up: ExpertMatrices
    down: ExpertMatrices
    epilogue: MoeEpilogue = SILU


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Rows of a step and the experts that they go to.

    x: [T, H] fp16 or bf16. topk_ids: int32 [T, k]; an id outside the experts counts for nothing. topk_weights: fp32
    [T, k].
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor

    def of(self, span: slice) -> RoutedRows:
        """Return some of the rows."""
        return RoutedRows(self.x[span], self.topk_ids[span], self.topk_weights[span])


def are_plane_types(*parts: ExpertMatrices) -> bool:
    """Whether all matrices are of types whose planes are multiplied with block-wise int16."""
    return all(is_plane_type(int(part.qtype)) for part in parts)


def takes_block_int16(*parts: ExpertMatrices) -> bool:
    """Whether the GEMV multiplies these matrices with block-wise int16, of one order and in one loop."""
    types = [int(part.qtype) for part in parts]
    if are_plane_types(*parts):
        return True
    kinds = {(is_strided(number), bool(has_grid(number))) for number in types}
    return all(has_block_int16(number) for number in types) and len(kinds) == 1

"""Chooses the path that so many tokens take through experts, and holds the memory between its kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.kernels.triton.common.runtime import triton
from ktransformers.kernels.triton.experts.align import SMALL_PAIRS, AlignedPairs
from ktransformers.kernels.triton.experts.matrices import ExpertMatrices, are_plane_types
from ktransformers.kernels.triton.quant.block_int16 import block_int16_shape
from ktransformers.kernels.triton.quant.repack import has_gemv

__all__ = [
    "DIGIT_TOKENS",
    "DOWN_ROWS",
    "VECTOR_TOKENS",
    "MoeWorkspace",
    "block_rows",
    "row_thresholds",
    "uses_gemv",
]

#: Largest number of tokens for which every pair is computed on its own.
VECTOR_TOKENS = 16
#: The same for types whose planes are multiplied with block-wise int16.
DIGIT_TOKENS = 32
DOWN_ROWS = 64
"""Of one program of the down projection on the GEMV path."""
_MEANS = (12, 24, 96)  # pairs of an expert, up to which blocks have 16, 32 and 64 rows


def row_thresholds(num_experts: int, top_k: int) -> list[int]:
    """Return the numbers of rows after which `moe` and `moe_blocks` launch other kernels, of whatever types."""
    blocks = (int(mean * num_experts) // top_k for mean in _MEANS)
    return sorted({VECTOR_TOKENS, DIGIT_TOKENS, SMALL_PAIRS // top_k, *blocks})


def block_rows(pairs: int, num_experts: int) -> int:
    """Return the rows of a block: about the pairs that an expert gets, so that few rows of a block stay empty."""
    mean = pairs / num_experts
    return next((16 * 2**i for i, most in enumerate(_MEANS) if mean <= most), 128)


@dataclass(frozen=True, slots=True)
class MoeWorkspace:
    """Memory between the kernels of one call; calls that share it must run one after another on one stream.

    hidden: [P, I] in x's dtype. parts: [P, H], fp32 on the GEMV path, x's dtype on the other.
    counters: int32, 0 between calls. aligned: of the other path only. block_int16: of the GEMV path, those of x and of
    what is hidden, int32 of `block_int16_shape`, whether or not this call's types take them; order: int32 [P], see
    PairOrder.
    """

    hidden: Tensor
    parts: Tensor
    counters: Tensor
    aligned: AlignedPairs | None
    block_int16: tuple[Tensor, Tensor] | None = None
    order: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        x: Tensor,
        top_k: int,
        num_experts: int,
        up: ExpertMatrices,
        down: ExpertMatrices,
    ) -> MoeWorkspace:
        """Allocate for calls with x's number of rows and dtype, on x's device."""
        tokens = x.shape[0]
        pairs = tokens * top_k
        vector = uses_gemv(tokens, up, down)
        counters = tokens * triton.cdiv(down.rows, DOWN_ROWS) if vector else 1
        shapes = (block_int16_shape(tokens, up.cols), block_int16_shape(pairs, up.rows))
        made = [torch.empty(shape, dtype=torch.int32, device=x.device) for shape in shapes if vector]
        return cls(
            torch.empty(pairs, up.rows, dtype=x.dtype, device=x.device),
            torch.empty(pairs, down.rows, dtype=torch.float32 if vector else x.dtype, device=x.device),
            torch.zeros(counters, dtype=torch.int32, device=x.device),
            None if vector else AlignedPairs.allocate(pairs, num_experts, block_rows(pairs, num_experts), x.device),
            (made[0], made[1]) if vector else None,
            torch.empty(pairs, dtype=torch.int32, device=x.device) if vector else None,
        )

    def check(self, pairs: int, inner: int, width: int) -> None:
        """Raise ValueError when the workspace is not for calls of this size."""
        if self.hidden.shape != (pairs, inner) or self.parts.shape != (pairs, width):
            raise ValueError(
                f"workspace is for {self.hidden.shape[0]} pairs of widths {self.hidden.shape[1]} and "
                f"{self.parts.shape[1]}, the call has {pairs} of {inner} and {width}"
            )


def uses_gemv(tokens: int, up: ExpertMatrices, down: ExpertMatrices) -> bool:
    """Whether so many tokens take the GEMV path; gate is as up (`_check`)."""
    most = DIGIT_TOKENS if are_plane_types(up, down) else VECTOR_TOKENS
    return tokens <= most and all(has_gemv(int(part.qtype), part.layout) for part in (up, down))

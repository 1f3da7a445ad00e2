"""Experts that safetensors keep in one tensor for all: finds the rows that are one expert's gate, up or down.

    [E, 2 I, H]  gate above up (or row by row in turn), as modules of transformers have it      [E, H, I]  down
    [E, H, 2 I]  the same, every matrix transposed
    [E, I, H]    one tensor for each projection
    [E I, H]     the same, experts one below another, down transposed (DBRX)

FP8 scales are laid out like their tensor, one per block of rows and columns. Knows no files: gets tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ktransformers.errors import UnsupportedError
from ktransformers.weights.conversion.checkpoint_names import Origin
from ktransformers.weights.experts import BlockScaledMatrix, check_expert_shape
from ktransformers.weights.source import ExpertsLayout

__all__ = ["FusedPart", "by_expert", "fused_parts"]


@dataclass(frozen=True, slots=True)
class FusedPart:
    """Projection of all experts in a fused tensor: rows start, start + step, ... before stop of an expert's matrix.

    is_transposed: the rows are those of the transposed matrix. stop: None for all.
    """

    stored: str
    is_transposed: bool = False
    start: int = 0
    stop: int | None = None
    step: int = 1

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the projection [rows, cols] in the whole matrix of one expert."""
        return (values.T if self.is_transposed else values)[self.start : self.stop : self.step]

    def scaled(self, values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> BlockScaledMatrix:
        """Return the projection in one expert's FP8 matrix and its scales [row blocks, col blocks].

        Raises UnsupportedError where a block holds rows of two projections.
        """
        if scales.numel() == 1:
            part = self.of(values)
            return BlockScaledMatrix(part, scales.reshape(1, 1), (part.shape[0], part.shape[1]))
        if scales.dim() != 2 or list(scales.shape) != [-(-n // b) for n, b in zip(values.shape, block, strict=True)]:
            raise UnsupportedError(
                f"the scales of an expert in FP8 tensor {self.stored!r} have the shape {list(scales.shape)}; supported "
                f"are one for all and one per block of {block[0]} x {block[1]}"
            )
        if self.is_transposed:
            scales, block = scales.T, (block[1], block[0])
        stop = values.shape[1 if self.is_transposed else 0] if self.stop is None else self.stop
        if self.start % block[0] or self.step != 1:
            raise UnsupportedError(f"FP8 tensor {self.stored!r} has gate and up of an expert in one block of scales")
        return BlockScaledMatrix(self.of(values), scales[self.start // block[0] : -(-stop // block[0])], block)

    @property
    def is_in_rows(self) -> bool:
        """Whether an expert's projection is a run of whole rows of the file."""
        return not self.is_transposed and self.step == 1


def by_expert(shape: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
    """Return the shape [E, rows, cols] of a tensor, which may hold experts one below another."""
    if len(shape) != 2 or shape[0] % num_experts:
        return shape
    return (num_experts, shape[0] // num_experts, shape[1])


def fused_parts(
    up: Origin, down: Origin, layout: ExpertsLayout, shapes: Sequence[Sequence[tuple[int, ...]]]
) -> dict[str, FusedPart] | None:
    """Return where gate, up and down are. up: gate and up, where there is a gate. shapes: of the tensors that both come
    from.

    None for conversions that are not known here. Raises TensorMismatchError for shapes that no layout has.
    """
    inner, hidden = layout.intermediate_size, layout.hidden_size
    shapes = [[by_expert(shape, layout.num_experts) for shape in several] for several in shapes]
    if up.operations == ("Concatenate",) and up.dim == 1 and len(up.sources) == 2:
        if down.operations not in ((), ("Transpose",)):
            return None
        for name, shape in zip(up.sources, shapes[0], strict=True):
            check_expert_shape(name, shape, (layout.num_experts, inner, hidden))
        is_turned = bool(down.operations)
        wanted = (inner, hidden) if is_turned else (hidden, inner)
        check_expert_shape(down.sources[0], shapes[1][0], (layout.num_experts, *wanted))
        down_part = FusedPart(down.sources[0], is_turned)
        return {"gate": FusedPart(up.sources[0]), "up": FusedPart(up.sources[1]), "down": down_part}
    width = 2 * inner if layout.has_gate else inner
    turned = []
    for origin, shape, rows, cols in ((up, shapes[0][0], width, hidden), (down, shapes[1][0], hidden, inner)):
        is_transposed = _is_transposed(origin, shape, (rows, cols), layout)
        if is_transposed is None:
            return None
        wanted = (cols, rows) if is_transposed else (rows, cols)
        check_expert_shape(origin.sources[0], shape, (layout.num_experts, *wanted))
        turned.append(is_transposed)
    down_part = FusedPart(down.sources[0], turned[1])
    if not layout.has_gate:
        return {"up": FusedPart(up.sources[0], turned[0]), "down": down_part}
    halves = ((0, inner, 1), (inner, 2 * inner, 1)) if layout.is_concatenated else ((0, None, 2), (1, None, 2))
    gate, up_part = (FusedPart(up.sources[0], turned[0], *rows) for rows in halves)
    return {"gate": gate, "up": up_part, "down": down_part}


def _is_transposed(
    origin: Origin, shape: tuple[int, ...], wanted: tuple[int, int], layout: ExpertsLayout
) -> bool | None:
    if not origin.operations:
        return layout.is_transposed
    if layout.is_transposed:
        return None
    if origin.operations == ("TransposeIfNeeded",):  # as transformers does: what has the module's shape stays
        return tuple(shape[1:]) != wanted
    return True if origin.operations == ("Transpose",) else None

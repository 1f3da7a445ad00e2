"""Temperature of attention: queries that grow with their position, so that long contexts do not flatten softmax."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["QueryTemperature"]


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Growth of queries with their position p, by 1 + scale ln(1 + floor((p + shift) / step)) (arXiv 2501.19399).

    shift: 0 for latent attention (Mistral 4), 1 for layers without rotation (Llama 4).
    """

    scale: float
    step: float
    shift: int = 0

    def of(self, positions: Tensor) -> Tensor:
        """Return the factors of queries at `positions` [T] >= 0, of a float type, in which they are computed."""
        counted = positions + self.shift if self.shift else positions
        return 1 + self.scale * (1 + (counted / self.step).floor()).log()

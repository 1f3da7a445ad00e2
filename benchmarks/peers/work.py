"""What benchmarks.model measures: shared by us and by the peer's process. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ModelWork"]


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Prompts of `prefill` tokens; then `batches` sequences that hold `context` tokens each and decode one token per
    step, `steps` times after `warm_ups`. Each is done in `repeats` rounds, of which the best counts."""

    prefill: Sequence[int]
    batches: Sequence[int]
    steps: int
    context: int = 64
    repeats: int = 2
    warm_ups: int = 3

    @property
    def sequence_len(self) -> int:
        """Tokens of a sequence when its last step is done."""
        return self.context + self.warm_ups + self.steps

"""Table, for any attention kernel, of the positions that a step's rows attend to, where these are not all that they may
see.

A choice becomes a block table for pages of one position: the slots of the chosen positions in ascending order. So the
kernels of dense attention attend sparsely too, in the same order of sums, and a row that chooses all positions it sees
gets the bits of dense attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktransformers.kernels.attention_call import RowPages

__all__ = ["TopkPositions"]


@dataclass(frozen=True, slots=True)
class TopkPositions:
    """The cached positions that sparse attention reads, as an indexer chose them.

    slots: int32 [n, K], of which row i uses the first counts[i] (int32 [n]). n: rows, or rows times heads.
    """

    slots: torch.Tensor
    counts: torch.Tensor

    @property
    def seq_ids(self) -> torch.Tensor:
        """Sequence number of each choice, int32 [n]: each choice has a row of `slots` for itself."""
        return torch.arange(len(self.counts), dtype=torch.int32, device=self.counts.device)

    @property
    def pages(self) -> RowPages:
        """The part of the cache that the choices see, as kernels of attention take it: pages of one position."""
        return RowPages(self.slots, 1, self.seq_ids, self.counts)

    def to(self, device: torch.device) -> TopkPositions:
        """Return the same positions for layers on another device, where slots mean the same."""
        if self.counts.device == device:
            return self
        return TopkPositions(self.slots.to(device), self.counts.to(device))

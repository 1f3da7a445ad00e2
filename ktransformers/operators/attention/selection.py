"""Which positions the rows of a step attend to, where not all that they may see, as a table for any attention kernel.

A choice becomes a block table for pages of one position: the slots of the chosen positions in ascending order. So the
kernels of dense attention attend sparsely too, in the same order of sums, and a row that chooses all positions it sees
gets the bits of dense attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktransformers.operators.context import ForwardContext

__all__ = ["Selection"]


@dataclass(frozen=True, slots=True)
class Selection:
    """slots: int32 [n, K], the first counts[i] (int32 [n]) of row i in use. n: rows, or rows times heads apart."""

    slots: torch.Tensor
    counts: torch.Tensor

    @property
    def seq_ids(self) -> torch.Tensor:
        """int32 [n]: each choice has a row of `slots` for itself."""
        return torch.arange(len(self.counts), dtype=torch.int32, device=self.counts.device)

    @classmethod
    def of_window(cls, context: ForwardContext, window: int) -> Selection | None:
        """The last `window` positions that each row sees; None where no sequence of the step can be longer."""
        table, size = context.block_table, context.page_size
        if table.shape[1] * size <= window:
            return None
        counts = context.kv_lens.clamp(max=window)
        positions = (context.kv_lens - counts)[:, None] + torch.arange(window, device=table.device)
        pages = (positions // size).clamp(max=table.shape[1] - 1)
        slots = table[context.seq_ids.long()[:, None], pages] * size + positions % size
        return cls(slots.to(torch.int32), counts.to(torch.int32))

    def to(self, device: torch.device) -> Selection:
        """The same choice for layers on another device: slots mean the same there."""
        if self.counts.device == device:
            return self
        return Selection(self.slots.to(device), self.counts.to(device))

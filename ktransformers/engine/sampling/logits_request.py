"""Requests for less than whole rows of a step's logits, where choosing tokens takes less. Knows no device.

A need says what of a row is wanted:

    WHOLE_ROW     all logits
    BEST_TOKEN    the token with the greatest, the lowest id among equals
    k > 0         all tokens as good as the k-th, with their logits; k is at most MAX_TOP_K
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

__all__ = ["BEST_TOKEN", "MAX_CANDIDATES", "MAX_TOP_K", "WHOLE_ROW", "RequestedLogits", "StepLogits"]

WHOLE_ROW: Final = 0
BEST_TOKEN: Final = -1
MAX_TOP_K: Final = 64
MAX_CANDIDATES: Final = 2 * MAX_TOP_K
"""Candidates of a row at most. Logits that an LM head rounds to bf16 are often equal."""


@dataclass(frozen=True, slots=True)
class RequestedLogits:
    """Rows of a step's logits on the CPU, each as far as it is needed. Valid until the next step.

    needs: [N], see above. whole: fp32 [M, V], rows that came as a whole, those with need WHOLE_ROW and maybe others;
    places: [N], where each of them is in `whole`, -1 for other rows. table: int32 [N, 1], the best tokens, or
    [N, 2 + 2 * ROOM], see kernels.triton.common.candidates; it means nothing for rows that came as a whole.
    """

    requests: Sequence[int]
    whole: Tensor
    places: Sequence[int]
    table: Tensor

    def __len__(self) -> int:
        """N."""
        return len(self.requests)

    @property
    def vocab_size(self) -> int:
        """Size V of the vocabulary: the logits of a row."""
        return int(self.whole.shape[1])

    def rows(self, wanted: Sequence[int]) -> RequestedLogits:
        """Return the `wanted` rows, in that order."""
        needs, places = [self.requests[i] for i in wanted], [self.places[i] for i in wanted]
        return RequestedLogits(needs, self.whole, places, self.table[list(wanted)])

    def candidates(self, wanted: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
        """Return the candidates of `wanted` rows: ids int32 and logits fp32, [n, MAX_CANDIDATES] each, and how many
        each row has."""
        table = self.table if len(wanted) == len(self.table) else self.table[list(wanted)]
        return (
            table[:, 2 : 2 + MAX_CANDIDATES],
            table.view(torch.float32)[:, 2 + MAX_CANDIDATES :],
            table[:, 1].tolist(),
        )


StepLogits: TypeAlias = Tensor | RequestedLogits
"""Of the rows that a step keeps: fp32 [N, V] on the CPU, or what is needed of them."""

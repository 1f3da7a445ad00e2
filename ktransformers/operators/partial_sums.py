"""Modules whose results are shares: parts of a sum over the processes of a model that is cut over several GPUs.

Each process has some heads and some columns of every cut matrix, so that what follows them in the layer, the product
with its rows, gives a summand (Megatron-LM, arXiv 1909.08053). The LM head's share is logits of some tokens, which are
gathered. Knows no way to add or to gather; who makes operators brings one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from typing_extensions import override

__all__ = ["PartialSums", "PassThrough", "Placeholder", "RankGroup", "ShareProduct", "share_nbytes"]

ShareProduct = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""A share of a product: rows [T, K] -> fp32 [T, N], written to the tensor given, if one is and the kernel can."""


class RankGroup(Protocol):
    """Processes that a model is cut over. rank: of this one; the driver's is 0. size: how many there are."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, share: torch.Tensor) -> torch.Tensor:
        """Return the sum of `share`, contiguous, over all processes, in place, in the order of the device's work: the
        same bits in each. All call it with the same shape and type, in the same order.
        """
        ...

    def sum_product(self, x: torch.Tensor, width: int, product: ShareProduct) -> torch.Tensor:
        """Return the sum of product(x) over all processes, for rows x [T, K]: [T, width] of x's type, rounded to it
        once. All call it as they do `sum`.
        """
        ...

    def gather_product(self, x: torch.Tensor, width: int, product: ShareProduct) -> torch.Tensor:
        """Return the columns product(x), fp32 [T, width] for rows x [T, K], of all processes side by side in the order
        of ranks: fp32 [T, size * width]. All call it as they do `sum`.
        """
        ...

    def reserve(self, num_rows: int, width: int) -> None:
        """Set the most values of a share, those of fp32 [num_rows, width]. Called before `rendezvous`."""
        ...


class Placeholder(nn.Module):
    """Placeholder for a module that another process has. No rule is for it; its children are modules like others."""


class PassThrough(Placeholder):
    """Placeholder for a head, or for a norm before it, which this model leaves to another one: gives what it is given.

    weight: some models ask for its type.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.empty(0)

    @override
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


def share_nbytes(num_rows: int, width: int) -> int:
    """Return the bytes of a share [num_rows, width], for which each process reserves memory."""
    return 4 * num_rows * width


@dataclass(frozen=True, slots=True)
class PartialSums:
    """The modules of a sharded model whose results are parts of others, to be put together over the group.

    linears, blocks: keys of projections back to hidden states, and of blocks of experts: their results are added up.
    experts: keys of routed experts of which each process has a part where they are on a GPU; elsewhere, and those that
    cannot be divided, the driver has whole. heads: keys of projections of which each process has as many rows, and
    whose results are gathered.
    """

    group: RankGroup
    linears: frozenset[str]
    blocks: frozenset[str]
    heads: frozenset[str] = frozenset()
    experts: frozenset[str] = frozenset()

    def of_linear(self, key: str) -> RankGroup | None:
        """Return the group that sums the results of this linear module; None for whole results."""
        return self.group if key in self.linears else None

    def of_head(self, key: str) -> RankGroup | None:
        """Return the group that gathers the results of this linear module; None for whole results."""
        return self.group if key in self.heads else None

    def of_experts(self, key: str) -> RankGroup | None:
        """Return the group that these routed experts may be divided over; None where they are whole."""
        return self.group if key in self.experts else None

    def of_block(self, key: str) -> RankGroup | None:
        """Return the group that sums the results of this block of experts; None for whole results."""
        return self.group if key in self.blocks else None

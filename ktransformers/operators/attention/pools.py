"""Pools of positions, which an indexer scores instead of single positions, as rows of its cache.

    M positions of a pool, D columns of an entry; pool w has the positions w M .. w M + M - 1

What a position leaves behind is one row of the indexer's cache, so that pages are shared, kept and moved like any
other's. A pool's entry takes the place of its last position's key, which nothing needs once the entry is made:

    | key D, or entry D | gates D, where entries are weighted sums |

A pool lies in one page (LayerShape.index_pool), so that its slots follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.kernels.attention_call import RowPages
from ktransformers.kernels.triton.attention import pools
from ktransformers.operators.attention.topk_positions import TopkPositions
from ktransformers.operators.context import ForwardContext

__all__ = ["PoolStep", "in_order", "pool_starts", "pooled_by_gates"]


@dataclass(frozen=True, slots=True)
class PoolStep:
    """The pools of a step's sequences, for all layers.

    size: positions of a pool. counts: int32 [T], whole pools that a row sees. table: int32 [S, E], the slot of each
    pool's last position. is_replayed: it is on a GPU, see `of`.
    """

    context: ForwardContext
    size: int
    counts: Tensor
    table: Tensor
    is_replayed: bool = False

    @classmethod
    def of(cls, context: ForwardContext, size: int, *, is_replayed: bool = False) -> PoolStep:
        """Return the pools of the context's rows; made once per step.

        is_replayed: how long sequences are is known on the device alone, so that the table has all that there is room
        for.
        """
        return context.derived(
            f"pools of {size}", context.kv_lens, lambda lens: cls._made(context, lens, size, is_replayed)
        )

    @classmethod
    def _made(cls, context: ForwardContext, lens: Tensor, size: int, is_replayed: bool) -> PoolStep:
        counts, page_size = lens // size, context.page_size
        most = context.block_table.shape[1] * page_size // size
        if not is_replayed:
            most = int(counts.max()) if len(counts) else 0
        ends = (torch.arange(most, device=lens.device) + 1) * size - 1
        table = context.block_table[:, ends // page_size] * page_size + ends % page_size
        return cls(context, size, counts, table.to(torch.int32).contiguous(), is_replayed)

    @property
    def pages(self) -> RowPages:
        """The entries that the rows see, as kernels take it: pages of one pool."""
        return RowPages(self.table, 1, self.context.seq_ids, self.counts)

    @property
    def most(self) -> int:
        """Number of whole pools of the longest sequence, or as many as there is room for."""
        return self.table.shape[1]

    def ended(self) -> tuple[Tensor, Tensor]:
        """Return the rows that end a pool, int64 [N], and the slots of those pools, int64 [N, M]. On the CPU."""
        context = self.context
        last = ((context.kv_lens % self.size == 0) & (context.kv_lens > 0)).nonzero()[:, 0]
        return last, context.slot_mapping[last][:, None] - (self.size - 1) + torch.arange(self.size)

    def expanded(self, chosen: Tensor, num_chosen: Tensor) -> TopkPositions:
        """Return the positions of chosen pools, and those behind a row's last whole pool.

        chosen: int32 [T, K], slots of pools' last positions, the first num_chosen [T] of each row in use.
        """
        size, context = self.size, self.context
        if self.is_replayed:
            return TopkPositions(*pools.expanded(chosen, num_chosen, context.pages, size))
        device = chosen.device
        of_pools = num_chosen * size
        at = torch.arange(chosen.shape[1] * size + size - 1, device=device)
        inside = (at % size)[None] - (size - 1)
        pooled = chosen.repeat_interleave(size, dim=1)
        pooled = torch.nn.functional.pad(pooled, (0, size - 1)) + inside
        behind = at[None] - of_pools[:, None]
        first = self.counts * size
        positions = (first[:, None] + behind).clamp(min=0).minimum((context.kv_lens - 1).clamp(min=0)[:, None]).long()
        pages = context.block_table[context.seq_ids.long()].gather(1, positions // context.page_size)
        tail = pages * context.page_size + positions % context.page_size
        slots = torch.where(behind < 0, pooled, tail)
        return TopkPositions(slots.to(torch.int32).contiguous(), (of_pools + context.kv_lens - first).to(torch.int32))


def pool_starts(context: ForwardContext, size: int) -> Tensor:
    """Return rotary positions of the first positions of the pools that rows end, int64 [T], or [3, T] where pictures
    have those of three axes; of other rows, any."""
    if context.pictures is not None and context.pictures.pool_starts is not None:
        return context.pictures.pool_starts
    turned = context.kv_lens.long() - 1 if context.turned is None else context.turned
    return (turned + 1 - size).clamp(min=0)


def pooled_by_gates(keys: Tensor, gates: Tensor, bias: Tensor) -> Tensor:
    """Pool keys by gates, both [N, M, D], to [N, D]; added up position by position, whatever else is computed beside
    it.
    """
    gates = gates + bias
    weights = torch.exp(gates - gates.amax(dim=1, keepdim=True))
    total = in_order(weights)
    return in_order(keys * (weights / total[:, None]))


def in_order(parts: Tensor) -> Tensor:
    """Add up parts [N, M, D] one after the other, to [N, D]."""
    total = parts[:, 0]
    for index in range(1, parts.shape[1]):
        total = total + parts[:, index]
    return total

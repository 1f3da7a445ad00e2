"""Pools of positions: what an indexer scores instead of single positions, as rows of its cache.

    M positions of a pool, D columns of an entry; pool w has the positions w M .. w M + M - 1

What a position leaves behind is one row of the indexer's cache, so that pages are shared, kept and moved like any
other's. A pool's entry takes the place of its last position's key, which nothing needs once the entry is made:

    | key D, or entry D | gates D, where entries are weighted sums |

A pool lies in one page (LayerShape.index_pool), so that its slots follow each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.attention.selection import Selection
from ktransformers.operators.context import ForwardContext

__all__ = ["PoolStep"]


@dataclass(frozen=True, slots=True)
class PoolStep:
    """The pools of a step's sequences, for all layers.

    size: positions of a pool. counts: int32 [T], whole pools that a row sees. table: int32 [S, E], the slot of each
    pool's last position. last: int64, the rows that end a pool. firsts: int64, the first positions of these pools.
    """

    context: ForwardContext
    size: int
    counts: Tensor
    table: Tensor
    last: Tensor
    firsts: Tensor
    most: int

    @classmethod
    def of(cls, context: ForwardContext, size: int) -> PoolStep:
        """Of the context's rows, on the CPU; made once per step."""
        return context.derived(context.kv_lens, lambda lens: cls._made(context, lens, size))

    @classmethod
    def _made(cls, context: ForwardContext, lens: Tensor, size: int) -> PoolStep:
        counts = lens // size
        most = int(counts.max()) if len(counts) else 0
        ends = (torch.arange(most) + 1) * size - 1
        last = ((lens % size == 0) & (lens > 0)).nonzero()[:, 0]
        firsts = lens[last].long() - size
        return cls(context, size, counts, _slots(context, ends), last, firsts, most)

    def slots_of_last(self) -> Tensor:
        """Slots of the pools that end in this step, int64 [N, M]."""
        ends = self.context.slot_mapping[self.last]
        return ends[:, None] - (self.size - 1) + torch.arange(self.size)

    def choose(
        self, q: Tensor, weights: Tensor, entries: Tensor, scale: float, num_chosen: int, pool: WorkerPool
    ) -> Selection | None:
        """What rows attend to: the best pools, of equal scores the lower ones, and what is behind the last whole one.

        q: [T, H, D]; weights: fp32 [T, H]; entries: [slots, D], in the slots of the pools' last positions. None where
        all rows take all that they see.
        """
        if self.most <= num_chosen:
            return None
        ids = self.context.seq_ids
        given = (q, weights, entries, self.table, 1, ids, self.counts, scale, num_chosen)
        return self.expanded(*cpu.choose_positions(*given, pool))

    def expanded(self, chosen: Tensor, num_chosen: Tensor) -> Selection:
        """The positions of chosen pools, and those behind a row's last whole pool.

        chosen: int32 [T, K], slots of pools' last positions, the first num_chosen [T] of each row in use.
        """
        size, context = self.size, self.context
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
        return Selection(slots.to(torch.int32).contiguous(), (of_pools + context.kv_lens - first).to(torch.int32))


def _slots(context: ForwardContext, positions: Tensor) -> Tensor:
    """int32 [S, N] of positions [N] in every sequence; of those that it has no page for, some number."""
    size = context.page_size
    pages = context.block_table[:, (positions // size).long()]
    return (pages * size + positions % size).to(torch.int32).contiguous()


def pooled_by_gates(keys: Tensor, gates: Tensor, bias: Tensor, exp: Callable[[Tensor], Tensor] = torch.exp) -> Tensor:
    """[N, D] of keys and gates [N, M, D]; added up position by position, whatever else is computed beside it."""
    gates = gates + bias
    weights = exp(gates - gates.amax(dim=1, keepdim=True))
    total = in_order(weights)
    return in_order(keys * (weights / total[:, None]))


def in_order(parts: Tensor) -> Tensor:
    """The sum [N, D] of parts [N, M, D], one after the other."""
    total = parts[:, 0]
    for index in range(1, parts.shape[1]):
        total = total + parts[:, index]
    return total

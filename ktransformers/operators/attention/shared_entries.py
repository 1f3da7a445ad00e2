"""What layers of DeepSeek-V4.1 hand on to those behind them: the entries that rows attend to, and where they were
gathered.

    T rows, D head_dim, W positions of a window, K entries that a row sees at most

Entries and windows lie in the caches of two layers. Kernels of attention read one: entries are gathered once for all
layers that share them, with room behind them for a layer's own window, and rows have one table over both.

    keys    | N entries, as many as are seen, or all of the step's sequences | M positions of windows |
    table   row t: numbers in `keys` of its entries in ascending order, then of its window's positions
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.operators.attention.pools import PoolStep
from ktransformers.operators.attention.topk_positions import TopkPositions
from ktransformers.operators.context import ForwardContext

__all__ = ["SharedEntries", "Windows"]


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a step's rows. slots: int64 [M], where the positions lie that any row's window has. numbers: int64
    [T, W], of a row's own among them, ascending, of which the first counts [T] are in use.
    """

    slots: Tensor
    numbers: Tensor
    counts: Tensor

    @classmethod
    def of(cls, context: ForwardContext, size: int) -> Windows:
        """Return the windows of `size` positions; made once per step."""
        return context.derived(f"windows of {size}", context.kv_lens, lambda lens: cls._made(context, lens, size))

    @classmethod
    def _made(cls, context: ForwardContext, lens: Tensor, size: int) -> Windows:
        ends, seq_ids = lens.long(), context.seq_ids.long()
        counts = ends.clamp(max=size)
        num_seqs = len(context.block_table)
        first = torch.full((num_seqs,), torch.iinfo(torch.int64).max).scatter_reduce(0, seq_ids, ends - counts, "amin")
        last = torch.zeros(num_seqs, dtype=torch.int64).scatter_reduce(0, seq_ids, ends, "amax")
        lengths = (last - first).clamp(min=0)  # none of sequences without rows
        bases = lengths.cumsum(0) - lengths
        seqs = torch.arange(num_seqs).repeat_interleave(lengths)
        positions = torch.arange(len(seqs)) - bases[seqs] + first[seqs]
        pages = context.block_table.long()[seqs, positions // context.page_size]
        slots = pages * context.page_size + positions % context.page_size
        starts = bases[seq_ids] + ends - counts - first[seq_ids]
        at = torch.arange(size)
        return cls(slots, starts[:, None] + at.minimum(counts[:, None] - 1), counts)


@dataclass(frozen=True, slots=True)
class SharedEntries:
    """Entries that rows of a step attend to, and the windows beside them, see the module's docstring.

    keys: fp32 [N + M, D], of which each layer writes its own window. candidates: the entries' slots among which
    indexers of later layers choose; None: all.
    """

    keys: Tensor
    num_entries: int
    table: TopkPositions
    windows: Windows
    candidates: TopkPositions | None = None

    @classmethod
    def of(
        cls,
        cached: Tensor,
        step: PoolStep | None,
        chosen: TopkPositions | None,
        windows: Windows,
        candidates: TopkPositions | None,
    ) -> SharedEntries:
        """Gather what was chosen. cached: the entries by slot, [slots, D]. step: where those of all sequences lie.
        chosen: slots of those that rows see; None, like step: of none.
        """
        if step is None or chosen is None or not step.most:
            numbers, counts = windows.counts.new_zeros(len(windows.counts), 0), torch.zeros_like(windows.counts)
            slots = numbers.flatten()
        else:
            in_use = torch.arange(chosen.slots.shape[1]) < chosen.counts[:, None]
            own, counts = chosen.slots.long().masked_fill(~in_use, 0), chosen.counts.long()
            slots, numbers = _gathered(own, step.table.long().flatten(), len(cached))
        keys = torch.empty(len(slots) + len(windows.slots), cached.shape[1])
        torch.index_select(cached, 0, slots, out=keys[: len(slots)])
        table = _table(numbers, counts, windows, len(slots))
        return cls(keys, len(slots), table, windows, candidates)

    def with_window(self, cached: Tensor) -> Tensor:
        """Return the keys with a layer's own windows behind the entries, [N + M, 1, D]. cached: its keys by slot."""
        torch.index_select(cached, 0, self.windows.slots, out=self.keys[self.num_entries :])
        return self.keys[:, None]


def _gathered(own: Tensor, all_slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Which slots to gather, and the numbers of rows' `own` [T, K] among them: each row's, or, if those are more, all
    of the step's sequences."""
    if own.numel() <= len(all_slots):
        return own.flatten(), torch.arange(own.numel()).view(own.shape)
    places = torch.zeros(num_slots, dtype=torch.int64)
    places[all_slots] = torch.arange(len(all_slots))
    return all_slots, places[own]


def _table(numbers: Tensor, counts: Tensor, windows: Windows, num_entries: int) -> TopkPositions:
    """Each row's entries, `numbers` [T, K] of which the first counts [T] are in use, and then its window."""
    lens = counts + windows.counts
    at = torch.arange(int(lens.max()) if len(lens) else 0)
    inside = (at - counts[:, None]).clamp(0, windows.numbers.shape[1] - 1)
    table = windows.numbers.gather(1, inside) + num_entries
    if numbers.shape[1]:
        entry = numbers.gather(1, at.clamp(max=numbers.shape[1] - 1).expand(len(lens), -1))
        table = torch.where(at < counts[:, None], entry, table)
    return TopkPositions(table.to(torch.int32).contiguous(), lens.to(torch.int32))

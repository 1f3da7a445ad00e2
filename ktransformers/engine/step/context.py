"""The inputs of a step: tokens and positions, and the ForwardContext of them. Knows sequences and slots, not models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.cache.static import StaticCache
from ktransformers.core import Phase
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.context import ForwardContext, StateStep
from ktransformers.scheduler.records import ScheduledSequence

__all__ = [
    "PREFILL_ROWS",
    "ForwardBatch",
    "OneTokenStep",
    "StepStateSlots",
    "paged_context",
    "state_step",
    "static_context",
]

PREFILL_ROWS = 4
"""A step with more rows than this is a prefill step: operators may then use their prefill implementation."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The inputs of one flattened step of any sequences, on the CPU.

    positions: [3, T] with pictures whose positions have three axes. context: whose rows they are. keep: the N rows
    whose logits are wanted.
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T] or [3, T]
    context: ForwardContext
    keep: torch.Tensor  # int64 [N]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepStateSlots:
    """State slots of one sequence in a step, see scheduler.records.ScheduledSequence: read -1 begins with zeros; saves:
    (row, slot)."""

    read: int
    write: int
    saves: Sequence[tuple[int, int]] = ()


def static_context(
    cache: StaticCache, pool: WorkerPool, start: int, num_rows: int, states: StepStateSlots | None = None
) -> ForwardContext:
    """Make the context of `num_rows` tokens at positions start, start + 1, ... of the cache's one sequence.

    states: of recurrent layers; slot 0 is continued when None.
    """
    positions = torch.arange(start, start + num_rows)
    kv_lens = (positions + 1).to(torch.int32)
    states = states or StepStateSlots(0 if start else -1, 0)
    return ForwardContext(
        cache=cache,
        pool=pool,
        phase=Phase.PREFILL if num_rows > PREFILL_ROWS else Phase.GENERATE,
        page_size=cache.page_size,
        slot_mapping=positions,
        seq_ids=torch.zeros(num_rows, dtype=torch.int32),
        kv_lens=kv_lens,
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        states=state_step(cache, [states], np.array([num_rows]), kv_lens),
    )


def paged_context(
    cache: PagedCache, pool: WorkerPool, rows: Sequence[ScheduledSequence], tables: Sequence[npt.NDArray[np.int32]]
) -> tuple[torch.Tensor, ForwardContext]:
    """Make positions int64 [T] and the context of a step that carries `rows`, each a stretch of one sequence.

    tables: the whole block table of each row's sequence. T tokens in all, S rows, P pages of the longest block table.
    Raises ValueError for pages that the cache does not have: kernels on a GPU would read and write beyond it.
    """
    if len(rows) == 1:
        return _one_sequence(cache, pool, rows[0], tables[0])
    size = cache.page_size
    counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    table = np.zeros((len(rows), max(map(len, tables))), dtype=np.int32)
    for s, pages in enumerate(tables):
        table[s, : len(pages)] = pages
    _check_pages(cache, table)
    seq_ids = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    ends = np.cumsum(counts)
    positions = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
    slots = table[seq_ids, positions // size].astype(np.int64) * size + positions % size
    kv_lens = torch.from_numpy((positions + 1).astype(np.int32))
    states = [StepStateSlots(row.read_slot, row.write_slot, row.saves) for row in rows]
    context = ForwardContext(
        cache=cache,
        pool=pool,
        phase=Phase.PREFILL if ends[-1] > PREFILL_ROWS else Phase.GENERATE,
        page_size=size,
        slot_mapping=torch.from_numpy(slots),
        seq_ids=torch.from_numpy(seq_ids),
        kv_lens=kv_lens,
        block_table=torch.from_numpy(table),
        states=state_step(cache, states, counts, kv_lens),
    )
    return torch.from_numpy(positions), context


def _one_sequence(
    cache: PagedCache, pool: WorkerPool, row: ScheduledSequence, pages: npt.NDArray[np.int32]
) -> tuple[torch.Tensor, ForwardContext]:
    """`paged_context` of one sequence's step."""
    size, start, count = cache.page_size, row.start, row.num_tokens
    if count == 1:
        step = OneTokenStep(cache, pool)
        return step.positions, step.context(row, pages)
    if row.block_table:
        _check_pages(cache, pages)
    places = np.arange(start, start + count)
    slots = pages[places // size].astype(np.int64) * size + places % size
    kv_lens = torch.from_numpy((places + 1).astype(np.int32))
    context = ForwardContext(
        cache=cache,
        pool=pool,
        phase=Phase.PREFILL if count > PREFILL_ROWS else Phase.GENERATE,
        page_size=size,
        slot_mapping=torch.from_numpy(slots),
        seq_ids=torch.zeros(count, dtype=torch.int32),
        kv_lens=kv_lens,
        block_table=torch.from_numpy(pages[None]),  # grows at its end only
        states=_states_of(cache, row, kv_lens),
    )
    return torch.from_numpy(places), context


_ONE_TOKEN = Struct("=qqqi")  # token, position, slot, length of what it sees


class OneTokenStep:
    """The inputs of a step of one token, what every token of a chat waits for: int64 [1] token_ids and positions, and
    the context.

    They are written in place, and the context is made anew only for other pages: nothing may still read those of the
    step before. To make six tensors takes 50 us with the cold caches that kernels leave, to write them 10.
    """

    def __init__(self, cache: PagedCache, pool: WorkerPool):
        self._cache, self._pool = cache, pool
        self._numbers = memory = bytearray(_ONE_TOKEN.size)
        wide = torch.frombuffer(memory, dtype=torch.int64, count=3)
        self.token_ids, self.positions, self._slot_mapping = wide[:1], wide[1:2], wide[2:]
        self._kv_lens = torch.frombuffer(memory, dtype=torch.int32, count=1, offset=24)
        self._seq_ids = torch.zeros(1, dtype=torch.int32)
        self._pages: npt.NDArray[np.int32] | None = None  # of the context
        self._context: ForwardContext | None = None

    def context(self, row: ScheduledSequence, pages: npt.NDArray[np.int32], shift: int = 0) -> ForwardContext:
        """Write the step of `row`, whose token is 0 where it is not known, and return its context. pages: the block
        table; the same array as long as it is the same. shift: what its rotary position is further than its index.
        Errors as `paged_context`."""
        size, start = self._cache.page_size, row.start
        if pages is not self._pages:
            _check_pages(self._cache, pages)
        token_id = row.token_ids[0] if row.token_ids else 0
        slot = pages.item(start // size) * size + start % size
        _ONE_TOKEN.pack_into(self._numbers, 0, token_id, start + shift, slot, start + 1)
        if self._context is None or pages is not self._pages or self._cache.states is not None:
            self._pages, self._context = pages, self._new_context(row, pages)
        else:
            self._context.forget_derived()
        return self._context

    def _new_context(self, row: ScheduledSequence, pages: npt.NDArray[np.int32]) -> ForwardContext:
        return ForwardContext(
            cache=self._cache,
            pool=self._pool,
            phase=Phase.GENERATE,
            page_size=self._cache.page_size,
            slot_mapping=self._slot_mapping,
            seq_ids=self._seq_ids,
            kv_lens=self._kv_lens,
            block_table=torch.from_numpy(pages[None]),
            states=_states_of(self._cache, row, self._kv_lens),
            turned=self.positions,
        )


def _states_of(cache: PagedCache, row: ScheduledSequence, kv_lens: torch.Tensor) -> StateStep | None:
    if cache.states is None:
        return None
    slots = StepStateSlots(row.read_slot, row.write_slot, row.saves)
    return state_step(cache, [slots], np.array([row.num_tokens]), kv_lens)


def _check_pages(cache: PagedCache, table: npt.NDArray[np.int32]) -> None:
    if table.min() < 0 or table.max() >= cache.num_pages:
        raise ValueError(f"a block table names pages {table.min()} to {table.max()}; the cache has {cache.num_pages}")


def state_step(
    cache: PagedCache, states: Sequence[StepStateSlots], counts: npt.NDArray[np.int64], kv_lens: torch.Tensor
) -> StateStep | None:
    """Make the StateStep of sequences with `counts` rows each; None where no layer is recurrent.

    Raises ValueError for slots that the cache does not have.
    """
    if cache.states is None:
        return None
    first_rows = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=first_rows[1:])
    saved = np.full(first_rows[-1], -1, dtype=np.int32)
    for first, one in zip(first_rows, states, strict=False):
        for row, slot in one.saves:
            saved[first + row] = slot
    read, write = (np.array([getattr(one, name) for one in states], dtype=np.int32) for name in ("read", "write"))
    for name, slots, least in (("read", read, -1), ("write", write, 0), ("save", saved, -1)):
        if slots.min() < least or slots.max() >= cache.num_states:
            raise ValueError(f"{name} slots {slots.min()} to {slots.max()} of states; there are {cache.num_states}")
    bounds, reads, writes, saves = (torch.from_numpy(array) for array in (first_rows, read, write, saved))
    return StateStep(bounds, reads, writes, saves, kv_lens, int(counts.max()))

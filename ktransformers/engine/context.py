"""Builds the ForwardContext of a step. Knows sequences and slots, not models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.cache.static import StaticCache
from ktransformers.core import Phase
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.context import ForwardContext
from ktransformers.scheduler.records import Row

__all__ = ["PREFILL_ROWS", "paged_context", "static_context"]

PREFILL_ROWS = 4
"""A step with more rows than this is a prefill step: operators may then use their prefill implementation."""


def static_context(cache: StaticCache, pool: WorkerPool, start: int, num_rows: int) -> ForwardContext:
    """Context of `num_rows` tokens at positions start, start + 1, ... of the cache's one sequence."""
    positions = torch.arange(start, start + num_rows)
    return ForwardContext(
        cache=cache,
        pool=pool,
        phase=Phase.PREFILL if num_rows > PREFILL_ROWS else Phase.GENERATE,
        page_size=cache.page_size,
        slot_mapping=positions,
        seq_ids=torch.zeros(num_rows, dtype=torch.int32),
        kv_lens=(positions + 1).to(torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
    )


def paged_context(
    cache: PagedCache, pool: WorkerPool, rows: Sequence[Row], tables: Sequence[npt.NDArray[np.int32]]
) -> tuple[torch.Tensor, ForwardContext]:
    """Positions int64 [T] and the context of a step that carries `rows`, each a stretch of one sequence.

    tables: the whole block table of each row's sequence. T tokens in all, S rows, P pages of the longest block table.
    Raises ValueError for pages that the cache does not have: kernels on a GPU would read and write beyond it.
    """
    size = cache.page_size
    counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    table = np.zeros((len(rows), max(map(len, tables))), dtype=np.int32)
    for s, pages in enumerate(tables):
        table[s, : len(pages)] = pages
    if table.min() < 0 or table.max() >= cache.num_pages:
        raise ValueError(f"a block table names pages {table.min()} to {table.max()}; the cache has {cache.num_pages}")
    seq_ids = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    ends = np.cumsum(counts)
    positions = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
    slots = table[seq_ids, positions // size].astype(np.int64) * size + positions % size
    context = ForwardContext(
        cache=cache,
        pool=pool,
        phase=Phase.PREFILL if ends[-1] > PREFILL_ROWS else Phase.GENERATE,
        page_size=size,
        slot_mapping=torch.from_numpy(slots),
        seq_ids=torch.from_numpy(seq_ids),
        kv_lens=torch.from_numpy((positions + 1).astype(np.int32)),
        block_table=torch.from_numpy(table),
    )
    return torch.from_numpy(positions), context

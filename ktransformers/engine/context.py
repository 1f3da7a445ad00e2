"""Builds the ForwardContext of a step. Knows sequences and slots, not models."""

from __future__ import annotations

import torch

from ktransformers.cache.static import StaticCache
from ktransformers.core import Phase
from ktransformers.kernels.native import WorkerPool
from ktransformers.operators.context import ForwardContext

__all__ = ["PREFILL_ROWS", "static_context"]

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

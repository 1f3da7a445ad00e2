"""Compiles the kernels of all steps that a loaded model can meet, before it is ready: no stream waits for a compiler.

Steps of every kind are called in a warm-up, which launches nothing (triton/common/compiling.py): caches, statistics
and results are left alone. Of the decoder layers one of each kind is called (layer_kinds.py), and all that is no layer.
Knows row counts, sequences and pages; not which kernels there are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.core import Phase
from ktransformers.engine.sampling.logits_request import BEST_TOKEN
from ktransformers.engine.step.context import PREFILL_ROWS, ForwardBatch, StepStateSlots, state_step
from ktransformers.engine.step.decode import DecodeSteps
from ktransformers.engine.step.decode_inputs import decode_batch_sizes
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.verify.layer_kinds import one_of_each
from ktransformers.errors import MODULE_FAILURES
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.triton.attention.launch import DECODE_ROWS, MAX_SHARES, MAX_SPLITS, MIN_CHUNK
from ktransformers.kernels.triton.common.compiling import Compiled, warmup
from ktransformers.kernels.triton.experts.workspace import row_thresholds
from ktransformers.operators.context import ForwardContext

__all__ = ["WarmupShapes", "row_counts", "warm_up"]

logger = logging.getLogger(__name__)

_ROWS = (1, 2, 3, 4, 8, 16, 17, 32, 33, 64, 65)
"""Kernels of products choose their tiles by rows; from there on, powers of two are near enough."""
_KEPT = (1, 2, 3, 4, 8, 17, 33, 64)
"""Rows of which logits are asked."""


@dataclass(frozen=True, slots=True)
class WarmupShapes:
    """The largest steps that a model can meet: of up to most_rows tokens (chunk_size) and max_batch_size sequences, of
    num_pages pages each at most. num_experts, top_k: of its routed experts, 0 without."""

    most_rows: int
    max_batch_size: int
    num_pages: int
    num_experts: int = 0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """rows tokens of seqs sequences with so many pages, and of how many rows logits are asked. is_far: they are the
    last positions of their pages."""

    rows: int
    seqs: int = 1
    pages: int = 1
    kept: int = 1
    is_far: bool = False


def row_counts(extent: WarmupShapes, least: int) -> list[int]:
    """Numbers of rows from `least` on, one at least for every choice that launches make by it."""
    most = max(extent.most_rows, least)
    found = {least, most, *_ROWS, *(1 << bit for bit in range(most.bit_length()))}
    if extent.num_experts and extent.top_k:
        for rows in row_thresholds(extent.num_experts, extent.top_k):
            found |= {rows, rows + 1}
    return sorted(rows for rows in found if least <= rows <= most)


def _page_counts(extent: WarmupShapes, page_size: int) -> list[int]:
    """Numbers of pages that cover every way to split a row's positions over programs."""
    most = min(extent.num_pages, -(-MAX_SPLITS * MIN_CHUNK // page_size))
    return list(range(1, most + 1))


def _steps(extent: WarmupShapes, page_size: int, least: int) -> Iterator[_Step]:
    """Steps of at least so many rows, whose launches differ."""
    counts = row_counts(extent, least)
    for rows in counts:
        yield _Step(rows)
        if rows <= DECODE_ROWS:
            yield from (_Step(rows, pages=pages) for pages in _page_counts(extent, page_size)[1:])
    large = [rows for rows in counts if rows > DECODE_ROWS]
    for rows in {*large[:1], *large[-1:]}:
        for seqs in range(2, min(MAX_SHARES, extent.max_batch_size) + 1):
            yield _Step(rows, seqs=seqs)
    for rows in large:
        yield _Step(rows, pages=extent.num_pages, is_far=True)
    rows = next((rows for rows in counts if rows >= _KEPT[-1]), counts[-1])
    for kept in _KEPT:
        if 1 < kept <= rows:
            yield _Step(rows, kept=kept)


def _batch(cache: PagedCache, pool: WorkerPool, step: _Step) -> ForwardBatch:
    """A step on the first pages: nothing is in them yet that torch's own operations spoil."""
    seq_ids = torch.arange(step.rows) * step.seqs // step.rows
    nth = torch.arange(step.rows) - torch.searchsorted(seq_ids, seq_ids)
    counts = torch.bincount(seq_ids, minlength=step.seqs)
    first = (step.pages * cache.page_size - counts).clamp_min(0) if step.is_far else torch.zeros_like(counts)
    positions = (first[seq_ids] + nth).clamp_max(step.pages * cache.page_size - 1)
    kv_lens = (positions + 1).to(torch.int32)
    states = [StepStateSlots(-1, seq % max(cache.num_states, 1)) for seq in range(step.seqs)]
    context = ForwardContext(
        cache=cache,
        pool=pool,
        phase=Phase.PREFILL if step.rows > PREFILL_ROWS else Phase.GENERATE,
        page_size=cache.page_size,
        slot_mapping=torch.arange(step.rows) % cache.num_slots,
        seq_ids=seq_ids.to(torch.int32),
        kv_lens=kv_lens,
        block_table=torch.zeros(step.seqs, step.pages, dtype=torch.int32),
        states=state_step(cache, states, counts.numpy(), kv_lens),
    )
    return ForwardBatch(torch.zeros_like(positions), positions, context, torch.arange(step.rows)[-step.kept :])


@torch.inference_mode()
def warm_up(
    forward: ForwardPass,
    cache: PagedCache,
    decode: DecodeSteps | None,
    extent: WarmupShapes,
    kinds: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
) -> Compiled:
    """Compile the kernels of all steps of these shapes. decode: how steps of few rows will run, without graphs.

    kinds: of the decoder layers (`layer_kinds`). progress: called with (done, all) kernels. Logs one line.
    """
    layout = forward.layout
    assert layout is not None, "steps on the CPU launch nothing"
    with warmup(progress) as found, one_of_each(forward.model, kinds):
        if decode is not None:
            for size in decode_batch_sizes(decode.max_rows):
                decode.step(_batch(cache, forward.pool, _Step(size, seqs=size, kept=size)))
            for mixed in decode.mixed:
                decode.step(_batch(cache, forward.pool, _Step(mixed.rows, seqs=mixed.seqs, kept=mixed.kept)))
            for need in (BEST_TOKEN, 1):  # what finds the best tokens is launched alike for any number of rows
                decode.step(_batch(cache, forward.pool, _Step(1)), [need])
        least = 1 if decode is None else decode.max_rows + 1
        if all(device.is_gpu for device in layout.devices):
            steps = _steps(extent, cache.page_size, least)
        else:  # layers on the CPU compute theirs
            steps = (_Step(rows) for rows in row_counts(extent, least) if rows <= _ROWS[-1])
        for step in steps:
            if not _is_called(forward, cache, step):
                break
    if any(device.torch_device.type == "cuda" for device in layout.devices):
        torch.cuda.empty_cache()  # of large steps; graphs that are captured next cannot take it from there
    logger.info(
        "%d kernels are ready: %d compiled, %d from the disk, in %.1f s",
        found.num_compiled + found.num_from_disk,
        found.num_compiled,
        found.num_from_disk,
        found.seconds,
    )
    return found


def _is_called(forward: ForwardPass, cache: PagedCache, step: _Step) -> bool:
    """Whether a step can be called; one line when it cannot."""
    try:
        forward.run(forward.inputs_of(_batch(cache, forward.pool, step)))
    except MODULE_FAILURES as error:
        logger.debug("a warm-up step failed", exc_info=True)
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        logger.warning("kernels may be compiled while serving: %s was not warmed up (%s)", step, reason)
        return False
    return True

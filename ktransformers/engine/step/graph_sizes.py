"""Finds which sizes of steps, beside decode steps, can be replayed from CUDA graphs: by what operators plan on the
host.

A step whose layers are all captured is replayed whole. Where the host decides inside of a step it stays eager: experts
that it streams, or that it waits for; expanded latents; the choices of sparse attention, whose graphs would look at as
many positions as the longest sequence has. Between its layers such a step could be replayed in pieces: the seams are
KTransformersExperts.submit and collect, and StepRuns of latent attention.

A step with draft tokens is one of few rows and runs as a decode step of as many sequences does: its attention reads the
positions of each row by itself, shared out over programs, latents are not expanded, and sparse attention chooses among
what the longest sequence may have. So such steps are captured wherever decode steps are.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

from ktransformers.engine.step.decode_inputs import StepSize, mixed_sizes
from ktransformers.engine.step.expert_streaming import PrefillStream
from ktransformers.engine.step.layout import StepLayout
from ktransformers.operators.attention.compressed import KCompressedAttention
from ktransformers.operators.attention.flash import FlashLayer
from ktransformers.operators.attention.indexer import KIndexer
from ktransformers.operators.attention.latent_materialization import MaterializationPolicy
from ktransformers.operators.attention.mla import KMLAAttention
from ktransformers.operators.device import STREAM_ROWS
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.plan import Plan

__all__ = ["DRAFT_ROWS", "GRAPH_ROWS", "choices_of", "largest_graph", "replayed_drafts", "replayed_sizes"]

logger = logging.getLogger(__name__)

GRAPH_ROWS = (16, 32, 64, 128, 256, 512, 1024)
"""Rows of the graphs: above, launching kernels one by one costs little beside running them."""

DRAFT_ROWS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Rows of the graphs for draft tokens: no step is padded by more than half. Above, drafting hardly ever pays."""


def largest_graph(rows: Sequence[int], chunk_size: int) -> int:
    """Count the rows of the largest graph of steps of up to chunk_size rows, 0 without any."""
    return min(max(rows, default=0), chunk_size)


def choices_of(plan: Plan) -> tuple[MaterializationPolicy, ...]:
    """Return how the latent attention of a loaded model chooses the sequences whose keys it expands: each choice
    once."""
    found = (op.prefill_choice for op in plan.operators.values() if isinstance(op, KMLAAttention))
    return tuple(dict.fromkeys(choice for choice in found if choice is not None))


def _why_none(plan: Plan, flash: Iterable[FlashLayer]) -> str | None:
    """Why no step of several rows a sequence can be replayed; None where nothing is known to speak against it."""
    for operator in plan.operators.values():
        if isinstance(operator, KCompressedAttention) or (isinstance(operator, KIndexer) and operator.is_used):
            return "sparse attention would choose among as many positions as the longest sequence may have"
    if any(layer.is_required for layer in flash):
        return "--attention_backend flashinfer, which plans each step on the host"
    return None


def _why_not(rows: int, plan: Plan, layout: StepLayout) -> str | None:
    """Why steps of so many rows cannot be replayed."""
    streams = [
        service for device in layout.devices for service in device.services if isinstance(service, PrefillStream)
    ]
    if any(stream.prefill.takes(rows) for stream in streams):
        return "the host chooses the experts that are streamed"
    experts = (op for op in plan.operators.values() if isinstance(op, KTransformersExperts))
    if rows > STREAM_ROWS and any(not op.device.is_gpu for op in experts):
        return f"the host waits for the CPU's experts of more than {STREAM_ROWS} rows"
    return None


def replayed_sizes(
    rows: Sequence[int],
    plan: Plan,
    layout: StepLayout,
    flash: Collection[FlashLayer],
    most_rows: int,
    max_batch_size: int,
) -> tuple[StepSize, ...]:
    """Choose those sizes of `rows` for steps of up to most_rows rows and max_batch_size sequences, of a loaded model
    with what its operators were given. Logs one line for each reason why others are not replayed."""
    sizes, reason = mixed_sizes(rows, most_rows, max_batch_size), _why_none(plan, flash)
    if reason is not None:
        if sizes:
            logger.info("steps of several rows a sequence run without CUDA graphs: %s", reason)
        return ()
    reasons: dict[str, int] = {}
    found = []
    for size in sizes:
        reason = _why_not(size.rows, plan, layout)
        if reason is None:
            found.append(size)
        else:
            reasons.setdefault(reason, size.rows)
    largest = max((size.rows for size in found), default=0)
    for reason in reasons:
        logger.info("steps of more than %d rows run without CUDA graphs: %s", largest, reason)
    if choices_of(plan) and found:
        logger.info("steps that expand latents run without CUDA graphs: the host plans each of them")
    return tuple(found)


def replayed_drafts(sizes: Iterable[StepSize], plan: Plan, layout: StepLayout) -> tuple[StepSize, ...]:
    """Return those of the sizes of steps with draft tokens, in ascending order, in which the host decides nothing.
    Logs one line where there are others."""
    found = []
    for size in sizes:
        reason = _why_not(size.rows, plan, layout)
        if reason is not None:
            logger.info("steps of %d rows or more with draft tokens run without CUDA graphs: %s", size.rows, reason)
            break
        found.append(size)
    return tuple(found)

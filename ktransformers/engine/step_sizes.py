"""Which sizes of steps, beside decode steps, can be replayed from CUDA graphs: by what operators plan on the host.

A step whose layers are all captured is replayed whole. Where the host has a part in the experts, which it streams or
waits for, what lies between them is replayed in pieces. Other steps in which the host decides stay eager: expanded
latents; the choices of sparse attention, whose graphs would look at as many positions as the longest sequence has.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence

from ktransformers.engine.decode_inputs import ReplayedSizes, mixed_sizes
from ktransformers.engine.layout import StepLayout
from ktransformers.engine.prefill import PrefillStream
from ktransformers.operators.attention.chooser import Chooser
from ktransformers.operators.attention.compressed import KCompressedAttention
from ktransformers.operators.attention.flash import FlashLayer
from ktransformers.operators.attention.latent_expansion import Choice
from ktransformers.operators.attention.mla import KMLAAttention
from ktransformers.operators.device import STREAM_ROWS
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.plan import Plan

__all__ = ["GRAPH_ROWS", "choices_of", "largest_graph", "piece_rows", "replayed_sizes"]

logger = logging.getLogger(__name__)

GRAPH_ROWS = (16, 32, 64, 128, 256, 512, 1024)
"""Rows of whole steps in a graph: above, launching kernels one by one costs little beside running them."""

_FINE_ROWS = 512
"""From here on sizes of steps in pieces are a quarter of a power of two apart: padding takes a fifth of all but the
experts at most, which are half of such a step or more, and a tenth on average."""


def piece_rows(rows: Sequence[int], most_rows: int) -> tuple[int, ...]:
    """Rows of steps in pieces, of up to most_rows: as whole steps, and finer ones above. None where `rows` has none."""
    if not rows:
        return ()
    return tuple(sorted({*(count for count in rows if count <= most_rows), *_fine(most_rows), most_rows}))


def _fine(most_rows: int) -> Iterator[int]:
    count = _FINE_ROWS
    while count <= most_rows:
        yield count
        count += (1 << (count.bit_length() - 1)) // 4


def largest_graph(rows: Sequence[int], most_rows: int, plan: Plan, has_flash: bool) -> int:
    """Rows of the largest graph of steps of up to most_rows rows, 0 without any.

    plan: before anything is loaded. has_flash: whether FlashInfer is to attend anywhere.
    """
    operators = plan.operators.values()
    experts = [op for op in operators if isinstance(op, KTransformersExperts)]
    is_expanded = any(op.expansion_choice() is not None for op in operators if isinstance(op, KMLAAttention))
    is_whole = has_flash or is_expanded or len({home.device for home in plan.homes}) > 1
    if rows and not is_whole and any(not op.device.is_gpu and op.home.is_gpu for op in experts):
        return most_rows
    return min(max(rows, default=0), most_rows)


def choices_of(plan: Plan) -> tuple[Choice, ...]:
    """How the latent attention of a loaded model chooses the sequences whose keys it expands: each choice once."""
    found = (op.prefill_choice for op in plan.operators.values() if isinstance(op, KMLAAttention))
    return tuple(dict.fromkeys(choice for choice in found if choice is not None))


def _why_none(plan: Plan, flash: Iterable[FlashLayer]) -> str | None:
    """Why no step of several rows a sequence can be replayed; None where nothing is known to speak against it."""
    for operator in plan.operators.values():
        if isinstance(operator, KCompressedAttention) or (isinstance(operator, Chooser) and operator.is_used):
            return "sparse attention would choose among as many positions as the longest sequence may have"
    if any(layer.is_required for layer in flash):
        return "--attention_backend flashinfer, which plans each step on the host"
    return None


def _why_not(rows: int, plan: Plan, layout: StepLayout) -> str | None:
    """Why steps of so many rows cannot be replayed."""
    streams = [beside for device in layout.devices for beside in device.besides if isinstance(beside, PrefillStream)]
    if any(stream.prefill.takes(rows) for stream in streams):
        return "the host chooses the experts that are streamed"
    experts = (op for op in plan.operators.values() if isinstance(op, KTransformersExperts))
    if rows > STREAM_ROWS and any(not op.device.is_gpu for op in experts):
        return f"the host waits for the CPU's experts of more than {STREAM_ROWS} rows"
    return None


def _why_no_pieces(plan: Plan, layout: StepLayout, flash: Collection[FlashLayer]) -> str | None:
    """Why steps whose experts the host has a part in cannot be replayed between them, or hardly ever would be."""
    if len(layout.devices) > 1:
        return "layers are on several GPUs"
    if flash:
        return "FlashInfer plans each step on the host"
    if choices_of(plan):
        return "the host plans which latents are expanded"
    return None


def replayed_sizes(
    rows: Sequence[int],
    plan: Plan,
    layout: StepLayout,
    flash: Collection[FlashLayer],
    most_rows: int,
    max_batch_size: int,
) -> ReplayedSizes:
    """Whole steps of `rows`, and steps in pieces of `piece_rows`, of up to most_rows rows and max_batch_size sequences,
    of a loaded model with what its operators were given. Logs one line for each reason why others are not replayed."""
    sizes, reason = mixed_sizes(rows, most_rows, max_batch_size), _why_none(plan, flash)
    if reason is not None:
        if sizes:
            logger.info("steps of several rows a sequence run without CUDA graphs: %s", reason)
        return ReplayedSizes()
    whole = tuple(size for size in sizes if _why_not(size.rows, plan, layout) is None)
    others = mixed_sizes(piece_rows(rows, most_rows), most_rows, max_batch_size)
    reasons = {size: reason for size in others if (reason := _why_not(size.rows, plan, layout)) is not None}
    largest, why_not = max((size.rows for size in whole), default=0), _why_no_pieces(plan, layout, flash)
    for reason in dict.fromkeys(reasons.values()):
        if why_not is None:
            logger.info("steps of more than %d rows are replayed between the experts: %s", largest, reason)
        else:
            logger.info("steps of more than %d rows run without CUDA graphs: %s, and %s", largest, reason, why_not)
    if choices_of(plan) and whole:
        logger.info("steps that expand latents run without CUDA graphs: the host plans each of them")
    return ReplayedSizes(whole, tuple(reasons) if why_not is None else ())

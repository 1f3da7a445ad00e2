"""Attention of rows that see all of their picture, what is behind them, too (Gemma 3 and 4).

In layers that see all positions such a row is one that sees more of them. In layers with a window it sees the window's
positions in front of it and the picture's behind it: these have a table of their own, of pages of one position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ktransformers.kernels.attention_call import AttentionCall
from ktransformers.operators.attention.topk_positions import TopkPositions
from ktransformers.operators.context import ForwardContext, PictureRows

__all__ = ["attend_pictures"]


def attend_pictures(
    call: AttentionCall, context: ForwardContext, attend: Callable[[AttentionCall], torch.Tensor]
) -> torch.Tensor:
    """Attend, [T, Hq, Dv], rows of pictures to what they see. context: the step's, where the cache is; its keys and
    values are written."""
    pictures = context.pictures
    if pictures is None or pictures.ends is None:
        return attend(call)
    if not call.window:
        if not pictures.ends_in_full:
            return attend(call)
        out = attend(replace(call, pages=replace(call.pages, kv_lens=pictures.ends)))
        gaps = pictures.gaps
        if gaps is not None:
            rows, positions = context.derived(
                "positions of pictures apart", pictures.ends, lambda ends: _apart(context, ends, gaps)
            )
            if len(rows):
                out[rows] = attend(replace(call, q=call.q[rows], pages=positions.pages))
        return out
    if call.is_chunked or not pictures.ends_in_windows:
        return attend(call)
    shown, ends = pictures, pictures.ends
    rows, positions = context.derived(
        f"positions of pictures in a window of {call.window}",
        ends,
        lambda ends: _seen(context, shown, ends, call.window),
    )
    out = attend(call)
    if len(rows):
        out[rows] = attend(replace(call, q=call.q[rows], pages=positions.pages, window=0))
    return out


def _apart(context: ForwardContext, ends: torch.Tensor, gaps: torch.Tensor) -> tuple[torch.Tensor, TopkPositions]:
    """The rows that see pictures behind them, int64 [N], and the slots of what they see: no text between these."""
    rows, size = (ends > context.kv_lens).nonzero()[:, 0], context.page_size
    if not len(rows):
        return rows, TopkPositions(rows[:, None].int(), rows.int())
    seqs = context.seq_ids[rows].long()
    is_gap = torch.zeros(len(context.block_table), int(max(ends.max(), gaps[1].max() + 1)), dtype=torch.bool)
    is_gap = is_gap.to(ends.device)
    is_gap[gaps[0], gaps[1]] = True
    places = torch.arange(is_gap.shape[1], device=ends.device)
    is_seen = (places < ends[rows, None]) & ~(is_gap[seqs] & (places >= context.kv_lens[rows, None]))
    counts = is_seen.sum(1)
    order = (~is_seen).to(torch.int8).argsort(dim=1, stable=True)[:, : int(counts.max())]
    pages = context.block_table[seqs[:, None], (order // size).clamp(max=context.block_table.shape[1] - 1)]
    return rows, TopkPositions((pages * size + order % size).int(), counts.int())


def _seen(
    context: ForwardContext, pictures: PictureRows, ends: torch.Tensor, window: int
) -> tuple[torch.Tensor, TopkPositions]:
    """The rows that see what is behind them, or in front of their window, int64 [N], and the slots of what they see."""
    is_wide = ends > context.kv_lens
    if pictures.starts is not None:
        is_wide |= pictures.starts < context.kv_lens - window
    rows, size = is_wide.nonzero()[:, 0], context.page_size
    if not len(rows):
        return rows, TopkPositions(rows[:, None].int(), rows.int())
    first, end = (context.kv_lens[rows] - window).clamp(min=0), ends[rows]
    if pictures.starts is not None:
        first = torch.minimum(first, pictures.starts[rows])
    counts = end - first
    places = first[:, None] + torch.arange(int(counts.max()), dtype=first.dtype, device=first.device)
    places = torch.minimum(places, end[:, None] - 1).long()  # what is behind counts[i] is not read
    pages = context.block_table[context.seq_ids[rows].long()[:, None], places // size]
    return rows, TopkPositions((pages * size + places % size).int(), counts)

"""A small model as drafter: any model that runs here, with the tokens of the target, on its own cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.engine.drafting.drafter import DraftLimits, DraftOutput, LogitsRequest, Piece
from ktransformers.engine.sampling.logits_request import WHOLE_ROW, StepLogits
from ktransformers.engine.step.context import paged_context
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.scheduler.records import ScheduledSequence

__all__ = ["DraftModelForward", "ids_of", "last_rows", "run_pieces"]


def ids_of(pieces: Sequence[Piece]) -> torch.Tensor:
    """Return the tokens of all pieces, int64 [T]."""
    return torch.tensor([token for piece in pieces for token in piece.token_ids])


def last_rows(pieces: Sequence[Piece], requests: Sequence[LogitsRequest]) -> list[int]:
    """Return the row of the last token of each piece whose logits are requested, in the step that runs them all."""
    ends = (np.cumsum([len(piece.token_ids) for piece in pieces]) - 1).tolist()
    return [end for end, request in zip(ends, requests, strict=True) if request is not None]


def run_pieces(
    runner: ModelRunner,
    cache: PagedCache,
    pieces: Sequence[Piece],
    token_ids: torch.Tensor,
    requests: Sequence[LogitsRequest],
) -> StepLogits:
    """Run a step of a draft model: the logits behind the last token of each piece, as far as they are requested."""
    rows, tables = list[ScheduledSequence](), list[np.ndarray[tuple[int], np.dtype[np.int32]]]()
    for piece, request in zip(pieces, requests, strict=True):
        end = piece.start + len(piece.token_ids)
        pages = piece.pages[: -(-end // cache.page_size)]  # those behind are of draft tokens to come
        tables.append(pages)
        rows.append(
            ScheduledSequence(
                run_id=piece.run_id,
                start=piece.start,
                token_ids=piece.token_ids,
                token_source=None,
                block_table=pages.tolist(),
                is_sampled=request is not None,
            )
        )
    positions, context = paged_context(cache, runner.pool, rows, tables)
    keep = torch.tensor(last_rows(pieces, requests), dtype=torch.int64)
    return runner.reduced_step(
        token_ids, positions, context, keep, [request for request in requests if request is not None]
    )


class DraftModelForward:
    """The DraftForward of a whole model.

    cache: its own, of the target's pages. Rows of logits are brought to the target's size: models of one tokenizer may
    be padded to different ones.
    """

    shift = 0

    def __init__(self, runner: ModelRunner, cache: PagedCache, limits: DraftLimits) -> None:
        self._runner, self._cache, self.limits = runner, cache, limits
        self._own_vocab = int(runner.model.config.vocab_size)

    def run(self, pieces: Sequence[Piece], requests: Sequence[LogitsRequest]) -> DraftOutput:
        """Run a step, see DraftForward."""
        token_ids = ids_of(pieces)
        token_ids[token_ids >= self._own_vocab] = 0  # the target's padding, which nothing samples
        if self._own_vocab == self.limits.vocab_size:
            return DraftOutput(run_pieces(self._runner, self._cache, pieces, token_ids, requests))
        whole = [None if request is None else WHOLE_ROW for request in requests]
        logits = run_pieces(self._runner, self._cache, pieces, token_ids, whole)
        assert isinstance(logits, torch.Tensor), "whole rows are asked for"
        return DraftOutput(self._fitted(logits))

    def _fitted(self, logits: torch.Tensor) -> torch.Tensor:
        missing = self.limits.vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self.limits.vocab_size]

    def hidden_states(self, first: int, count: int) -> torch.Tensor | None:
        """Return None: a whole model takes none."""
        return None

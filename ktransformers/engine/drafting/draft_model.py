"""A small model as drafter: any model that runs here, with the tokens of the target, on its own cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.engine.drafting.drafter import DraftLimits, DraftOutput, LogitsRequest, Piece
from ktransformers.engine.sampling.logits_request import WHOLE_ROW, StepLogits
from ktransformers.engine.step.context import OneTokenStep, paged_context
from ktransformers.engine.step.executor_runs import FIRST_ROW
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.scheduler.records import ScheduledSequence

__all__ = ["DraftModelForward", "PieceSteps"]

_NONE_KEPT = torch.zeros(0, dtype=torch.int64)


class PieceSteps:
    """Runs the steps of a draft model on its cache. Most have one token, whose inputs are written in place."""

    def __init__(self, runner: ModelRunner, cache: PagedCache) -> None:
        self._runner, self._cache = runner, cache
        self._one_token = OneTokenStep(cache, runner.pool)

    def run(self, pieces: Sequence[Piece], requests: Sequence[LogitsRequest]) -> tuple[StepLogits, list[int]]:
        """Run a step: the logits behind the last token of each piece, as far as they are requested, and their rows."""
        rows = [_row_of(piece, request) for piece, request in zip(pieces, requests, strict=True)]
        ends = itertools.accumulate(len(piece.token_ids) for piece in pieces)
        kept = [end - 1 for end, request in zip(ends, requests, strict=True) if request is not None]
        needs = [request for request in requests if request is not None]
        if len(pieces) == len(pieces[0].token_ids) == 1:
            step, keep = self._one_token, FIRST_ROW if kept else _NONE_KEPT
            context = step.context(rows[0], pieces[0].pages)
            return self._runner.reduced_step(step.token_ids, step.positions, context, keep, needs), kept
        token_ids = torch.tensor([token for piece in pieces for token in piece.token_ids])
        positions, context = paged_context(self._cache, self._runner.pool, rows, [piece.pages for piece in pieces])
        keep = torch.tensor(kept, dtype=torch.int64)
        return self._runner.reduced_step(token_ids, positions, context, keep, needs), kept


def _row_of(piece: Piece, request: LogitsRequest) -> ScheduledSequence:
    return ScheduledSequence(
        run_id=piece.run_id,
        start=piece.start,
        token_ids=piece.token_ids,
        token_source=None,
        block_table=(),
        is_sampled=request is not None,
    )


class DraftModelForward:
    """The DraftForward of a whole model.

    cache: its own, of the target's pages. Rows of logits are brought to the target's size: models of one tokenizer may
    be padded to different ones.
    """

    shift = 0

    def __init__(self, runner: ModelRunner, cache: PagedCache, limits: DraftLimits) -> None:
        self._steps, self.limits = PieceSteps(runner, cache), limits
        self._own_vocab = int(runner.model.config.vocab_size)

    def run(self, pieces: Sequence[Piece], requests: Sequence[LogitsRequest]) -> DraftOutput:
        """Run a step, see DraftForward."""
        if self._own_vocab == self.limits.vocab_size:
            return DraftOutput(self._steps.run(pieces, requests)[0])
        whole = [None if request is None else WHOLE_ROW for request in requests]
        logits, _ = self._steps.run([self._known(piece) for piece in pieces], whole)
        assert isinstance(logits, torch.Tensor), "whole rows are asked for"
        return DraftOutput(self._fitted(logits))

    def _known(self, piece: Piece) -> Piece:
        """Without the target's padding, which nothing samples."""
        return replace(piece, token_ids=[token if token < self._own_vocab else 0 for token in piece.token_ids])

    def _fitted(self, logits: torch.Tensor) -> torch.Tensor:
        missing = self.limits.vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self.limits.vocab_size]

    def hidden_states(self, first: int, count: int) -> torch.Tensor | None:
        """Return None: a whole model takes none."""
        return None

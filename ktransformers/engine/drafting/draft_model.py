"""A small model as drafter: any model that runs here, with the tokens of the target, on its own cache."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.engine.drafting.drafter import DraftLimits, DraftOutput, LogitsRequest, Piece
from ktransformers.engine.media.family import PictureFamily
from ktransformers.engine.media.rows import StepRow, pictures_in
from ktransformers.engine.sampling.logits_request import WHOLE_ROW, StepLogits
from ktransformers.engine.step.context import ForwardBatch, OneTokenStep, paged_context
from ktransformers.engine.step.executor_runs import FIRST_ROW
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.operators.context import ForwardContext
from ktransformers.scheduler.records import ScheduledSequence

__all__ = ["DraftModelForward", "PieceSteps", "scheduled_row"]

logger = logging.getLogger(__name__)

_NONE_KEPT = torch.zeros(0, dtype=torch.int64)


class _Inputs(NamedTuple):
    """Of a step, as ModelRunner takes them. kept: the rows in `keep`."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    context: ForwardContext
    keep: torch.Tensor
    kept: list[int]


class PieceSteps:
    """Runs the steps of a draft model on its cache. Most have one token, whose inputs are written in place.

    On a GPU the step behind one is launched while this one runs, where it is known that there will be one; it goes on
    with the tokens that this one makes. before_held: called before that with the rows of the step under way that it
    goes on from. is_fixed: see DraftForward; a token then stands at the position behind the last one that it attends
    to. ahead: how far behind the position of its entry a token stands that may show a part of a picture; 0: the model
    sees no pictures.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: PagedCache,
        before_held: Callable[[list[int]], None] = lambda rows: None,
        *,
        is_fixed: bool = False,
        ahead: int = 0,
    ) -> None:
        self._runner, self._cache, self._before_held, self._is_fixed = runner, cache, before_held, is_fixed
        self._ahead, self._has_said = ahead, False
        self._pool_size = max((shape.index_pool for shape in cache.shapes), default=1)
        self._one_token = OneTokenStep(cache, runner.pool)
        self._held: _Inputs | None = None

    @property
    def has_held(self) -> bool:
        """Whether the next step is launched already."""
        return self._held is not None

    def run(
        self, pieces: Sequence[Piece], requests: Sequence[LogitsRequest], behind: Sequence[int] = ()
    ) -> tuple[StepLogits, list[int]]:
        """Run a step: the logits behind the last token of each piece, as far as they are requested, and their rows.

        behind: the pieces, with a request, behind which the next step runs a token.
        """
        held, self._held = self._held, None
        if held is None:
            inputs = self._inputs(pieces, [request is not None for request in requests])
        else:
            inputs = held
            held.token_ids.numpy()[:] = [token for piece in pieces for token in piece.token_ids]
            self._runner.release(held.token_ids)
        if behind and self._runner.runs_apart:
            self._runner.meanwhile = partial(self._hold, pieces, behind)
        needs = [request for request in requests if request is not None]
        return self._runner.reduced_step(ForwardBatch(*inputs[:4]), needs), inputs.kept

    def _hold(self, pieces: Sequence[Piece], behind: Sequence[int]) -> None:
        ends = list(itertools.accumulate(len(piece.token_ids) for piece in pieces))
        self._before_held([ends[i] - 1 for i in behind])
        starts = [pieces[i].start if self._is_fixed else pieces[i].end for i in behind]
        later = [
            replace(pieces[i], start=start, token_ids=[0], hidden_states=None)
            for i, start in zip(behind, starts, strict=True)
        ]
        inputs = self._inputs(later, [True] * len(later))
        if self._runner.launch_held(ForwardBatch(*inputs[:4])):
            self._held = inputs

    def drop_held(self) -> None:
        """Let a step come to nothing that was launched and will not be asked for: a GPU must not wait for ever."""
        held, self._held = self._held, None
        if held is None:
            self._runner.drop_released()  # of one that failed before it was asked for
        else:
            self._runner.release(held.token_ids, is_wanted=False)

    def _inputs(self, pieces: Sequence[Piece], wanted: Sequence[bool]) -> _Inputs:
        rows = [scheduled_row(piece, is_sampled=is_wanted) for piece, is_wanted in zip(pieces, wanted, strict=True)]
        ends = itertools.accumulate(len(piece.token_ids) for piece in pieces)
        kept = [end - 1 for end, is_wanted in zip(ends, wanted, strict=True) if is_wanted]
        seen = [piece.pictures if self._ahead else None for piece in pieces]
        is_first_plain = seen[0] is None or pieces[0].start >= seen[0].prompt_len + self._pool_size - 1
        if len(pieces) == len(pieces[0].token_ids) == 1 and is_first_plain:
            step, keep = self._one_token, FIRST_ROW if kept else _NONE_KEPT
            context = step.context(rows[0], pieces[0].pages, 0 if seen[0] is None else seen[0].shift)
            return _Inputs(step.token_ids, step.positions + self._is_fixed, context, keep, kept)
        token_ids = torch.tensor([token for piece in pieces for token in piece.token_ids])
        positions, context = paged_context(self._cache, self._runner.pool, rows, [piece.pages for piece in pieces])
        if any(seen):
            spans = [(one, piece.start, piece.end) for one, piece in zip(seen, pieces, strict=True)]
            positions, context = self._with_pictures(spans, positions, context)
        return _Inputs(token_ids, positions + self._is_fixed, context, torch.tensor(kept, dtype=torch.int64), kept)

    def _with_pictures(
        self, spans: Sequence[StepRow], positions: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, ForwardContext]:
        """Put pictures into a step, as the target's have them. One that cannot be had is a token: drafts are worse."""
        family = PictureFamily(0)  # what is behind a position was not run: no layer may see it
        turned, shown, failed = pictures_in(
            spans, positions, context.kv_lens, family, self._pool_size, ahead=self._ahead
        )
        if failed and not self._has_said:
            self._has_said = True
            logger.warning("draft tokens come without a picture: %s", failed[0][1])
        return turned, replace(context, pictures=shown, turned=turned if turned.dim() == 1 else None)


def scheduled_row(piece: Piece, *, is_sampled: bool) -> ScheduledSequence:
    """Return a piece as the row of a step."""
    return ScheduledSequence(
        run_id=piece.run_id,
        start=piece.start,
        token_ids=piece.token_ids,
        token_source=None,
        block_table=(),
        is_sampled=is_sampled,
    )


class DraftModelForward:
    """The DraftForward of a whole model.

    cache: its own, of the target's pages. Rows of logits are brought to the target's size: models of one tokenizer may
    be padded to different ones.
    """

    shift, is_fixed = 0, False

    def __init__(self, runner: ModelRunner, cache: PagedCache, limits: DraftLimits) -> None:
        self._steps, self.limits = PieceSteps(runner, cache), limits
        self._own_vocab = int(runner.model.config.vocab_size)

    def run(
        self, pieces: Sequence[Piece], requests: Sequence[LogitsRequest], behind: Sequence[int] = (), depth: int = 0
    ) -> DraftOutput:
        """Run a step, see DraftForward."""
        if self._own_vocab == self.limits.vocab_size:
            return DraftOutput(self._steps.run(pieces, requests, behind)[0])
        whole = [None if request is None else WHOLE_ROW for request in requests]
        logits, _ = self._steps.run([self._known(piece) for piece in pieces], whole, behind)
        assert isinstance(logits, torch.Tensor), "whole rows are asked for"
        return DraftOutput(self._fitted(logits))

    def drop_held(self) -> None:
        """Give up what was launched of a next step, see DraftForward."""
        self._steps.drop_held()

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

    def forget(self, run_ids: Iterable[int] | None) -> None:
        """Do nothing: it keeps nothing of single sequences."""

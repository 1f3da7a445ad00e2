"""A small model as drafter: any model that runs here, with the tokens of the target, on its own cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.engine.drafting.drafter import DraftLimits, DraftOutput, Piece
from ktransformers.engine.step.context import paged_context
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.scheduler.records import ScheduledSequence

__all__ = ["DraftModelForward", "ids_of", "run_pieces"]


def ids_of(pieces: Sequence[Piece]) -> torch.Tensor:
    """Return the tokens of all pieces, int64 [T]."""
    return torch.tensor([token for piece in pieces for token in piece.token_ids])


def run_pieces(
    runner: ModelRunner, cache: PagedCache, pieces: Sequence[Piece], token_ids: torch.Tensor, *, wants_output: bool
) -> torch.Tensor:
    """Run a step of a draft model: what its head gives for the last token of each piece, fp32 [N, width] on the CPU;
    [0, width] where nothing is wanted."""
    rows = [
        ScheduledSequence(
            run_id=piece.run_id,
            start=piece.start,
            token_ids=piece.token_ids,
            token_source=None,
            block_table=piece.pages.tolist(),
            is_sampled=wants_output,
        )
        for piece in pieces
    ]
    positions, context = paged_context(cache, runner.pool, rows, [piece.pages for piece in pieces])
    ends = np.cumsum([len(piece.token_ids) for piece in pieces]) - 1
    return runner.step(token_ids, positions, context, torch.from_numpy(ends if wants_output else ends[:0]))


class DraftModelForward:
    """The DraftForward of a whole model.

    cache: its own, of the target's pages. Rows of logits are brought to the target's size: models of one tokenizer may
    be padded to different ones.
    """

    shift = 0

    def __init__(self, runner: ModelRunner, cache: PagedCache, limits: DraftLimits) -> None:
        self._runner, self._cache, self.limits = runner, cache, limits
        self._own_vocab = int(runner.model.config.vocab_size)

    def run(self, pieces: Sequence[Piece], *, wants_output: bool) -> DraftOutput | None:
        """Run a step, see DraftForward. The logits are good until the next one."""
        token_ids = ids_of(pieces)
        token_ids[token_ids >= self._own_vocab] = 0  # the target's padding, which nothing samples
        logits = run_pieces(self._runner, self._cache, pieces, token_ids, wants_output=wants_output)
        return DraftOutput(self._fitted(logits)) if wants_output else None

    def _fitted(self, logits: torch.Tensor) -> torch.Tensor:
        missing = self.limits.vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self.limits.vocab_size]

    def hidden_states(self, first: int, count: int) -> torch.Tensor | None:
        """Return None: a whole model takes none."""
        return None

"""A small model as drafter: any model that runs here, with the tokens of the target, on its own cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.engine.drafting.drafter import DraftOutput, Piece
from ktransformers.engine.step.context import paged_context
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.scheduler.records import ScheduledSequence

__all__ = ["DraftModelForward"]


class DraftModelForward:
    """The DraftForward of a whole model.

    cache: its own, of the target's pages. max_rows, longest: see DraftForward. vocab_size: of the target. The draft
    model's rows of logits are brought to that: models of one tokenizer may be padded to different sizes.
    """

    shift = 0

    def __init__(self, runner: ModelRunner, cache: PagedCache, *, max_rows: int, longest: int, vocab_size: int) -> None:
        self._runner, self._cache, self._vocab_size = runner, cache, vocab_size
        self._own_vocab = int(runner.model.config.vocab_size)
        self.max_rows, self.longest = max_rows, longest

    def run(self, pieces: Sequence[Piece], *, wants_output: bool) -> DraftOutput | None:
        """Run a step, see DraftForward. The logits are good until the next one."""
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
        token_ids = torch.tensor([token for piece in pieces for token in piece.token_ids])
        token_ids[token_ids >= self._own_vocab] = 0  # the target's padding, which nothing samples
        tables = [piece.pages for piece in pieces]
        positions, context = paged_context(self._cache, self._runner.pool, rows, tables)
        ends = np.cumsum([len(piece.token_ids) for piece in pieces]) - 1
        keep = torch.from_numpy(ends if wants_output else ends[:0])
        logits = self._runner.step(token_ids, positions, context, keep)
        return DraftOutput(self._fitted(logits)) if wants_output else None

    def _fitted(self, logits: torch.Tensor) -> torch.Tensor:
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._vocab_size]

    def hidden_states(self, first: int, count: int) -> torch.Tensor | None:
        """Return None: a whole model takes none."""
        return None

"""Computes the logits of one sequence, step by step as its caller says: for measurements, and the oracle of tests.

The scheduler decides the steps of every program; here is what it is compared with, which shares none of its code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.engine.load.builder import Engine
from ktransformers.engine.sampling.logits_request import StepLogits
from ktransformers.engine.step.context import ForwardBatch, paged_context
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.errors import ConfigError, ContextLengthError
from ktransformers.scheduler.records import ScheduledSequence

__all__ = ["SequenceRunner"]


class SequenceRunner:
    """Runs one sequence of at most max_len tokens, whose keys and values are in the pages of `cache`, in their order.

    Its state, in layers that keep one, is in slot 0: such a sequence goes on where it ended, or begins anew.
    """

    is_models_limit = False

    def __init__(self, runner: ModelRunner, cache: PagedCache, vocab_size: int, max_len: int | None = None):
        self.steps, self.cache, self.vocab_size = runner, cache, vocab_size
        self.model, self.pool, self.hook = runner.model, runner.pool, runner.hook
        self.max_len = min(cache.num_slots, max_len or cache.num_slots)
        self.written_len = 0  # positions whose keys and values are in the cache
        self._table = np.arange(cache.num_pages, dtype=np.int32)

    @classmethod
    def of(cls, engine: Engine) -> SequenceRunner:
        """Make the runner of a loaded engine, which nobody else uses meanwhile."""
        runner = engine.executor.runner
        assert isinstance(runner, ModelRunner)
        return cls(runner, engine.cache, engine.model.vocab_size, engine.model.context_len)

    def resume_len(self, shared: int) -> int:
        """Return the longest length up to `shared`, all of it written, that a step can begin at."""
        return shared if self.cache.states is None or shared == self.written_len else 0

    def forward(self, token_ids: Sequence[int], start: int, keep: Sequence[int]) -> torch.Tensor:
        """Run `token_ids` at positions start, start + 1, ..., overwriting what the cache holds from there on.

        keep are indices into token_ids; the result is their logits, fp32 [len(keep), vocab_size]. Raises
        ContextLengthError when the tokens do not fit, ConfigError for ids outside of the vocabulary and for a start
        that would leave a gap, or of which layers keep no state.
        """
        logits = self._forward(token_ids, start, keep, None)
        assert isinstance(logits, torch.Tensor)
        return logits

    def decode(self, token_id: int, position: int, need: int) -> StepLogits:
        """Run one token as `forward` does; of its logits no more than `need` (engine.sampling.logits_request) has to
        come back."""
        return self._forward([token_id], position, [0], [need])

    def _forward(
        self, token_ids: Sequence[int], start: int, keep: Sequence[int], needs: Sequence[int] | None
    ) -> StepLogits:
        end = start + len(token_ids)
        if end > self.max_len:
            raise ContextLengthError(f"{end} tokens do not fit", prompt_len=end, max_len=self.max_len)
        if not 0 <= start <= self.written_len or (start and self.resume_len(start) != start):
            raise ConfigError(f"start {start} would leave a gap: {self.written_len} positions are written")
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise ConfigError(f"token ids must be in [0, {self.vocab_size}) and at least one")
        row = ScheduledSequence(
            run_id=1,
            start=start,
            token_ids=list(token_ids),
            token_source=None,
            block_table=(),
            is_sampled=True,
            read_slot=0 if start else -1,
            write_slot=0,
        )
        self.written_len = start  # should the forward fail, what it overwrote is gone
        table = self._table[: -(-end // self.cache.page_size)]
        positions, context = paged_context(self.cache, self.pool, [row], [table])
        kept = torch.tensor(list(keep), dtype=torch.int64)
        logits = self.steps.reduced_step(ForwardBatch(torch.tensor(list(token_ids)), positions, context, kept), needs)
        self.written_len = end
        return logits

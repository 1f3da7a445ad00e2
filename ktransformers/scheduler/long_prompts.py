"""Decides when steps are longer than chunk_size: on memory that the engine lends them, while long prompts wait.

Lending has a price that short prompts do not earn, and is not to begin and end with every step: it begins when enough
tokens of prompts wait, and goes on while another step of chunk_size would not be enough. Pure; knows numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.sequence import Sequence

__all__ = ["LongPrompts"]


@dataclass(slots=True)
class LongPrompts:
    """The limit of each step's tokens. is_on: whether the step planned last is one of those that memory is lent to."""

    config: SchedulerConfig
    is_on: bool = field(default=False, init=False)

    def more(self, prefills: Seq[Sequence], *, may_lend: bool) -> int:
        """Return how many tokens beyond chunk_size the step being planned may carry. prefills: running sequences with
        tokens left to plan. may_lend: whether it may last longer: nobody decodes in it, or something else limits it."""
        return self.more_of(sum(seq.num_unplanned for seq in prefills) if may_lend else 0)

    def more_of(self, waiting: int) -> int:
        """Return the same where so many tokens of prompts wait."""
        config = self.config
        least = config.chunk_size + 1 if self.is_on else max(config.long_prompt, config.chunk_size + 1)
        self.is_on = config.long_chunk_size > config.chunk_size and waiting >= least
        return config.long_chunk_size - config.chunk_size if self.is_on else 0

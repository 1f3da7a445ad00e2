"""An answer on its way, as far as it is known: what a saved session has, and what an engine goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ktransformers.core import SamplingParams
from ktransformers.media.records import MediaItem
from ktransformers.scheduler.records import Request

__all__ = ["PartialGeneration"]


@dataclass(frozen=True, slots=True)
class PartialGeneration:
    """A prompt, how tokens are chosen, and those of its answer that there are already. media: the prompt's pictures."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    answer_ids: Sequence[int] = ()
    media: Sequence[MediaItem] = ()

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the prompt, then of the answer so far."""
        return [*self.prompt_ids, *self.answer_ids]

    @property
    def request(self) -> Request:
        """The request that goes on with the answer."""
        return Request(prompt_ids=self.prompt_ids, params=self.params, answer_ids=self.answer_ids, media=self.media)

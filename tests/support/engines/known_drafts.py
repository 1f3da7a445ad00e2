"""Drafts that are the answer itself with wrong tokens in it: any number of them is accepted, over any step."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ktransformers.core import SamplingParams
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.drafting.planner import DraftPlanner
from ktransformers.scheduler.sequence import Sequence as ScheduledRequest
from tests.support.engines.paged_loop import Answer, PagedLoop


class KnownDrafts(DraftPlanner):
    """Drafts what each answer goes on with, by the ends of requests' names, with wrong tokens in it."""

    def __init__(self, config: SchedulerConfig, answers: dict[str, Sequence[int]], rng: random.Random):
        super().__init__(config)
        self.answers, self.rng, self.num_wrong = answers, rng, 0

    def drafts(self, decodes: Sequence[ScheduledRequest], prefills: Sequence[ScheduledRequest]) -> list[list[int]]:
        return [self._of(seq) for seq in decodes]

    def _of(self, seq: ScheduledRequest) -> list[int]:
        if seq.run is None or seq.run.num_pending or not seq.completion_len:
            return []
        count = min(self.rng.randrange(self.most + 1), self._most_of(seq))
        drafts = list(self.answers[seq.request_id][seq.completion_len :][:count])
        if drafts and self.rng.random() < 0.5:
            at = self.rng.randrange(len(drafts))
            drafts[at] = (drafts[at] + 1) % 7
            self.num_wrong += 1
        return drafts

    def awaits_tokens(
        self,
        running: Sequence[ScheduledRequest],
        decodes: Sequence[ScheduledRequest],
        prefills: Sequence[ScheduledRequest],
    ) -> bool:
        return True


def answers_of(loop: PagedLoop, params: Sequence[SamplingParams], vocab_size: int, seed: int = 1) -> list[Answer]:
    """Of as many requests as there are params, side by side."""
    rng = random.Random(seed)
    for one in params:
        prompt = [rng.randrange(3, vocab_size) for _ in range(rng.randrange(5, 40))]
        loop.add(prompt, one)
    loop.drain()
    return list(loop.answers.values())


def told(answers: Sequence[Answer]) -> list[tuple[object, ...]]:
    return [(one.token_ids, one.logprobs, one.prompt_logprobs, one.reason) for one in answers]

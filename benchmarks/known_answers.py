"""Answers that are known beforehand, and drafts of them that are right as often as asked: for models of random weights.

What such a model samples soon runs in circles, and no text drafts it. So each request has an answer of random tokens:
the model computes and samples as ever, and then the answer's token is taken in place of the sampled one. Drafts are the
same tokens, each made a wrong one with a given probability; where the engine drafts, they take the place of its own,
once it has found these. All else is what it is: steps, graphs, and the planner, which learns how often drafts are right
and what they cost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias
from unittest import mock

from ktransformers.engine.drafting.drafter import ModelDrafter
from ktransformers.engine.sampling.logits_request import StepLogits
from ktransformers.engine.sampling.sampler import RequestSampler, SampledToken, sample_each
from ktransformers.engine.step import executor
from ktransformers.engine.step.drafts import DraftRequest
from ktransformers.errors import KTransformersError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.scheduler.drafting import planner
from ktransformers.scheduler.drafting.acceptance import AcceptanceRates
from ktransformers.scheduler.drafting.prompt_lookup import MAX_MATCH, behind_next

__all__ = ["KnownAnswers", "KnownDrafter"]

Draft: TypeAlias = Callable[[ModelDrafter, Sequence[DraftRequest]], list[list[int]]]


class KnownDrafter:
    """A Drafter (scheduler.sequence) of one sequence. drafts: all tokens of prompt and answer, wrong ones among them.
    rates: learn how often they are right, as of matches of MAX_MATCH tokens."""

    def __init__(self, token_ids: Sequence[int], rates: AcceptanceRates, drafts: Sequence[int]) -> None:
        self._num_known, self._rates, self._drafts = len(token_ids), rates, drafts

    def __len__(self) -> int:
        return self._num_known

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the sequence's next tokens, see Drafter.extend."""
        drafted = self._drafts[self._num_known : self._num_known + len(token_ids)]
        for token_id, draft in zip(token_ids, drafted, strict=False):
            self._rates.add(MAX_MATCH, draft == token_id)
            if draft != token_id:
                break
        self._num_known += len(token_ids)

    def chances(self, most: int) -> tuple[float, ...]:
        """Return the chances of the first tokens of `draft`, see Drafter.chances."""
        return self._rates.chances(MAX_MATCH, min(most, len(self._drafts) - self._num_known))

    def later(self, most: int) -> tuple[float, tuple[float, ...]]:
        """Return the chances behind the next token, see Drafter.later."""
        return behind_next(self.chances(most + 1))

    def draft(self, most: int) -> list[int]:
        """Return up to `most` tokens, see Drafter.draft."""
        return list(self._drafts[self._num_known : self._num_known + most])


class KnownAnswers:
    """The answer of each request by its seed, see the module's docstring.

    accept: how likely a draft token is right. prompt_len, answer_len: tokens of all prompts and answers.
    """

    def __init__(self, vocab_size: int, accept: float, prompt_len: int, answer_len: int) -> None:
        self._vocab_size, self._accept = vocab_size, accept
        self._prompt_len, self._answer_len = prompt_len, answer_len
        self._seeds: dict[tuple[int, ...], int] = {}  # by prompt
        self._rates = AcceptanceRates(MAX_MATCH)  # of these drafts alone: the planner's may know others
        self.tokens = lru_cache(maxsize=None)(self._tokens)
        self.drafts = lru_cache(maxsize=None)(self._with_wrong_ones)

    def _tokens(self, seed: int) -> list[int]:
        """Return the tokens of prompt and answer."""
        rng = random.Random(seed)
        return [rng.randrange(self._vocab_size) for _ in range(self._prompt_len + self._answer_len)]

    def prompt(self, seed: int) -> list[int]:
        """Return the prompt of the request with this seed, which may then be answered."""
        prompt = self.tokens(seed)[: self._prompt_len]
        self._seeds[tuple(prompt)] = seed
        return prompt

    def _with_wrong_ones(self, seed: int) -> list[int]:
        """Return the prompt, and the answer with wrong tokens in it."""
        rng, size = random.Random(f"wrong {seed}"), self._vocab_size
        return [
            token_id if at < self._prompt_len or rng.random() < self._accept else (token_id + 1) % size
            for at, token_id in enumerate(self.tokens(seed))
        ]

    @contextmanager
    def in_place(self, drafter: str) -> Iterator[None]:
        """While open, requests of any engine in this process have these answers and drafts. drafter: "ngram" looks
        nothing up; of others the engine drafts by its model, and the text is looked at as ever."""
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(executor, "sample_each", self._sampled))
            if drafter == "ngram":
                patches.enter_context(mock.patch.object(planner, "PromptLookup", self._drafter))
            else:
                known = self._drafting(ModelDrafter.draft)
                patches.enter_context(mock.patch.object(ModelDrafter, "draft", known))
            yield

    def _drafting(self, draft: Draft) -> Draft:
        """What drafts by a model, with known drafts in the place of those that it finds."""

        def known(drafter: ModelDrafter, requests: Sequence[DraftRequest]) -> list[list[int]]:
            draft(drafter, requests)
            return [self._behind(request) for request in requests]

        return known

    def _behind(self, request: DraftRequest) -> list[int]:
        assert request.sampler.params.seed is not None
        first = request.position + 1
        return self.drafts(request.sampler.params.seed)[first : first + request.num_drafts]

    def _sampled(
        self,
        logits: StepLogits,
        samplers: Sequence[RequestSampler],
        positions: Sequence[int],
        pool: WorkerPool | None = None,
    ) -> list[SampledToken | KTransformersError]:
        found = sample_each(logits, samplers, positions, pool)
        return [
            one if isinstance(one, KTransformersError) else replace(one, token_id=self._known(sampler, position))
            for one, sampler, position in zip(found, samplers, positions, strict=True)
        ]

    def _known(self, sampler: RequestSampler, position: int) -> int:
        assert sampler.params.seed is not None
        return self.tokens(sampler.params.seed)[position]

    def _drafter(
        self, token_ids: Sequence[int], rates: AcceptanceRates, prediction_ids: Sequence[int] = ()
    ) -> KnownDrafter:
        assert not prediction_ids, "known answers need no prediction"
        return KnownDrafter(token_ids, self._rates, self.drafts(self._seeds[tuple(token_ids[: self._prompt_len])]))

"""The oracle of answers: one sequence, prefilled in chunks and then token by token, with no scheduler and no pages.

Shares the sampler and the text with the program, and nothing of what decides in which steps a token is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ktransformers.core import PROMPT_LOGPROB_ROWS, AnswerEnd, FinishReason, SamplingParams, TokenEvent
from ktransformers.engine.api.llm import prompt_reader
from ktransformers.engine.sampling.constraints import check_rules, mask_of
from ktransformers.engine.sampling.logits_request import StepLogits
from ktransformers.engine.sampling.sampler import RequestSampler, draw_seed, sample_batch, token_logprobs
from ktransformers.engine.sequence.output_processor import OutputProcessor
from ktransformers.engine.sequence.outputs import Conversation, Prompt, RequestOutput, collect_output
from ktransformers.engine.step.hidden import Pooled
from ktransformers.scheduler.limits import Limits
from ktransformers.tokenizer.tokenizer import Tokenizer
from tests.support.engines.one_sequence import StaticEngine

__all__ = ["Alone", "Session", "common_prefix_len"]


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


class Session:
    """Answers prompts one after the other, and reuses the prefix that one shares with what the runner holds."""

    def __init__(
        self,
        runner: Any,
        *,
        chunk_size: int,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        has_prefix_cache: bool = True,
        has_head: bool = True,
    ):
        self.runner, self.chunk_size, self.ends = runner, chunk_size, tuple(eos_token_ids)
        self.tokenizer, self.has_prefix_cache, self.has_head = tokenizer, has_prefix_cache, has_head
        self.cached: list[int] = []

    @classmethod
    def of(cls, engine: Any) -> Session:
        return cls(
            engine.runner,
            chunk_size=engine.config.chunk_size,
            eos_token_ids=engine.eos_token_ids,
            tokenizer=engine.tokenizer,
            has_prefix_cache=engine.config.prefix_cache,
            has_head=engine.card.has_head,
        )

    @property
    def max_len(self) -> int:
        return int(self.runner.max_len)

    def clear(self) -> None:
        self.cached = []

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, answer_ids: Sequence[int] = ()
    ) -> Iterator[TokenEvent]:
        """answer_ids: an answer so far; the events are of what follows."""
        if params.seed is None:
            params = replace(params, seed=draw_seed())
        runner, tokenizer = self.runner, self.tokenizer
        has_vocabulary = tokenizer is not None and tokenizer.has_vocabulary
        limits = Limits(
            max_len=runner.max_len,
            vocab_size=runner.vocab_size,
            has_vocabulary=has_vocabulary,
            has_head=self.has_head,
            is_models_limit=runner.is_models_limit,
        )
        limits.check(prompt_ids, params)
        mask = None
        if tokenizer is not None:
            grammars = tokenizer.grammars(runner.vocab_size, self.ends)
            check_rules(grammars, params)
            mask = mask_of(grammars, params)
        sampler = RequestSampler(params, list(prompt_ids), runner.vocab_size, mask, eos_token_ids=self.ends)
        return self._answer(list(prompt_ids), list(answer_ids), params, sampler)

    def _answer(
        self, prompt_ids: list[int], answer_ids: list[int], params: SamplingParams, sampler: RequestSampler
    ) -> Iterator[TokenEvent]:
        tokens, end = [*prompt_ids, *answer_ids], AnswerEnd.of(params, self.ends, self.max_len - len(prompt_ids))
        out = OutputProcessor(self.tokenizer, params, len(prompt_ids))
        out.replay(answer_ids, end)
        for token_id in answer_ids:
            sampler.commit(token_id)
        sampler.begin()
        needs_all = params.prompt_logprobs is not None or (params.pooling is not None and params.pooling.needs_all)
        shared = min(common_prefix_len(self.cached, tokens), len(tokens) - 1)
        shared = 0 if needs_all or not self.has_prefix_cache else self.runner.resume_len(shared)
        out.stats.cached_len = min(shared, len(prompt_ids))
        pooled = None if params.pooling is None else Pooled(params.pooling)
        logits = self._prefill(tokens, shared, out, params, pooled)
        while True:
            (sampled,) = sample_batch(logits, [sampler], [len(tokens)])
            embedding = None if pooled is None or out.stats.completion_len else pooled.vector()
            tokens.append(sampled.token_id)
            sampler.commit(sampled.token_id)
            sampler.begin()
            reason = end.reason(sampled.token_id, out.stats.completion_len + 1)
            event = out.token(sampled.token_id, sampled.logprobs, reason, embedding)
            yield event
            if event.finish_reason is not None:
                assert event.finish_reason is not FinishReason.ABORT
                return
            logits = self.runner.decode(tokens[-1], len(tokens) - 1, sampler.logits_request)
            self.cached = list(tokens)

    def _prefill(
        self, tokens: list[int], shared: int, out: OutputProcessor, params: SamplingParams, pooled: Pooled | None
    ) -> StepLogits:
        size, scores = self.chunk_size, params.prompt_logprobs
        size = size if scores is None else min(size, PROMPT_LOGPROB_ROWS)
        logits: torch.Tensor | None = None
        for start in range(shared, len(tokens), size):
            chunk = tokens[start : start + size]
            is_last = start + len(chunk) == len(tokens)
            keep = list(range(len(chunk))) if scores is not None else [len(chunk) - 1] if is_last else []
            if pooled is None:
                logits = self.runner.forward(chunk, start, keep)
            else:
                with self.runner.hook.watch() as seen:
                    logits = self.runner.forward(chunk, start, keep)
                pooled.add(seen[-1])
            self.cached = tokens[: start + len(chunk)]
            if scores is not None:
                followers = tokens[start + 1 : min(start + 1 + len(logits), out.stats.prompt_len)]
                out.score(start + 1, token_logprobs(logits[: len(followers)], followers, scores))
        assert logits is not None
        return logits[-1:]


class Alone:
    """What LLM.generate and LLM.chat return for one prompt, by a Session."""

    def __init__(self, engine: StaticEngine):
        self.session, self._reader = Session.of(engine), prompt_reader(engine.engine, None)

    def generate(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        return self._answer(self._reader.ids(prompt), params)

    def chat(self, messages: Conversation, params: SamplingParams) -> RequestOutput:
        (ids,) = self._reader.all_conversation_ids(messages, None, {})
        return self._answer(ids, params)

    def _answer(self, ids: list[int], given: SamplingParams) -> RequestOutput:
        params = self._reader.params(given)
        return collect_output(ids, params, list(self.session.generate(ids, params)))

"""Prepares requests: whatever can be refused is refused here, before a response begins; then yields their events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from ktransformers.core import GenerationStats, SamplingParams, TokenEvent
from ktransformers.engine.sampling.sampler import draw_seed
from ktransformers.errors import ConfigError, ContextLengthError, FieldError, KTransformersError, UnsupportedError
from ktransformers.media.records import num_media_ids
from ktransformers.server.answers.choices import ChatChoice, Choice, PromptChoice, TextChoice
from ktransformers.server.answers.constraints import beside_tools, reasoning_of
from ktransformers.server.answers.events import AnswerFinished, AnswerStep
from ktransformers.server.answers.fitting import fitted_chat, fitted_text, in_words_of, most_tokens
from ktransformers.server.answers.forced import forced_calls, reason_of_refusal
from ktransformers.server.answers.generations import run_generations
from ktransformers.server.answers.prompts import Prompt, template_kwargs
from ktransformers.server.answers.requests import AnswerRequest, ChatRequest, TextRequest
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.service import Service
from ktransformers.server.telemetry.request_metrics import RequestMetrics
from ktransformers.server.telemetry.traces import Answering, Operation
from ktransformers.tokenizer import Tokenizer

__all__ = ["PreparedRequest", "prepare"]


@dataclass(slots=True)
class PreparedRequest:
    """A checked request, ready to run. model: the name for the answer. created: seconds since 1970.

    choices[i] turns the tokens of requests[i] into events; n answers to each prompt are neighbours. ignored: fields of
    the request that have no effect on this model, those that were altered, and what of its messages was folded for the
    model's template. num_dropped: turns that were left out, the oldest. on_event: receives each event of an answer, and
    whose it is, by index.
    order: of the events that requests have in their past, whose they are.
    """

    service: Service
    id: str
    model: str
    requests: Sequence[GenerationRequest]
    choices: Sequence[Choice]
    request_metrics: RequestMetrics
    is_prompt_only: bool
    created: int
    operation: Operation
    ignored: tuple[str, ...] = ()
    num_dropped: int = 0
    on_event: Callable[[int, TokenEvent], None] | None = None
    order: Sequence[int] = ()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model that answers this request."""
        return self.service.model.tokenizer

    def answering(self, is_streamed: bool) -> Answering:
        """Return what the log and traces need to know of this request."""
        return Answering(self.id, self.request_metrics, self.operation, self.model, is_streamed, self.is_prompt_only)

    def usage(self) -> GenerationStats:
        """Return the counts and times of all answers so far, each prompt counted once."""
        return (
            replace(self.request_metrics.total, completion_len=0) if self.is_prompt_only else self.request_metrics.total
        )

    @property
    def num_image_tokens(self) -> int:
        """Positions of all prompts that show pictures, each prompt counted once."""
        firsts = self.requests[:: self.request_metrics.num_answers]
        return sum(num_media_ids(request.prompt_ids) for request in firsts if request.media)

    async def steps(self) -> AsyncGenerator[AnswerStep, None]:
        """Yield the steps of the answers, side by side. The first error of any of them ends all: raises
        KTransformersError.
        """
        ended: set[int] = set()
        try:
            made_by = run_generations(self.service.backend, self.requests, ended, self.order)
            async with aclosing(made_by) as events:
                async for index, event in events:
                    if self.on_event is not None:
                        self.on_event(index, event)
                    self.request_metrics.note(index, event)
                    made = self.choices[index].feed(event)
                    if made and isinstance(made[-1], AnswerFinished):
                        self.request_metrics.finish_reasons[index] = made[-1].reason
                        ended.add(index)
                    if made:
                        yield AnswerStep(index, made)
        except KTransformersError as error:
            self.request_metrics.error = type(error).__name__
            raise
        finally:
            self.request_metrics.close()


def prepare(service: Service, asked: ChatRequest | TextRequest) -> PreparedRequest:
    """Do everything that takes time before an answer begins, on a thread. Raises what is wrong with the request."""
    name = service.check_model(asked.model)
    if asked.priority and not service.backend.has_priorities:
        raise UnsupportedError(f"the {service.backend.name} backend serves by order of arrival: leave priority out")
    ignored: list[str] = []
    num_dropped = 0
    if isinstance(asked, ChatRequest):
        ignored += template_kwargs(service.model.tokenizer, asked.conversation).ignored
        service.check_ignored(ignored)
        service.log_altered(asked.conversation.altered)
        ignored += dict.fromkeys(asked.conversation.altered)
        with in_words_of(service, "conversation"):
            prompts, choices, num_dropped = _chat(service, asked)
            ignored += prompts[0].changes
    else:
        with in_words_of(service):
            prompts, choices = _texts(service, asked)
    rules = _rules(service, asked, prompts[0].ids)
    constraint = rules.get("constraint")
    if constraint is not None and constraint.widened:
        service.check_ignored(constraint.widened)
        ignored += constraint.widened
        rules["constraint"] = replace(constraint, widened=())
    requests = _generations(service, asked, prompts, rules)
    return PreparedRequest(
        service=service,
        id=asked.id,
        model=name,
        requests=requests,
        choices=choices,
        request_metrics=RequestMetrics(requests, asked.n, service.metrics),
        is_prompt_only=asked.is_prompt_only,
        created=int(time.time()),
        operation=Operation.CHAT if isinstance(asked, ChatRequest) else Operation.TEXT_COMPLETION,
        ignored=tuple(ignored),
        num_dropped=num_dropped,
    )


_PromptsAndChoices = tuple[list[Prompt], list[Choice]]
"""Each prompt, and asked.n choices for each."""


def _chat(service: Service, asked: ChatRequest) -> tuple[list[Prompt], list[Choice], int]:
    """See _PromptsAndChoices; and how many turns were left out."""
    model, tools = service.model, asked.conversation.tools
    tokenizer = model.tokenizer
    fitted = fitted_chat(service, asked)
    prompt_ids = fitted.prompt.ids
    if asked.is_prompt_only:
        return [fitted.prompt], [PromptChoice() for _ in range(asked.n)], fitted.num_dropped
    schemas = {tool.name: tool.parameters for tool in tools} if tools else None
    inside, is_forced = asked.conversation.continues_reasoning, asked.tool_choice.is_required
    parsers = (
        tokenizer.answer_parser(prompt_ids, schemas, continues_reasoning=inside, is_forced=is_forced)
        for _ in range(asked.n)
    )
    is_single = asked.tool_choice.max_calls is not None and not is_forced  # whose grammar says it
    choices: list[Choice] = [
        ChatChoice(parser, f"{asked.id}-{index}", is_single=is_single) for index, parser in enumerate(parsers)
    ]
    return [fitted.prompt], choices, fitted.num_dropped


def _texts(service: Service, asked: TextRequest) -> _PromptsAndChoices:
    model = service.model
    tokenizer = model.tokenizer
    if asked.sampling.get("logprobs") is not None and not tokenizer.has_vocabulary:
        raise ConfigError("logprobs name tokens by their text, and this model's files hold no vocabulary")
    prompts: list[Prompt] = []
    choices: list[Choice] = []
    for prompt in asked.prompts:
        ids = fitted_text(service, asked, prompt)
        text = _echo(tokenizer, prompt) if asked.has_echo else ""
        prompts.append(Prompt(ids))
        choices += [PromptChoice(text) if asked.is_prompt_only else TextChoice(text) for _ in range(asked.n)]
    return prompts, choices


def _rules(service: Service, asked: ChatRequest | TextRequest, prompt_ids: Sequence[int]) -> dict[str, Any]:
    """Fields of SamplingParams about what the answer must look like, and from where on."""
    constraint = asked.constraint
    if not isinstance(asked, ChatRequest):
        return {"constraint": constraint}
    tokenizer, conversation = service.model.tokenizer, asked.conversation
    if asked.tool_choice.is_required:
        return forced_calls(tokenizer, conversation, asked.tool_choice, prompt_ids)
    if constraint is not None and conversation.tools:
        constraint = beside_tools(tokenizer, constraint)
    budget = conversation.reasoning_budget
    if constraint is None and budget is None:
        return {}
    inside = conversation.continues_reasoning
    return {"constraint": constraint, "reasoning": reasoning_of(tokenizer, prompt_ids, budget, is_inside=inside)}


def _echo(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> str:
    """What a prompt looks like in front of its answer."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(prompt, skip_special_tokens=False) if tokenizer.has_vocabulary else ""


def _generations(
    service: Service, asked: AnswerRequest, prompts: Sequence[Prompt], rules: Mapping[str, Any]
) -> list[GenerationRequest]:
    """n for each prompt, checked. rules: see _rules.

    Choice i of a request draws with seed + i, so that they differ and each can be repeated.
    """
    params, seed, n = *_params(service, asked), asked.n
    shared = [tuple(prompt.ids) for prompt in prompts]  # answers to one prompt hold the same object
    prediction_ids = _prediction_ids(service, asked.prediction)
    made = [
        GenerationRequest(
            request_id=f"{asked.id}-{index}" if len(prompts) * n > 1 else asked.id,
            prompt_ids=shared[index // n],
            params=replace(params, seed=(seed + index) % (1 << 64), **rules),
            priority=asked.priority,
            timeout=asked.timeout or service.config.request_timeout,
            cache_salt=asked.cache_salt,
            timeline=service.new_timeline(),
            prediction_ids=prediction_ids,
            media=prompts[index // n].media,
        )
        for index in range(len(prompts) * n)
    ]
    for request in made[::n]:  # the others differ in their seeds
        _check(service, asked, request)
    return made


def _prediction_ids(service: Service, text: str) -> tuple[int, ...]:
    """The tokens of OpenAI's `prediction`. Raises FieldError for more of them than any answer has."""
    model = service.model
    if not text:
        return ()
    try:
        return tuple(model.tokenizer.encode(text, add_special_tokens=False, max_len=model.max_len - 1))
    except ContextLengthError as error:
        raise FieldError(f"prediction: {model.limits.long_prediction(error.prompt_len)}", "prediction") from error


def _check(service: Service, asked: AnswerRequest, request: GenerationRequest) -> None:
    try:
        service.backend.check(request)
    except ConfigError as error:
        if isinstance(asked, ChatRequest) and asked.tool_choice.is_required:
            refusal = reason_of_refusal(service.model, asked.conversation, asked.tool_choice)
            if refusal is not None:
                raise refusal from error
        raise


def _params(service: Service, asked: AnswerRequest) -> tuple[SamplingParams, int]:
    """Sampling as the request says, else as the operator does, else as the model's authors do; and the first seed."""
    given = {**service.config.sampling, **asked.sampling, "max_tokens": most_tokens(service, asked)}
    params, seed = replace(service.model.default_params, **given), asked.sampling.get("seed")
    return params, draw_seed() if seed is None else seed % (1 << 64)

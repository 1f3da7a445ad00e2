"""POST /v1/completions: text or token ids in, their continuation out.

https://platform.openai.com/docs/api-reference/completions. With `echo` the choice begins with its prompt, and with
`logprobs` too, the prompt's tokens have theirs: what evaluation harnesses score answers with.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.core import FinishReason, TokenEvent
from ktransformers.errors import ConfigError, KTransformersError
from ktransformers.server.api.openai.logprobs import CompletionLogprobs, has_visible_token
from ktransformers.server.api.openai.respond import UsageShape, respond
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.bodies import BodyRoute, body_size
from ktransformers.server.generations import Tally, run_generations
from ktransformers.server.responses import ApiResponse, error_body
from ktransformers.server.schemas import CompletionRequest
from ktransformers.server.service import Service, check_num_answers, new_id, service_of
from ktransformers.server.streaming import DONE, sse
from ktransformers.tokenizer import Tokenizer

__all__ = ["router"]

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for requests that name no limit."""

router = APIRouter(route_class=BodyRoute)


@dataclass(slots=True)
class _Piece:
    """What one event adds to a choice."""

    text: str = ""
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def __iadd__(self, other: _Piece) -> _Piece:
        self.text += other.text
        self.token_ids += other.token_ids
        self.finish_reason = other.finish_reason
        if self.logprobs is None:
            self.logprobs = other.logprobs
        elif other.logprobs is not None:
            for name, values in other.logprobs.items():
                self.logprobs[name].extend(values)
        return self

    @property
    def is_empty(self) -> bool:
        has_logprobs = self.logprobs is not None and bool(self.logprobs["tokens"])
        return not self.text and not has_logprobs and self.finish_reason is None


class _Choice:
    """One answer on its way. echo: the prompt's text, which comes first, or None."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest, echo: str | None, is_prompt_only: bool):
        self._request, self._echo, self._is_prompt_only = request, echo, is_prompt_only
        self._logprobs = None if request.params.logprobs is None else CompletionLogprobs(tokenizer)

    def feed(self, event: TokenEvent) -> _Piece:
        """What this event adds."""
        text = ""
        if self._echo is not None:
            text, self._echo = self._echo, None
            if self._logprobs is not None and event.prompt_logprobs is not None:
                for token_id, logprobs in zip(self._request.prompt_ids, event.prompt_logprobs, strict=True):
                    self._logprobs.add(token_id, logprobs)
        if not self._is_prompt_only:
            text += event.text
            if self._logprobs is not None and has_visible_token(event):
                self._logprobs.add(cast(int, event.token_id), event.logprobs)
        reason = None
        if event.finish_reason is not None:
            reason = "abort" if event.finish_reason is FinishReason.ABORT else event.finish_reason.value
            if self._is_prompt_only:
                reason = "length"
        token_ids = [] if self._is_prompt_only or event.token_id is None else [event.token_id]
        return _Piece(text, None if self._logprobs is None else self._logprobs.take(), token_ids, reason)


@dataclass(slots=True)
class _Job:
    """A checked request, ready to run."""

    service: Service
    body: CompletionRequest
    model: str
    requests: list[GenerationRequest]
    tally: Tally
    choices: list[_Choice]
    id: str
    created: int

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def usage(self) -> dict[str, Any]:
        usage = self.tally.usage(bool(self.body.return_speed))
        if self.body.max_tokens == 0:  # the one token that was computed to see the prompt is not part of the answer
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    async def pieces(self) -> AsyncGenerator[tuple[int, _Piece], None]:
        async with aclosing(run_generations(self.service.backend, self.requests)) as events:
            async for index, event in events:
                self.tally.note(index, event)
                piece = self.choices[index].feed(event)
                self.tally.finish_reasons[index] = piece.finish_reason
                yield index, piece

    def choice(self, index: int, piece: _Piece) -> dict[str, Any]:
        """An element of choices."""
        logprobs = piece.logprobs if piece.logprobs is not None and piece.logprobs["tokens"] else None
        made = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        return made | {"token_ids": piece.token_ids} if self.body.return_token_ids else made


_Prompt = str | list[str] | list[int] | list[list[int]]


def _num_prompts(prompt: _Prompt) -> int:
    """How many prompts these are. Raises ConfigError for none."""
    if not isinstance(prompt, str) and not prompt:
        raise ConfigError("prompt is empty: there is nothing to continue")
    return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)


def _prompts(tokenizer: Tokenizer, prompt: _Prompt, max_len: int) -> list[list[int]]:
    """Token ids of each prompt; raises ContextLengthError for a text with more than max_len."""
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt, max_len=max_len)]
    if isinstance(prompt[0], int):
        return [prompt]
    if isinstance(prompt[0], str):
        return [tokenizer.encode(text, max_len=max_len) for text in prompt]
    return prompt


def _echoes(tokenizer: Tokenizer, body: CompletionRequest, prompts: list[list[int]]) -> list[str | None]:
    """What each prompt looks like in front of its answer."""
    if not body.echo:
        return [None] * len(prompts)
    if isinstance(body.prompt, str):
        return [body.prompt]
    if body.prompt and isinstance(body.prompt[0], str):
        return [*body.prompt]
    return [tokenizer.decode(ids, skip_special_tokens=False) if tokenizer.has_vocabulary else "" for ids in prompts]


def _prepare(service: Service, body: CompletionRequest) -> _Job:
    """Everything that takes time before an answer begins. Runs on a thread."""
    name, tokenizer = service.check_model(body.model), service.model.tokenizer
    if body.logprobs is not None and not tokenizer.has_vocabulary:
        raise ConfigError("logprobs name tokens by their text, and this model's files hold no vocabulary")
    prompts = _prompts(tokenizer, body.prompt, service.model.max_len)
    is_prompt_only = body.max_tokens == 0
    max_tokens = service.max_tokens(None if body.max_tokens is None else max(body.max_tokens, 1), DEFAULT_MAX_TOKENS)
    params = service.params(
        body, max_tokens, logprobs=body.logprobs, prompt_logprobs=body.logprobs if body.echo else None
    )
    request_id, n = new_id("cmpl"), body.n or 1
    requests = service.requests(request_id, body, prompts, params)
    echoes = _echoes(tokenizer, body, prompts)
    choices = [
        _Choice(tokenizer, request, echoes[index // n], is_prompt_only) for index, request in enumerate(requests)
    ]
    return _Job(service, body, name, requests, service.tally(requests, n), choices, request_id, int(time.time()))


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """The continuation of one or more prompts, as one JSON object or as a stream of server-sent events."""
    service, size = service_of(request), await body_size(request)
    num_answers = check_num_answers(_num_prompts(body.prompt), body.n or 1)
    return await respond(
        service,
        request,
        body,
        num_answers,
        lambda: service.workers.run(size, _prepare, service, body),
        _answer,
        _stream,
    )


async def _answer(job: _Job) -> Response:
    wholes = [_Piece() for _ in job.requests]
    async with aclosing(job.pieces()) as pieces:
        async for index, piece in pieces:
            wholes[index] += piece
    choices = [job.choice(index, whole) for index, whole in enumerate(wholes)]
    return ApiResponse(job.head() | {"choices": choices, "usage": job.usage()})


async def _stream(job: _Job) -> AsyncGenerator[bytes, None]:
    shape = UsageShape.of(job.body)
    head, num_open = job.head(), len(job.requests)
    try:
        async with aclosing(job.pieces()) as pieces:
            async for index, piece in pieces:
                if piece.is_empty and not job.body.return_token_ids:
                    continue
                end = shape.filler
                if piece.finish_reason is not None:
                    num_open -= 1
                    if shape.is_in_finish and not num_open:
                        end = {"usage": job.usage()}
                yield sse(head | {"choices": [job.choice(index, piece)]} | end)
        if shape.is_last_chunk:
            yield sse(head | {"choices": [], "usage": job.usage()})
    except KTransformersError as error:
        yield sse(error_body(error))
    yield DONE

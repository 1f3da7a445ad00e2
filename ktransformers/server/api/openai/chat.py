"""POST /v1/chat/completions. https://platform.openai.com/docs/api-reference/chat

Reasoning comes back as `reasoning_content` (DeepSeek's name) and as `reasoning` (OpenRouter's), in messages and in
deltas. Without stream_options the finishing chunk of a stream carries the usage; with it, OpenAI's own shape is kept.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.core import FinishReason, TokenEvent
from ktransformers.errors import KTransformersError, UnsupportedError
from ktransformers.server.api.openai.logprobs import chat_logprobs, has_visible_token
from ktransformers.server.api.openai.prompts import chat_prompt
from ktransformers.server.api.openai.respond import UsageShape, respond
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.bodies import BodyRoute, body_size
from ktransformers.server.generations import Tally, run_generations
from ktransformers.server.responses import ApiResponse, error_body
from ktransformers.server.schemas import ChatRequest
from ktransformers.server.service import Service, new_id, service_of
from ktransformers.server.streaming import DONE, sse
from ktransformers.tokenizer import Tokenizer
from ktransformers.tokenizer.reasoning import ReasoningParser
from ktransformers.tokenizer.tool_calls import ToolCall, ToolCallParser

__all__ = ["router"]

router = APIRouter(route_class=BodyRoute)


@dataclass(slots=True)
class _Delta:
    """What one event adds to a choice."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class _Choice:
    """One answer on its way: splits its text into reasoning, content and tool calls."""

    def __init__(self, tokenizer: Tokenizer, opens_reasoning: bool, has_tools: bool):
        self._tokenizer = tokenizer
        self._reasoning = ReasoningParser(tokenizer.reasoning_tags, opens_reasoning)
        self._tools = ToolCallParser() if has_tools else None
        self.num_calls = 0

    def feed(self, event: TokenEvent) -> _Delta:
        delta = _Delta()
        part = self._reasoning.feed(event.text)
        delta.reasoning, content = part.reasoning, part.content
        is_last = event.finish_reason is not None
        if is_last:
            rest = self._reasoning.flush()
            delta.reasoning += rest.reasoning
            content += rest.content
        delta.content, delta.tool_calls = (content, []) if self._tools is None else self._tools.feed(content)
        if is_last and self._tools is not None:
            text, calls = self._tools.flush()
            delta.content += text
            delta.tool_calls += calls
        self.num_calls += len(delta.tool_calls)
        if event.logprobs is not None and event.token_id is not None and has_visible_token(event):
            delta.logprobs.append(chat_logprobs(self._tokenizer, event.token_id, event.logprobs))
        if event.finish_reason is not None:
            delta.finish_reason = self._finish_reason(event.finish_reason)
        return delta

    def _finish_reason(self, reason: FinishReason) -> str:
        if reason is FinishReason.STOP and self.num_calls:
            return "tool_calls"
        # ABORT reaches a client only when the server goes down in the middle of its answer.
        return "length" if reason is FinishReason.LENGTH else "stop" if reason is FinishReason.STOP else "abort"


@dataclass(slots=True)
class _Job:
    """A checked request, ready to run."""

    service: Service
    body: ChatRequest
    model: str
    requests: list[GenerationRequest]
    tally: Tally
    choices: list[_Choice]
    id: str
    created: int

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, Any]:
        return self.tally.usage(bool(self.body.return_speed))

    async def deltas(self) -> AsyncGenerator[tuple[int, _Delta], None]:
        async with aclosing(run_generations(self.service.backend, self.requests)) as events:
            async for index, event in events:
                self.tally.note(index, event)
                delta = self.choices[index].feed(event)
                self.tally.finish_reasons[index] = delta.finish_reason
                yield index, delta


def _prepare(service: Service, body: ChatRequest) -> _Job:
    """Everything that takes time before an answer begins. Runs on a thread."""
    name, model = service.check_model(body.model), service.model
    tokenizer = model.tokenizer
    tools = None if body.tool_choice == "none" else body.tools
    if tools and not tokenizer.has_tool_calls:
        raise UnsupportedError("this model's tokenizer and template know no tool calls: leave tools out")
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs["reasoning_effort"] = body.reasoning_effort
    opens_answer = body.add_generation_prompt is not False
    prompt_ids = chat_prompt(
        tokenizer,
        body.messages,
        tools=tools,
        template_kwargs=kwargs,
        add_generation_prompt=opens_answer,
        force_think=service.config.force_think,
        max_len=model.max_len,
    )
    max_tokens = service.max_tokens(body.max_completion_tokens or body.max_tokens)
    params = service.params(body, max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    request_id = new_id("chatcmpl")
    requests = service.requests(request_id, body, [prompt_ids], params)
    opens_reasoning = tokenizer.opens_reasoning(prompt_ids)
    choices = [_Choice(tokenizer, opens_reasoning, bool(tools)) for _ in requests]
    return _Job(
        service, body, name, requests, service.tally(requests, body.n or 1), choices, request_id, int(time.time())
    )


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """The next turn of a conversation, as one JSON object or as a stream of server-sent events."""
    service, size = service_of(request), await body_size(request)
    return await respond(
        service,
        request,
        body,
        body.n or 1,
        lambda: service.workers.run(size, _prepare, service, body),
        _answer,
        _stream,
    )


async def _answer(job: _Job) -> Response:
    wholes = [_Delta() for _ in job.requests]
    async with aclosing(job.deltas()) as deltas:
        async for index, delta in deltas:
            whole = wholes[index]
            whole.reasoning += delta.reasoning
            whole.content += delta.content
            whole.tool_calls += delta.tool_calls
            whole.logprobs += delta.logprobs
            whole.finish_reason = delta.finish_reason or whole.finish_reason
    choices = [_whole_choice(job, index, whole) for index, whole in enumerate(wholes)]
    return ApiResponse(job.head("chat.completion") | {"choices": choices, "usage": job.usage()})


def _whole_choice(job: _Job, index: int, whole: _Delta) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": whole.content, "refusal": None}
    if whole.reasoning:
        message |= {"reasoning_content": whole.reasoning, "reasoning": whole.reasoning}
    if whole.tool_calls:
        message["content"] = whole.content or None
        message["tool_calls"] = [_call(call) for call in whole.tool_calls]
    logprobs = {"content": whole.logprobs, "refusal": None} if job.body.logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": whole.finish_reason}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": new_id("call"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def _stream(job: _Job) -> AsyncGenerator[bytes, None]:
    shape = UsageShape.of(job.body)
    head = job.head("chat.completion.chunk")
    num_open = len(job.requests)
    try:
        for index in range(num_open):
            yield sse(head | {"choices": [_chunk_choice(index, {"role": "assistant", "content": ""})]} | shape.filler)
        async with aclosing(job.deltas()) as deltas:
            async for index, delta in deltas:
                for choice in _chunk_choices(job, index, delta):
                    yield sse(head | {"choices": [choice]} | shape.filler)
                if delta.finish_reason is not None:
                    num_open -= 1
                    end = {"usage": job.usage()} if shape.is_in_finish and not num_open else shape.filler
                    choice = _chunk_choice(index, {}, finish_reason=delta.finish_reason)
                    yield sse(head | {"choices": [choice]} | end)
        if shape.is_last_chunk:
            yield sse(head | {"choices": [], "usage": job.usage()})
    except KTransformersError as error:
        yield sse(error_body(error))
    yield DONE


def _chunk_choice(
    index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _chunk_choices(job: _Job, index: int, delta: _Delta) -> list[dict[str, Any]]:
    """The chunks that show `delta`, its end excepted."""
    shown: dict[str, Any] = {}
    if delta.reasoning:
        shown |= {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
    if delta.content:
        shown["content"] = delta.content
    if delta.tool_calls:
        first = job.choices[index].num_calls - len(delta.tool_calls)
        shown["tool_calls"] = [{"index": first + i} | _call(call) for i, call in enumerate(delta.tool_calls)]
    if not shown and not delta.logprobs:
        return []
    logprobs = {"content": delta.logprobs, "refusal": None} if delta.logprobs else None
    return [_chunk_choice(index, shown, logprobs=logprobs)]

"""POST /v1/chat/completions. https://platform.openai.com/docs/api-reference/chat

Reasoning comes back as `reasoning_content` (DeepSeek's name) and as `reasoning` (OpenRouter's), in messages and in
deltas. Without stream_options the finishing chunk of a stream carries the usage; with it, OpenAI's own shape is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.server.answers.events import (
    AnswerFinished,
    AnswerStep,
    ReasoningDelta,
    TextDelta,
    TokenAdded,
    ToolArgumentsDelta,
    ToolCallStarted,
    WholeAnswer,
)
from ktransformers.server.answers.job import Job
from ktransformers.server.answers.respond import respond
from ktransformers.server.api.openai.logprobs import chat_logprobs
from ktransformers.server.api.openai.read import chat_request
from ktransformers.server.api.openai.schemas import ChatBody
from ktransformers.server.api.openai.writer import Fields, OpenAIWriter
from ktransformers.server.bodies import BodyRoute

__all__ = ["router"]

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """The next turn of a conversation, as one JSON object or as a stream of server-sent events."""
    return await respond(
        request, body.n or 1, bool(body.stream), lambda: chat_request(body), lambda job: _ChatWriter(job, body)
    )


class _ChatWriter(OpenAIWriter):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job, body: ChatBody):
        super().__init__(job, body)
        self._wholes = [WholeAnswer() for _ in job.requests]
        self._logprobs: list[list[Fields]] | None = [[] for _ in job.requests] if body.logprobs else None

    def _token_logprobs(self, token: TokenAdded) -> list[Fields]:
        if token.logprobs is None or token.is_end:
            return []
        return [chat_logprobs(self.job.tokenizer, token.token_id, token.logprobs)]

    # As a stream.

    def begin(self) -> Iterator[bytes]:
        for index in range(len(self.job.requests)):
            yield self._chunk(_chunk_choice(index, {"role": "assistant", "content": ""}))

    def _chunk_choices(self, step: AnswerStep) -> Iterator[Fields]:
        delta: Fields = {}
        logprobs: list[Fields] = []
        finished = None
        for event in step.events:
            match event:
                case TokenAdded():
                    logprobs += self._token_logprobs(event)
                case ReasoningDelta(text):
                    delta |= {"reasoning_content": text, "reasoning": text}
                case TextDelta(text):
                    delta["content"] = text
                case ToolCallStarted() | ToolArgumentsDelta():
                    _add_call(delta.setdefault("tool_calls", []), event)
                case AnswerFinished():
                    finished = event
        if not delta and finished is None and self._shows_tokens:
            delta["content"] = ""
        if delta or logprobs:
            yield _chunk_choice(
                step.index, delta, logprobs={"content": logprobs, "refusal": None} if logprobs else None
            )
        if finished is not None:
            yield _chunk_choice(step.index, {}, finish_reason=finished.reason)

    # As one body.

    def keep(self, step: AnswerStep) -> None:
        for event in step.events:
            self._wholes[step.index].add(event)
            if self._logprobs is not None and isinstance(event, TokenAdded):
                self._logprobs[step.index] += self._token_logprobs(event)

    def _choices(self) -> list[Fields]:
        return [self._choice(index, whole) for index, whole in enumerate(self._wholes)]

    def _choice(self, index: int, whole: WholeAnswer) -> Fields:
        message: Fields = {"role": "assistant", "content": whole.text, "refusal": None}
        if whole.reasoning:
            message |= {"reasoning_content": whole.reasoning, "reasoning": whole.reasoning}
        if whole.calls:
            message["content"] = whole.text or None
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in whole.calls]
        logprobs = None if self._logprobs is None else {"content": self._logprobs[index], "refusal": None}
        reason = None if whole.finished is None else whole.finished.reason
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _add_call(calls: list[Fields], event: ToolCallStarted | ToolArgumentsDelta) -> None:
    """Into the `tool_calls` of a chunk: a call's beginning and its first arguments are one element."""
    if isinstance(event, ToolCallStarted):
        calls.append({"index": event.index} | _call(event.id, event.name, ""))
        return
    if not calls or calls[-1]["index"] != event.index:
        calls.append({"index": event.index, "function": {"arguments": ""}})
    calls[-1]["function"]["arguments"] += event.text


def _call(id: str, name: str, arguments: str) -> Fields:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _chunk_choice(
    index: int, delta: Fields, *, logprobs: Fields | None = None, finish_reason: str | None = None
) -> Fields:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

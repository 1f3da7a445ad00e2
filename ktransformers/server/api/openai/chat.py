"""The route POST /v1/chat/completions. https://platform.openai.com/docs/api-reference/chat

Reasoning comes back as `reasoning_content` (DeepSeek's name) and as `reasoning` (OpenRouter's), in messages and in
deltas. A stream's first chunk, which names the role, comes with the first token: what is measured to it is the prompt's
time. Without stream_options the finishing chunk of a stream carries the usage; with it, OpenAI's own shape is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.server.answers.custom_tools import custom_text
from ktransformers.server.answers.events import (
    AnswerFinished,
    AnswerReason,
    AnswerStarted,
    AnswerStep,
    ReasoningDelta,
    TextDelta,
    TokenAdded,
    ToolArgumentsDelta,
    ToolCallEnded,
    ToolCallStarted,
    WholeAnswer,
    WholeCall,
)
from ktransformers.server.answers.prepared_request import PreparedRequest
from ktransformers.server.answers.requests import ChatRequest
from ktransformers.server.answers.respond import respond
from ktransformers.server.api.openai.fields import CHAT_FIELDS
from ktransformers.server.api.openai.logprobs import chat_logprobs
from ktransformers.server.api.openai.read import chat_request, custom_names, unenforced
from ktransformers.server.api.openai.schemas import ChatBody
from ktransformers.server.api.openai.writer import Fields, OpenAIWriter
from ktransformers.server.bodies import body_route
from ktransformers.server.service import note_unused

__all__ = ["router"]

_CallEvent = ToolCallStarted | ToolArgumentsDelta | ToolCallEnded

router = APIRouter(route_class=body_route(CHAT_FIELDS))


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer with the next turn of a conversation, as one JSON object or as a stream of server-sent events."""

    def read() -> ChatRequest:
        note_unused(request, unenforced(body))
        return chat_request(body)

    return await respond(request, body.n or 1, bool(body.stream), read, lambda prepared: _ChatWriter(prepared, body))


class _ChatWriter(OpenAIWriter):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, prepared: PreparedRequest, body: ChatBody):
        super().__init__(prepared, body)
        self._wholes = [WholeAnswer() for _ in prepared.requests]
        self._is_legacy = body.functions is not None  # a client that knows functions, and no tools
        choices = (body.tool_choice, body.function_call)
        self._is_named = any(one is not None and one.name is not None for one in choices)
        self._custom = custom_names(body)
        self._inputs: dict[tuple[int, int], str] = {}  # arguments of calls of custom tools: their text comes at once
        self._logprobs: list[list[Fields]] | None = [[] for _ in prepared.requests] if body.logprobs else None

    def _token_logprobs(self, token: TokenAdded) -> list[Fields]:
        if token.logprobs is None or token.is_end:
            return []
        return [chat_logprobs(self.prepared.tokenizer, token.token_id, token.logprobs)]

    # As a stream.

    def _chunk_choices(self, step: AnswerStep) -> Iterator[Fields]:
        if isinstance(step.events[0], AnswerStarted):
            yield _chunk_choice(step.index, {"role": "assistant", "content": ""})
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
                case ToolCallStarted() | ToolArgumentsDelta() | ToolCallEnded():
                    self._add_call(delta, step.index, event)
                case AnswerFinished():
                    finished = event
        if not delta and finished is None and self._shows_tokens:
            delta["content"] = ""
        if delta or logprobs:
            yield _chunk_choice(
                step.index, delta, logprobs={"content": logprobs, "refusal": None} if logprobs else None
            )
        if finished is not None:
            yield _chunk_choice(step.index, {}, finish_reason=self._reason(finished))

    def _add_call(self, delta: Fields, index: int, event: _CallEvent) -> None:
        """Into the chunk of this answer."""
        if self._is_custom(index, event):
            self._add_custom_call(delta, index, event)
        elif isinstance(event, ToolCallEnded):
            return
        elif self._is_legacy:
            _add_function_call(delta.setdefault("function_call", {"arguments": ""}), event)
        else:
            _add_call(delta.setdefault("tool_calls", []), event)

    def _is_custom(self, index: int, event: _CallEvent) -> bool:
        if isinstance(event, ToolCallStarted):
            return event.name in self._custom
        return (index, event.index) in self._inputs

    def _add_custom_call(self, delta: Fields, index: int, event: _CallEvent) -> None:
        key = (index, event.index)
        match event:
            case ToolCallStarted(_, id, name):
                self._inputs[key] = ""
                delta.setdefault("tool_calls", []).append({"index": event.index} | _custom_call(id, name, ""))
            case ToolArgumentsDelta(_, text):
                self._inputs[key] += text
            case ToolCallEnded(_, is_whole):
                calls, text = delta.setdefault("tool_calls", []), custom_text(self._inputs.pop(key), is_whole)
                if calls and calls[-1]["index"] == event.index:
                    calls[-1]["custom"]["input"] = text
                else:
                    calls.append({"index": event.index, "custom": {"input": text}})

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
            message |= self._calls(whole.calls)
        logprobs = None if self._logprobs is None else {"content": self._logprobs[index], "refusal": None}
        reason = None if whole.finished is None else self._reason(whole.finished)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _calls(self, calls: Sequence[WholeCall]) -> Fields:
        if self._is_legacy:
            return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}
        return {"tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: WholeCall) -> Fields:
        if call.name in self._custom:
            return _custom_call(call.id, call.name, custom_text(call.arguments, call.is_whole))
        return _call(call.id, call.name, call.arguments)

    def _reason(self, finished: AnswerFinished) -> str:
        """As OpenAI does, a call of the one tool that was named ends with "stop": the model did not choose to call."""
        if finished.reason is not AnswerReason.TOOL_CALLS:
            return finished.reason
        if self._is_named:
            return AnswerReason.STOP
        return "function_call" if self._is_legacy else finished.reason


def _add_function_call(call: Fields, event: ToolCallStarted | ToolArgumentsDelta) -> None:
    """Into the `function_call` of a chunk, what there was before `tool_calls`."""
    if isinstance(event, ToolCallStarted):
        call["name"] = event.name
    else:
        call["arguments"] += event.text


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


def _custom_call(id: str, name: str, text: str) -> Fields:
    return {"id": id, "type": "custom", "custom": {"name": name, "input": text}}


def _chunk_choice(
    index: int, delta: Fields, *, logprobs: Fields | None = None, finish_reason: str | None = None
) -> Fields:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

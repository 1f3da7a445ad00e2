"""What all dialects share, without OpenAI's: neutral events from tokens, and a made-up dialect through `respond`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict
from typing import Any

import httpx
import pytest
from fastapi import Request
from starlette.responses import Response

from ktransformers.core import FinishReason, GenerationStats, SamplingParams, TokenEvent
from ktransformers.engine.sequence.output_processor import OutputProcessor
from ktransformers.errors import ConfigError, EngineError, KTransformersError
from ktransformers.scheduler.records import RequestUpdate
from ktransformers.server.answers.choices import ChatChoice, PromptChoice, TextChoice
from ktransformers.server.answers.events import (
    AnswerEvent,
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
)
from ktransformers.server.answers.requests import (
    MAX_ANSWERS,
    ChatRequest,
    Conversation,
    Message,
    TextRequest,
    count_answers,
    new_id,
)
from ktransformers.server.answers.respond import Writer, respond
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import GenerationRequest, ModelInfo
from ktransformers.server.config import ServerConfig
from tests.support.engines.fake_runner import byte_tokenizer
from tests.support.servers.fake_backend import FakeBackend

TOKENIZER = byte_tokenizer()
TOKENIZER.use_tool_format("hermes")
STATS = GenerationStats(prompt_len=3)
END = 2
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def token(text: str, reason: FinishReason | None = None, stop: str | int | None = None) -> TokenEvent:
    return TokenEvent(7, text, STATS, finish_reason=reason, stop=stop)


def shown(events: list[AnswerEvent]) -> list[AnswerEvent]:
    """Neighbouring pieces of the same kind joined, tokens and ids left out."""
    joined: list[AnswerEvent] = []
    for event in events:
        match event, joined[-1] if joined else None:
            case TokenAdded(), _:
                pass
            case (ReasoningDelta(text), ReasoningDelta(before)) | (TextDelta(text), TextDelta(before)):
                joined[-1] = type(event)(before + text)  # type: ignore[call-arg]
            case ToolArgumentsDelta(index, text), ToolArgumentsDelta(_, before):
                joined[-1] = ToolArgumentsDelta(index, before + text)
            case ToolCallStarted(index, _, name), _:
                joined.append(ToolCallStarted(index, "id", name))
            case _:
                joined.append(event)
    return joined


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_chat_answer_is_split_into_events_however_it_comes(size: int) -> None:
    said = f"<think>hm</think>\nSo: {CALL}\n{CALL}"
    choice = ChatChoice(TOKENIZER.answer_parser([], {"add": None}))
    pieces = [said[at : at + size] for at in range(0, len(said), size)]
    steps = [choice.feed(token(piece)) for piece in pieces]
    steps.append(choice.feed(token("", FinishReason.STOP, END)))
    events = [event for step in steps for event in step]
    assert shown(events) == [
        AnswerStarted(STATS),
        ReasoningDelta("hm"),
        TextDelta("So: "),
        *(
            event
            for index in (0, 1)
            for event in (
                ToolCallStarted(index, "id", "add"),
                ToolArgumentsDelta(index, '{"a": 1}'),
                ToolCallEnded(index),
            )
        ),
        AnswerFinished(AnswerReason.TOOL_CALLS, None, STATS),
    ]
    assert [event.is_end for event in events if isinstance(event, TokenAdded)] == [False] * len(pieces) + [True]
    whole = WholeAnswer()
    for event in events:
        whole.add(event)
    assert (whole.reasoning, whole.text) == ("hm", "So: ")
    assert [(call.name, call.arguments) for call in whole.calls] == [("add", '{"a": 1}')] * 2
    assert len({call.id for call in whole.calls}) == 2


def test_texts_are_not_split_and_prompts_have_no_tokens() -> None:
    first, last = token(f"<think>{CALL}"), token("", FinishReason.STOP, "x")
    choice = TextChoice("the prompt")
    assert choice.feed(first) == (
        AnswerStarted(STATS, "the prompt"),
        TokenAdded(7, None, is_end=False),
        TextDelta(f"<think>{CALL}"),
    )
    assert choice.feed(last)[1:] == (AnswerFinished(AnswerReason.STOP, "x", STATS),)
    prompt = PromptChoice("the prompt")
    assert prompt.feed(token("a", FinishReason.STOP, END)) == (
        AnswerStarted(STATS, "the prompt"),
        AnswerFinished(AnswerReason.LENGTH, None, STATS),
    )


def test_too_many_answers() -> None:
    assert count_answers(MAX_ANSWERS, 1) == MAX_ANSWERS
    with pytest.raises(ConfigError, match="64 prompts times n 3"):
        count_answers(64, 3)


@pytest.mark.parametrize(("stop", "max_len"), [((), 99), (("o w",), 99), (("world",), 99), ((), 5), (("lo",), 5)])
def test_a_session_and_a_scheduler_make_the_same_events(stop: tuple[str, ...], max_len: int) -> None:
    """The one hands in tokens, the other news: what stands in the events is the output_processor's work in both."""
    params = SamplingParams(stop=stop)
    ids = [*TOKENIZER.encode("hello € world"), *TOKENIZER.eos_token_ids]
    direct, received = OutputProcessor(TOKENIZER, params, 3), OutputProcessor(TOKENIZER, params, 3)
    one: list[TokenEvent | None] = []
    other: list[TokenEvent | None] = []
    for count, token_id in enumerate(ids, 1):
        is_end = token_id in TOKENIZER.eos_token_ids
        reason = FinishReason.STOP if is_end else FinishReason.LENGTH if count == max_len else None
        update = RequestUpdate(
            request_id="r", token_id=token_id, prompt_len=3, cached_len=0, completion_len=count, finish_reason=reason
        )
        one.append(direct.token(token_id, None, reason))
        other.append(received.receive(update, None))
        if one[-1] is not None and one[-1].finish_reason is not None:
            break
    ends = [(event.token_id, event.text, event.finish_reason, event.stop) for event in one if event is not None]
    assert ends == [
        (event.token_id, event.text, event.finish_reason, event.stop) for event in other if event is not None
    ]
    assert direct.stats.completion_len == received.stats.completion_len == len(ends)
    text = "".join(text for _, text, _, _ in ends)
    wanted = "hello € world"[:max_len] if max_len < 99 else "hello € world"
    assert text == (wanted.split(stop[0])[0] if stop else wanted)
    assert ends[-1][2] is (FinishReason.LENGTH if max_len < 99 and not stop else FinishReason.STOP)


class Talking(FakeBackend):
    """Says `pieces`, then ends or fails."""

    def __init__(self, pieces: list[str], fails: bool = False):
        super().__init__()
        self._pieces, self._fails = pieces, fails

    @property
    def model(self) -> ModelInfo:
        return ModelInfo(TOKENIZER, 256, TOKENIZER.vocab_size, (), SamplingParams(temperature=0), None, "talking")

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        stats = GenerationStats(prompt_len=len(request.prompt_ids))
        for piece in self._pieces:
            stats.completion_len += 1
            yield TokenEvent(7, piece, stats)
        if self._fails:
            raise EngineError("it broke")
        yield TokenEvent(TOKENIZER.eos_token_id, "", stats, finish_reason=FinishReason.STOP, stop=END)


class Lines(Writer):
    """A dialect of one JSON object per line, as Ollama's is."""

    media_type = "application/x-ndjson"

    def __init__(self) -> None:
        self.kept: list[AnswerStep] = []

    def write(self, step: AnswerStep) -> Iterator[bytes]:
        for event in step.events:
            fields = {name: value for name, value in asdict(event).items() if name not in ("stats", "logprobs", "id")}
            yield json.dumps({"event": type(event).__name__, **fields}).encode() + b"\n"

    def end(self, error: KTransformersError | None) -> Iterator[bytes]:
        yield json.dumps({"done": error is None, "error": error and str(error)}).encode() + b"\n"

    def keep(self, step: AnswerStep) -> None:
        self.kept.append(step)

    def body(self) -> Any:
        return {
            "steps": len(self.kept),
            "text": "".join(e.text for s in self.kept for e in s.events if isinstance(e, TextDelta)),
        }


def ask(backend: Talking, asked: ChatRequest | TextRequest, *, is_streamed: bool) -> httpx.Response:
    app = create_app(backend, ServerConfig(model_names=("m",)))

    @app.post("/made-up")
    async def made_up(request: Request) -> Response:
        return await respond(request, asked.n, is_streamed, lambda: asked, lambda prepared: Lines())

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            response = await client.post("/made-up")
        assert app.state.service.admission.num_active == 0
        app.state.service.workers.close()
        return response

    return asyncio.run(main())


def chat_request(**fields: Any) -> ChatRequest:
    conversation = Conversation(messages=[Message(role="user", content="hi")])
    return ChatRequest(id=new_id("x"), model=None, sampling={"max_tokens": 9}, conversation=conversation, **fields)


def test_another_dialect_needs_a_writer_only() -> None:
    response = ask(Talking(["<think>a", "</think>", "b"]), chat_request(), is_streamed=True)
    assert response.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line for line in lines if line.get("event") != "TokenAdded"] == [
        {"event": "AnswerStarted", "prompt_text": "", "prompt_logprobs": None},
        {"event": "ReasoningDelta", "text": "a"},
        {"event": "TextDelta", "text": "b"},
        {"event": "AnswerFinished", "reason": "stop", "stop": None},
        {"done": True, "error": None},
    ]
    whole = ask(Talking(["a", "b"]), chat_request(), is_streamed=False)
    assert whole.json() == {"steps": 3, "text": "ab"}


def test_an_error_in_the_middle_is_the_writers_to_tell() -> None:
    response = ask(Talking(["a"], fails=True), chat_request(), is_streamed=True)
    assert response.status_code == 200
    assert json.loads(response.text.splitlines()[-1]) == {"done": False, "error": "it broke"}
    assert ask(Talking(["a"], fails=True), chat_request(), is_streamed=False).status_code == 500


def test_what_is_wrong_is_said_before_the_stream_begins() -> None:
    refused = ask(Talking(["a"]), chat_request(priority=1), is_streamed=True)
    assert refused.status_code == 400
    assert "leave priority out" in refused.text
    text = TextRequest(id="x", model=None, prompts=[[1] * 300])
    assert ask(Talking(["a"]), text, is_streamed=True).json()["error"]["code"] == "context_length_exceeded"

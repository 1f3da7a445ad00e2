"""Spans of answers: their tree, what they say, and that they reach a collector; over a backend without a model."""

from __future__ import annotations

import asyncio
import http.server
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from ktransformers.core import SamplingParams, TokenEvent
from ktransformers.errors import ConfigError, DeadlineError
from ktransformers.scheduler.records import Row, SequenceStart, StepPlan
from ktransformers.server.app import create_app
from ktransformers.server.backend.balance_serve import _commands
from ktransformers.server.backend.base import Backend, GenerationRequest
from ktransformers.server.backend.timeline import MAX_CHUNKS, Chunk, ChunkClock, Timeline
from ktransformers.server.balance.chunk_watch import ChunkWatch
from ktransformers.server.config import ServerConfig
from ktransformers.server.otlp import CLOSE_SECONDS, CONVENTIONS, OtlpTraces, collector_url
from ktransformers.server.run import _open_traces
from ktransformers.server.traces import MAX_CHUNK_SPANS, Span
from tests.support.balance_backend import backend as balanced
from tests.support.fake_backend import FakeBackend
from tests.support.fake_engine import VOCAB_SIZE
from tests.support.scripted_backend import Script, ScriptedBackend
from tests.support.server_process import ServerProcess

CONFIG = ServerConfig(model_names=("demo",))
SECRET = "blue-elephant"
PHASES = ["prepare", "queue", "prefill", "decode"]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def _as_if_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables of the machine's, and the loggers as they were."""
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    source = logging.getLogger("opentelemetry")
    handlers, propagates = source.handlers[:], source.propagate
    yield
    source.handlers[:], source.propagate = handlers, propagates


class Collected:
    """Spans that ended, in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.traces = OtlpTraces(self._provider)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    @property
    def roots(self) -> list[ReadableSpan]:
        return [span for span in self.spans if span.kind is SpanKind.SERVER]

    def children(self, parent: ReadableSpan) -> list[ReadableSpan]:
        """In the order of their beginnings."""
        assert parent.context is not None
        own = parent.context.span_id
        found = [one for one in self.spans if one.parent is not None and one.parent.span_id == own]
        return sorted(found, key=lambda one: one.start_time or 0)

    def only(self) -> ReadableSpan:
        (root,) = self.roots
        return root


@pytest.fixture
def collected() -> Collected:
    return Collected()


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= span.end_time
    return span.start_time, span.end_time


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


def ask(backend: Backend, collected: Collected, path: str, body: Any, **headers: str) -> httpx.Response:
    async def work() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(backend, CONFIG, collected.traces), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:10002") as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(work())


CHAT = {"model": "demo", "messages": [{"role": "system", "content": SECRET}, {"role": "user", "content": SECRET}]}
TOOL = {"type": "function", "function": {"name": "elephant_tool", "parameters": {"type": "object"}}}


def test_what_the_span_of_a_request_says(collected: Collected) -> None:
    body = CHAT | {
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.75, "top_k": 7, "seed": 11, "frequency_penalty": 0.25,
        "presence_penalty": -0.5, "stop": [SECRET, "grey-whale"], "tools": [TOOL],
    }  # fmt: skip
    response = ask(ScriptedBackend(Script(["a", "b"])), collected, "/v1/chat/completions", body)
    root, answer = collected.only(), response.json()
    assert (root.name, root.kind, root.status.status_code) == ("chat demo", SpanKind.SERVER, StatusCode.UNSET)
    assert root.instrumentation_scope is not None
    assert root.instrumentation_scope.schema_url == CONVENTIONS
    assert dict(attributes(root)) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ktransformers",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 7.0,
        "gen_ai.request.seed": 11,
        "gen_ai.request.frequency_penalty": 0.25,
        "gen_ai.request.presence_penalty": -0.5,
        "ktransformers.request.stop_sequences": 2,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.response.finish_reasons": ("stop",),
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "server.address": "localhost",
        "server.port": 10002,
    }
    assert "elephant" not in "".join(span.to_json() for span in collected.spans)
    assert "whale" not in "".join(span.to_json() for span in collected.spans)


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/chat/completions", CHAT, "chat"),
        ("/v1/completions", {"model": "demo", "prompt": SECRET}, "text_completion"),
        ("/v1/responses", {"model": "demo", "input": SECRET, "store": False}, "chat"),
        ("/v1/messages", {"model": "demo", "max_tokens": 5, "messages": CHAT["messages"][1:]}, "chat"),
        ("/api/chat", CHAT | {"stream": False}, "chat"),
        ("/api/generate", {"model": "demo", "prompt": SECRET, "raw": True, "stream": False}, "text_completion"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_all_dialects_have_them(
    path: str, body: dict[str, Any], operation: str, is_streamed: bool, collected: Collected
) -> None:
    response = ask(ScriptedBackend(Script(["a", "b"])), collected, path, body | {"stream": is_streamed})
    assert response.status_code == 200, response.text
    root = collected.only()
    assert root.name == f"{operation} demo"
    assert attributes(root).get("gen_ai.request.stream", False) is is_streamed
    assert attributes(root)["gen_ai.usage.output_tokens"] == 3
    phases = collected.children(root)
    assert [one.name for one in phases] == PHASES
    assert attributes(phases[3])["ktransformers.decode.tokens"] == 3
    check_cover(root, phases)
    assert SECRET not in "".join(span.to_json() for span in collected.spans)


def check_cover(root: ReadableSpan, phases: Sequence[ReadableSpan]) -> None:
    """One begins where the other ends, the first one with the request, and none outlives it."""
    at = times(root)[0]
    for phase in phases:
        began, ended = times(phase)
        assert began == at, phase.name
        at = ended
    assert at <= times(root)[1]


def test_several_answers_have_phases_of_their_own(collected: Collected) -> None:
    ask(FakeBackend(), collected, "/v1/completions", {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 3})
    root = collected.only()
    assert attributes(root)["gen_ai.request.choice.count"] == 2
    assert attributes(root)["gen_ai.response.finish_reasons"] == ("length",) * 4
    assert attributes(root)["gen_ai.usage.input_tokens"] == 3
    children = collected.children(root)
    assert sorted(one.name for one in children) == sorted(PHASES[:1] + 4 * PHASES[1:])
    which = [attributes(one)["ktransformers.answer"] for one in children if one.name == "decode"]
    assert sorted(which) == [0, 1, 2, 3]


def test_traceparent_is_the_parent(collected: Collected) -> None:
    ask(FakeBackend(), collected, "/v1/completions", {"prompt": [1]}, traceparent=f"00-{TRACE}-{PARENT}-01")
    root = collected.only()
    assert root.parent is not None
    assert format(root.parent.span_id, "016x") == PARENT
    assert {format(one.context.trace_id, "032x") for one in collected.spans if one.context} == {TRACE}


@pytest.mark.parametrize(
    "parent", [f"00-{TRACE}-{PARENT}", "00-" + "0" * 32 + f"-{PARENT}-01", "\N{SNOWMAN}", "x" * 9999]
)
def test_a_broken_traceparent_is_none(parent: str, collected: Collected) -> None:
    async def work() -> None:
        transport = httpx.ASGITransport(create_app(FakeBackend(), CONFIG, collected.traces))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.post("/v1/completions", json={"prompt": [1]}, headers={"traceparent": parent.encode()})

    asyncio.run(work())
    assert collected.only().parent is None


def test_whoever_does_not_want_a_trace_has_none(collected: Collected) -> None:
    ask(FakeBackend(), collected, "/v1/completions", {"prompt": [1]}, traceparent=f"00-{TRACE}-{PARENT}-00")
    assert not collected.spans


@pytest.mark.parametrize(
    ("body", "name", "status", "error"),
    [
        ({"prompt": [1], "temperature": SECRET}, "text_completion", 400, "400"),
        ({"prompt": [1] * 99}, "text_completion", 400, "ContextLengthError"),
    ],
)
def test_refused_requests(body: dict[str, Any], name: str, status: int, error: str, collected: Collected) -> None:
    ask(FakeBackend(), collected, "/v1/completions", body)
    root = collected.only()
    assert (root.name, root.status.status_code) == (name, StatusCode.ERROR)
    assert attributes(root)["http.response.status_code"] == status
    assert attributes(root)["error.type"] == error
    assert not collected.children(root)
    assert SECRET not in root.to_json()


def test_other_routes_have_none(collected: Collected) -> None:
    ask(FakeBackend(), collected, "/tokenize", {"prompt": 5})
    ask(FakeBackend(), collected, "/no/such/route", {})
    assert not collected.spans


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_error_in_the_middle(is_streamed: bool, collected: Collected) -> None:
    backend = ScriptedBackend(Script(["a", "b"], error=DeadlineError("too late")))
    response = ask(backend, collected, "/v1/completions", {"prompt": "x", "stream": is_streamed})
    assert response.status_code == (200 if is_streamed else 408)
    root = collected.only()
    assert attributes(root)["error.type"] == "DeadlineError"
    assert root.status.status_code is StatusCode.ERROR
    assert attributes(root)["gen_ai.usage.output_tokens"] == 2
    assert [one.name for one in collected.children(root)] == PHASES
    check_cover(root, collected.children(root))


class Bug(FakeBackend):
    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        raise ZeroDivisionError(SECRET)
        yield


def test_a_bug(collected: Collected) -> None:
    response = ask(Bug(), collected, "/v1/completions", {"prompt": [1]})
    assert response.status_code == 500
    assert attributes(collected.only())["error.type"] == "ZeroDivisionError"
    assert SECRET not in collected.only().to_json()


class Stuck(FakeBackend):
    """Says `count` tokens and no more."""

    def __init__(self, count: int):
        super().__init__()
        self._count, self.is_stuck = count, asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        said = 0
        async for event in super().generate(request):
            if said == self._count:
                break
            said += 1
            yield event
        self.is_stuck.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("count", "names"), [(0, ["prepare", "queue"]), (2, ["prepare", "queue", "prefill", "decode"])]
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves(count: int, names: list[str], is_streamed: bool, collected: Collected) -> None:
    async def work() -> None:
        backend = Stuck(count)
        app = create_app(backend, CONFIG, collected.traces)
        body = b'{"prompt": [1, 2], "stream": %s}' % (b"true" if is_streamed else b"false")
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            for message in messages:
                return message
            await backend.is_stuck.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "query_string": b"", "headers": headers, "http_version": "1.1", "scheme": "http",
            "client": ("127.0.0.1", 1), "server": None, "asgi": {"version": "3.0"},
        }  # fmt: skip
        await app(scope, receive, send)

    asyncio.run(work())
    root = collected.only()
    assert attributes(root)["error.type"] == "aborted"
    assert "server.address" not in attributes(root)
    assert [one.name for one in collected.children(root)] == names
    check_cover(root, collected.children(root))


def test_a_seed_of_64_bits_is_one_that_means_the_same(collected: Collected) -> None:
    ask(FakeBackend(), collected, "/v1/completions", {"prompt": [1], "seed": -3})
    assert attributes(collected.only())["gen_ai.request.seed"] == -3


def test_the_frameworks_own_spans_stay_off(collected: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: collected.traces._provider)
    ask(FakeBackend(), collected, f"/v1/completions?{SECRET}", {"prompt": [1]})
    assert sorted(one.name for one in collected.spans) == [
        "decode",
        "prefill",
        "prepare",
        "queue",
        "text_completion demo",
    ]


# Chunks.


def test_chunks_of_one_sequence() -> None:
    now = iter([10.0, 11.0, 13.0])
    timeline = Timeline()
    clock = ChunkClock(timeline, 12, lambda: next(now))
    clock(0, 7)  # five of twelve are cached
    clock(4, 7)
    clock.finish()
    assert timeline.chunks == [Chunk(10.0, 11.0, 5, 4, 4), Chunk(11.0, 13.0, 9, 3, 3)]


def test_chunks_are_bounded() -> None:
    timeline = Timeline()
    for index in range(MAX_CHUNKS + 5):
        timeline.add(Chunk(0.0, 1.0, index, 1, 1))
    assert (len(timeline.chunks), timeline.num_chunks) == (MAX_CHUNKS, MAX_CHUNKS + 5)


def start(run_id: int, name: str, num_tokens: int) -> SequenceStart:
    return SequenceStart(
        run_id=run_id, request_id=name, params=SamplingParams(), prompt_len=num_tokens, token_ids=range(num_tokens)
    )


def row(run_id: int, first: int, num_tokens: int) -> Row:
    return Row(
        run_id=run_id, start=first, token_ids=range(num_tokens), token_source=None, block_table=(), is_sampled=False
    )


def plan(
    step_id: int, rows: Sequence[Row], starts: Sequence[SequenceStart] = (), ended: Sequence[int] = ()
) -> StepPlan:
    return StepPlan(step_id=step_id, starts=starts, rows=rows, ended=ended)


def test_steps_that_overlap_follow_each_other_in_the_engine() -> None:
    watch = ChunkWatch()
    watch.planned(plan(1, [row(0, 0, 8)], [start(0, "a", 10)]), 1.0)
    watch.planned(plan(2, [row(0, 8, 2), row(1, 0, 3)], [start(1, "b", 3)]), 2.0)
    watch.finished(1, 5.0)
    watch.planned(plan(3, [row(0, 10, 1), row(1, 3, 1)]), 6.0)  # decodes are no chunks
    watch.finished(2, 7.0)
    watch.finished(3, 8.0)
    traces = watch.take()
    assert traces is not None
    assert list(traces.planned) == [("a", 1.0), ("b", 2.0)]
    told = [(one.request_id, one.began, one.ended, one.position, one.num_tokens, one.num_rows) for one in traces.chunks]
    assert told == [("a", 1.0, 5.0, 0, 8, 8), ("a", 5.0, 7.0, 8, 2, 5), ("b", 5.0, 7.0, 0, 3, 5)]
    assert watch.take() is None


def test_what_an_engine_takes_with_it_is_no_chunk() -> None:
    watch = ChunkWatch()
    watch.planned(plan(1, [row(0, 0, 4)], [start(0, "a", 10)]), 1.0)
    watch.lost()
    watch.planned(plan(2, [row(1, 0, 4)], [start(1, "a", 10)]), 2.0)
    watch.finished(2, 3.0)
    traces = watch.take()
    assert traces is not None
    assert [(one.began, one.position) for one in traces.chunks] == [(2.0, 0)]


def test_twins_share_a_command_all_the_same() -> None:
    prompt = (1, 2)
    twins = [
        GenerationRequest(request_id=name, prompt_ids=prompt, params=SamplingParams(seed=seed), timeline=Timeline())
        for seed, name in enumerate("abc")
    ]
    assert len(list(_commands(twins))) == 1


class Chunky(FakeBackend):
    """Has computed each prompt in more chunks than there are spans for."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        timeline = request.timeline
        assert timeline is not None
        timeline.begin(timeline.created)
        for index in range(MAX_CHUNK_SPANS):
            timeline.add(Chunk(timeline.created, timeline.created, index, 1, 1))
        async for event in super().generate(request):
            yield event


def test_the_spans_of_a_request_are_bounded(collected: Collected) -> None:
    ask(Chunky(), collected, "/v1/completions", {"prompt": [1], "n": 4})
    assert sum(one.name == "prefill chunk" for one in collected.spans) == MAX_CHUNK_SPANS
    counts = [attributes(one)["ktransformers.prefill.chunks"] for one in collected.spans if one.name == "prefill"]
    assert counts == [MAX_CHUNK_SPANS] * 4


def test_sixteen_at_once_in_chunks(collected: Collected) -> None:
    prompts = [[1 + (7 * who + at) % (VOCAB_SIZE - 14) + 13 for at in range(20 + 3 * who)] for who in range(16)]

    async def work() -> None:
        async with balanced(chunk_size=16, has_traces=True, cache_lens=400, has_prefix_cache=False) as backend:
            transport = httpx.ASGITransport(create_app(backend, CONFIG, collected.traces))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                bodies = [{"prompt": prompt, "max_tokens": 30, "ignore_eos": True} for prompt in prompts]
                answers = await asyncio.gather(*(client.post("/v1/completions", json=one) for one in bodies))
                assert [one.status_code for one in answers] == [200] * 16
            stats = backend.stats().scheduler
            assert stats is not None
            assert stats.num_preemptions > 0

    asyncio.run(work())
    assert len(collected.roots) == 16
    lengths, again = set(), list[ReadableSpan]()
    for root in collected.roots:
        phases = collected.children(root)
        assert [one.name for one in phases] == PHASES
        check_cover(root, phases)
        prefill = phases[2]
        chunks, (at, end) = collected.children(prefill), times(prefill)
        position = 0
        for chunk in chunks:
            said = attributes(chunk)
            assert at <= times(chunk)[0]
            at = times(chunk)[1]
            if said["ktransformers.chunk.position"] == 0:
                position = 0  # computed again, after a preemption
            assert said["ktransformers.chunk.position"] == position
            position += said["ktransformers.chunk.tokens"]
            assert said["ktransformers.chunk.tokens"] <= said["ktransformers.step.rows"] <= 16
        assert at <= end
        assert len(chunks) > 1
        assert position == attributes(root)["gen_ai.usage.input_tokens"]
        lengths.add(position)
        again += collected.children(phases[3])
        assert all(times(phases[3])[0] < times(one)[1] <= times(phases[3])[1] for one in collected.children(phases[3]))
        assert attributes(phases[3])["ktransformers.decode.tokens"] == 30
        assert attributes(phases[3])["ktransformers.decode.tokens_per_second"] > 0
    assert lengths == {len(prompt) for prompt in prompts}
    assert {one.name for one in again} == {"prefill chunk"}  # of those that were preempted


# Sending.


class Collector:
    """An HTTP server that takes what it is sent."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, Mapping[str, str], bytes]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.bodies.append((self.path, dict(self.headers), body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def sent(body: bytes) -> list[Any]:
    """The spans of a request to the collector."""
    resources = ExportTraceServiceRequest.FromString(body).resource_spans
    return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def test_a_collector_gets_them(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "ktransformers")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "our-models")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"api-key={SECRET},not a header {SECRET}")
    traces = OtlpTraces.to(collector.url)
    traces.write(Span("chat demo", 5, 9, {"gen_ai.request.seed": 3}, [Span("queue", 6, 7)]), {})
    traces.close()
    ((path, headers, body),) = collector.bodies
    assert (path, headers["api-key"]) == ("/v1/traces", SECRET)
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    said = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert said["service.name"] == "our-models"
    assert said["deployment.environment.name"] == "test"
    (scope,) = resource.scope_spans
    child, root = sorted(scope.spans, key=lambda one: one.name, reverse=True)
    assert (root.name, root.start_time_unix_nano, root.end_time_unix_nano) == ("chat demo", 5, 9)
    assert (child.name, child.parent_span_id, child.trace_id) == ("queue", root.span_id, root.trace_id)
    assert SECRET not in caplog.text
    assert "opentelemetry.util.re" in caplog.text  # the header that is none, without what it says


def test_a_service_sends_what_it_has_when_it_ends(collector: Collector) -> None:
    flags = ("--backend_type", "ktransformers", "--model_name", "demo", "--cache_lens", "512", "--chunk_size", "16")
    with ServerProcess(*flags, "--otlp-traces-endpoint", collector.url) as process:
        body = {"prompt": "Count from one to a hundred, then back, please. " * 3, "max_tokens": 4}
        prompt_len = httpx.post(f"{process.url}/v1/completions", json=body, timeout=60).json()["usage"]["prompt_tokens"]
        httpx.post(f"{process.url}/v1/embeddings", json={"input": "Hello."}, timeout=60)
        assert process.terminate() == 0
    spans = [span for _, _, body in collector.bodies for span in sent(body)]
    names = {span.span_id: span.name for span in spans}
    seen = {(names.get(span.parent_span_id), span.name) for span in spans}
    phases = {(f"{root} demo", name) for root in ("text_completion", "embeddings") for name in PHASES[:3]}
    roots = {(None, "text_completion demo"), (None, "embeddings demo")}
    assert seen == roots | phases | {("text_completion demo", "decode"), ("prefill", "prefill chunk")}
    first = min((span for span in spans if span.name == "prefill"), key=lambda one: one.start_time_unix_nano)
    chunks = [span for span in spans if span.parent_span_id == first.span_id]
    at, position = first.start_time_unix_nano, 0
    for span in sorted(chunks, key=lambda one: one.start_time_unix_nano):
        said = {one.key: one.value.int_value for one in span.attributes}
        assert at <= span.start_time_unix_nano <= span.end_time_unix_nano <= first.end_time_unix_nano
        assert said["ktransformers.chunk.position"] == position
        assert said["ktransformers.chunk.tokens"] == min(16, prompt_len - position)
        at, position = span.end_time_unix_nano, position + 16
    assert prompt_len <= position < prompt_len + 16


def test_who_sends_is_named_by_default() -> None:
    traces = OtlpTraces.to("http://127.0.0.1:9")
    assert traces._provider.resource.attributes["service.name"] == "ktransformers"
    traces.close()


def test_the_sampler_of_the_environment_is_asked(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    traces = OtlpTraces.to(collector.url)
    traces.write(Span("chat demo", 5, 9), {})
    traces.close()
    assert not collector.bodies


def test_a_collector_that_is_not_there_costs_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"api-key={SECRET}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")  # no second try
    traces = OtlpTraces.to(f"http://user:{SECRET}@127.0.0.1:9/v1/traces?key={SECRET}")
    for index in range(3):
        traces.write(Span("chat demo", index, index + 1), {})
        traces._provider.force_flush()
    traces.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [
        "http://127.0.0.1:9/v1/traces does not take traces; they are dropped while it does not (said once)"
    ]
    assert SECRET not in caplog.text


def test_a_collector_that_is_silent_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ktransformers.server.otlp.CLOSE_SECONDS", 0.01)
    entered, release = threading.Event(), threading.Event()

    def export(self: OTLPSpanExporter, spans: Any) -> SpanExportResult:
        entered.set()
        release.wait()
        return SpanExportResult.FAILURE

    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    traces = OtlpTraces.to("http://127.0.0.1:9")
    traces.write(Span("chat demo", 1, 2), {})
    traces.close()
    assert "the last spans were not sent: the collector did not take them in 0.01 s" in caplog.text
    assert entered.wait(60)
    release.set()
    assert CLOSE_SECONDS <= 2


@pytest.mark.parametrize(
    "url", ["", "localhost:4318", "grpc://localhost:4317", "http://", "http://[::1", "http://h:0", "http://h:x"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="http://localhost:4318/v1/traces"):
        collector_url(url)


def test_the_path_of_an_address() -> None:
    assert collector_url("http://c:4318") == collector_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert collector_url("https://c/otlp/traces") == "https://c/otlp/traces"


def test_variables_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-5")
    with pytest.raises(ConfigError, match="OTEL_"):
        OtlpTraces.to("http://localhost:4318")


def test_without_the_packages_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ktransformers.server.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'ktransformers-engine\[otel\]'"):
        _open_traces("http://localhost:4318")


def test_nothing_of_it_is_imported_when_it_is_off() -> None:
    code = (
        "import sys, ktransformers.server.balance.scheduler_process, ktransformers.server.balance.engine_process\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
        "import ktransformers.server.run, ktransformers.server.backend.balance_serve, ktransformers.cli.serve\n"
        "wanted = 'opentelemetry.sdk', 'opentelemetry.exporter', 'ktransformers.server.otlp'\n"  # FastAPI has the API
        "print([name for name in sys.modules if name.startswith(wanted)])"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["[]", "[]"]


def test_no_times_are_taken_when_it_is_off() -> None:
    backend = ScriptedBackend(Script(["a"]))

    async def work() -> None:
        transport = httpx.ASGITransport(create_app(backend, CONFIG))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.post("/v1/completions", json={"prompt": "x"})

    asyncio.run(work())
    assert [one.timeline for one in backend.requests] == [None]

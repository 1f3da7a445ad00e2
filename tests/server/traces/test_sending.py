"""Spans on their way to a collector: what the environment says, failures, and what nobody asked for."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult

from ktransformers.errors import ConfigError
from ktransformers.server.app import create_app
from ktransformers.server.lifecycle import open_traces
from ktransformers.server.telemetry.otlp import CLOSE_SECONDS, OtlpTraces, collector_url
from ktransformers.server.telemetry.traces import Span
from tests.support.servers.scripted_backend import Script, ScriptedBackend
from tests.support.servers.server_process import ServerProcess
from tests.support.servers.spans import (
    CONFIG,
    PHASES,
    SECRET,
    Collector,
    sent,
)


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


@pytest.mark.exhaustive
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
    monkeypatch.setattr("ktransformers.server.telemetry.otlp.CLOSE_SECONDS", 0.01)
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
    monkeypatch.delitem(sys.modules, "ktransformers.server.telemetry.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'ktransformers-engine\[otel\]'"):
        open_traces("http://localhost:4318")


@pytest.mark.exhaustive
def test_nothing_of_it_is_imported_when_it_is_off() -> None:
    code = (
        "import sys, ktransformers.server.balance.scheduler_process, ktransformers.server.balance.engine_process\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
        "import ktransformers.server.run, ktransformers.server.backend.interfaces.balance_serve\n"
        "import ktransformers.cli.serve.command\n"
        # FastAPI has the API
        "wanted = 'opentelemetry.sdk', 'opentelemetry.exporter', 'ktransformers.server.telemetry.otlp'\n"
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

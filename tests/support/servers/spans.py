"""Spans of answers: collected in memory, or by an HTTP server, and what they say."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from ktransformers.server.app import create_app
from ktransformers.server.backend.base import BackendInterfaceBase
from ktransformers.server.config import ServerConfig
from ktransformers.server.telemetry.otlp import OtlpTraces

CONFIG = ServerConfig(model_names=("demo",))
SECRET = "blue-elephant"
PHASES = ["prepare", "queue", "prefill", "decode"]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


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


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= span.end_time
    return span.start_time, span.end_time


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


def ask(backend: BackendInterfaceBase, collected: Collected, path: str, body: Any, **headers: str) -> httpx.Response:
    async def work() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(backend, CONFIG, collected.traces), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:10002") as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(work())


def check_cover(root: ReadableSpan, phases: Sequence[ReadableSpan]) -> None:
    """One begins where the other ends, the first one with the request, and none outlives it."""
    at = times(root)[0]
    for phase in phases:
        began, ended = times(phase)
        assert began == at, phase.name
        at = ended
    assert at <= times(root)[1]

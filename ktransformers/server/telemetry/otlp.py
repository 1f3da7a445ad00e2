"""Sends spans to a collector: OTLP over HTTP, by OpenTelemetry's SDK. Imported only where traces are wanted.

    event loop ── write ──> bounded queue ── a thread of the SDK ──> collector

A collector that does not answer costs a line in the log: the queue then drops spans. What OpenTelemetry itself logs can
hold headers, which are secrets: here only the fixed part of its messages is said, each once.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit, urlunsplit

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from typing_extensions import override

from ktransformers import __version__
from ktransformers.errors import ConfigError, reason_of
from ktransformers.server.telemetry.traces import Span

__all__ = ["CONVENTIONS", "OtlpTraces", "collector_url"]

logger = logging.getLogger("ktransformers.server")

CONVENTIONS = "https://opentelemetry.io/schemas/1.41.0"
"""The version of the semantic conventions that names of spans and attributes are from."""

CLOSE_SECONDS = 2.0
"""How long the end of the service waits for the collector to take the last spans."""

_PATH = "/v1/traces"
_PLACEHOLDER = re.compile(r"%[-#0 +.\d]*[a-zA-Z]")


def collector_url(endpoint: str) -> str:
    """Return the address that spans are sent to: the endpoint, with OTLP's path where it has none. Raises
    ConfigError.
    """
    try:
        parts = urlsplit(endpoint)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(
            "--otlp_traces_endpoint must be the address of an OTLP collector over HTTP, "
            "such as http://localhost:4318/v1/traces"
        )
    return urlunsplit(parts._replace(path=_PATH)) if parts.path in ("", "/") else endpoint


class OtlpTraces:
    """A TraceSink that sends spans by OTLP. Give it a provider for tests; `to` makes the real one."""

    def __init__(self, provider: TracerProvider, exporter: _Exporter | None = None):
        self._provider, self._exporter = provider, exporter
        self._tracer = provider.get_tracer("ktransformers", __version__, schema_url=CONVENTIONS)

    @classmethod
    def to(cls, endpoint: str) -> OtlpTraces:
        """Return traces that send to this address, with what the environment's OTEL_* variables say otherwise. Raises
        ConfigError.
        """
        url = collector_url(endpoint)
        _tame_logging()
        try:
            exporter = _Exporter(OTLPSpanExporter(endpoint=url), _shown(url))
            provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
            provider.add_span_processor(BatchSpanProcessor(exporter))
        except (ValueError, OSError) as error:
            raise ConfigError(f"traces cannot be sent as the OTEL_* variables say: {reason_of(error)}") from error
        logger.info("traces are sent to %s", _shown(url))
        return cls(provider, exporter)

    def write(self, span: Span, headers: Mapping[str, Sequence[str]]) -> None:
        """Send a request's spans, as TraceSink.write does."""
        _write(self._tracer, span, propagate.extract(headers), SpanKind.SERVER)

    def close(self) -> None:
        """Send the spans that are left, for CLOSE_SECONDS at most. Blocks."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive() and not (self._exporter is not None and self._exporter.has_failed):
            logger.warning("the last spans were not sent: the collector did not take them in %g s", CLOSE_SECONDS)


def _write(tracer: Tracer, span: Span, context: Context, kind: SpanKind) -> None:
    attributes = dict(span.attributes)
    made = tracer.start_span(span.name, context, kind, attributes, start_time=span.began)
    if made.is_recording():  # else the sampler has left out all of it
        inside = set_span_in_context(made, context)
        for child in span.children:
            _write(tracer, child, inside, SpanKind.INTERNAL)
        if span.error:
            made.set_status(Status(StatusCode.ERROR))
    made.end(end_time=span.ended)


def _resource() -> Resource:
    """Who sends. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    ours = Resource({"service.name": "ktransformers", "service.version": __version__})
    return Resource.create().merge(ours).merge(OTELResourceDetector().detect())


def _shown(url: str) -> str:
    """An address as the log may show it: without user, password and query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


class _Exporter(SpanExporter):
    """Says once that the collector does not take spans. Called on the SDK's thread."""

    def __init__(self, inner: SpanExporter, shown: str):
        self._inner, self._shown = inner, shown
        self.has_failed = False

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is not SpanExportResult.SUCCESS and not self.has_failed:
            self.has_failed = True
            logger.warning("%s does not take traces; they are dropped while it does not (said once)", self._shown)
        return result

    @override
    def shutdown(self) -> None:
        self._inner.shutdown()

    @override
    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


class _Fixed(logging.Handler):
    """Passes on messages of OpenTelemetry without their arguments, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: set[str] = set()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("opentelemetry.exporter."):
            return  # _Exporter says what comes of it
        text = _PLACEHOLDER.sub("...", str(record.msg))
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s: %s", record.name, text)


def _tame_logging() -> None:
    source = logging.getLogger("opentelemetry")
    source.propagate = False
    source.handlers[:] = [_Fixed()]

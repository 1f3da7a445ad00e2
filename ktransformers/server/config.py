"""The frozen configuration of the HTTP service, checked once. Does not know models."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ktransformers.core import SamplingParams
from ktransformers.errors import ConfigError
from ktransformers.server.http.keys import KeyLimits

__all__ = ["DEFAULT_PORT", "ServerConfig"]

logger = logging.getLogger(__name__)

DEFAULT_PORT = 10002
_INF = float("inf")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Configuration of the HTTP service. Times in seconds, sizes in bytes.

    model_names: the names that requests may use; the first is the one that answers carry.
    sampling: SamplingParams fields that the operator sets for requests that do not; they win over the model's own.
    listed_names: those of them that /v1/models lists; none given: the first.
    max_new_tokens: most tokens of any answer, and of one whose request names no limit; None: to the end of the context.
    is_strict_on_names: a request for a model that is not among model_names is refused.
    key_limits: what some of api_keys may do; the others have no limits of their own.
    is_strict_on_fields: a request with a field that would be ignored is refused.
    reads_special_tokens: special tokens that a message spells are read as such, so that a user can forge a turn.
    drops_oldest: a conversation that is longer than the context loses its oldest turns; else it is refused.
    max_images: pictures of one request at most. ignores_images: a model that reads text only answers with a note in the
    place of each. image_hosts: names of hosts, "*.example" too, from which pictures are fetched by their URLs.
    tool_format: a name of tokenizer.tools.TOOL_FORMATS, or "auto".
    allowed_hosts: names that requests may give in Host beside loopback ones and `host`; * for all.
    web: the chat page is served at /; None: if only this machine can connect.
    max_queue: answers that may wait beyond those that the backend computes; more get a 503. An answer is one choice of
    one prompt. max_queue_per_key: of those that wait and are computed, how many may be for one API key.
    max_connections: open at once; None: as many as the limit on open files leaves room for.
    responses_store: bytes of answers kept for /v1/responses, 0 for none.
    max_suspended: requests that may be suspended at once. max_keep_seconds: most that a stream may go on without its
    client, where that asks for it; 0: never. kept_streams: bytes of all streams that are kept for that.
    state_dir: folder with the journal of kept streams, which the next server goes on with; None: it knows nothing.
    drain_seconds: how long running answers may take after SIGTERM.
    otlp_traces_endpoint: address that OpenTelemetry spans are sent to; None: there are none.
    ping_seconds: a stream that has had nothing to say for so long says that it lives; 0: never.
    send_timeout: how long a client may keep a full connection without reading; body_timeout: without sending.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    model_names: tuple[str, ...] = ()
    listed_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    key_limits: Mapping[str, KeyLimits] = field(default_factory=dict, repr=False)
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    ssl_keyfile: Path | None = None
    ssl_certfile: Path | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None
    is_strict_on_names: bool = False
    is_strict_on_fields: bool = False
    reads_special_tokens: bool = False
    force_think: bool = False
    drops_oldest: bool = False
    max_images: int = 64
    ignores_images: bool = False
    image_hosts: tuple[str, ...] = ()
    web: bool | None = None
    tool_format: str = "auto"
    max_queue: int = 256
    max_queue_per_key: int | None = None
    max_connections: int | None = None
    max_body: int = 32 << 20
    responses_store: int = 64 << 20
    max_suspended: int = 64
    max_keep_seconds: float = 3600.0
    kept_streams: int = 64 << 20
    state_dir: Path | None = None
    request_timeout: float | None = None
    drain_seconds: float = 30.0
    ping_seconds: float = 15.0
    otlp_traces_endpoint: str | None = field(default=None, repr=False)
    send_timeout: float = 60.0
    body_timeout: float = 30.0

    def __post_init__(self) -> None:
        checks = (
            (0 <= self.port <= 65535, f"--port must be between 0 and 65535, got {self.port}"),
            (0 <= self.max_queue < 1 << 31, f"--max_queue must be at least 0, got {self.max_queue}"),
            (
                self.max_queue_per_key is None or 1 <= self.max_queue_per_key < 1 << 31,
                f"--max_queue_per_key must be at least 1, got {self.max_queue_per_key}",
            ),
            (0 <= self.max_images < 1 << 16, f"--max_images must be between 0 and 65535, got {self.max_images}"),
            (
                self.max_new_tokens is None or self.max_new_tokens >= 1,
                f"--max_new_tokens must be at least 1, got {self.max_new_tokens}",
            ),
            (
                0 <= self.responses_store < 1 << 50,
                f"--responses_store must be between 0 and {(1 << 30) - 1}, got {self.responses_store >> 20}",
            ),
            (0 <= self.max_suspended < 1 << 31, f"--max_suspended must be at least 0, got {self.max_suspended}"),
            (
                0 <= self.max_keep_seconds <= 7 * 24 * 3600,
                f"--max_keep_seconds must be between 0 and {7 * 24 * 3600}, got {self.max_keep_seconds}",
            ),
            (
                1 << 20 <= self.kept_streams < 1 << 50,
                f"--kept_streams must be between 1 and {(1 << 30) - 1}, got {self.kept_streams >> 20}",
            ),
            (0 <= self.drain_seconds < _INF, f"--drain_seconds must be at least 0, got {self.drain_seconds}"),
            (0 <= self.ping_seconds < _INF, f"--ping_seconds must be at least 0, got {self.ping_seconds}"),
            (
                self.request_timeout is None or 0 < self.request_timeout < _INF,
                f"--request_timeout must be positive, got {self.request_timeout}",
            ),
            (
                self.state_dir is None or self.max_keep_seconds > 0,
                "--state_dir is about streams that are kept, and --max_keep_seconds 0 keeps none",
            ),
            (
                (self.ssl_keyfile is None) == (self.ssl_certfile is None),
                "TLS needs both --ssl_keyfile and --ssl_certfile",
            ),
        )
        for is_valid, message in checks:
            if not is_valid:
                raise ConfigError(message)
        for flag in ("ssl_keyfile", "ssl_certfile"):
            path = getattr(self, flag)
            if path is not None and not path.is_file():
                raise ConfigError(f"--{flag} {path} is not a file")
        replace(SamplingParams(), **self.sampling)  # raises for values out of range

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect to the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def has_web(self) -> bool:
        """Whether browsers get the chat page at /."""
        return self.is_loopback if self.web is None else self.web

    @property
    def host_names(self) -> tuple[str, ...]:
        """The names that a Host header may give. An API key is something that no web page knows: with keys any name
        will do by default.
        """
        return self.allowed_hosts or (("*",) if self.api_keys else ())

    def warn_if_open(self) -> None:
        """Log a warning when everyone who reaches the port can use the service."""
        if not self.is_loopback and not self.api_keys:
            logger.warning("listening on %s without --api_key: everyone who reaches this port can use it", self.host)

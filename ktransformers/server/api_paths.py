"""Facts about routes that layers around them need."""

from __future__ import annotations

import re

__all__ = [
    "LOCAL_PATHS",
    "OPEN_PATHS",
    "PAGE_PREFIX",
    "PROBE_PATHS",
    "SCOPE_KEY",
    "USE_KEY",
    "is_of_page",
    "is_open",
    "plain_path",
]

_SLASHES = re.compile("/+")

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/v1/health", "/ping"})
"""Routes that need no API key: probes of load balancers have none, and the front page holds nothing to hide."""

PAGE_PREFIX = "/page/"
"""Where the files of the chat page are."""

LOCAL_PATHS = frozenset({"/metrics"})
"""Routes that need no API key where only this machine can connect: scrapers of metrics rarely have one."""

PROBE_PATHS = frozenset({"/health", "/ready", "/v1/health", "/ping", "/load", "/metrics", "/v1/status"})
"""Routes that programs ask every few seconds, day and night: the log shows them at its debug level."""

SCOPE_KEY = "ktransformers.api_key"
"""Where ApiKeys puts which of the keys a request came with (not the key itself)."""

USE_KEY = "ktransformers.key_use"
"""Where ApiKeys puts the KeyUse of that key."""


def is_of_page(path: str) -> bool:
    """Whether this is a file of the chat page."""
    return path.startswith(PAGE_PREFIX)


def is_open(path: str) -> bool:
    """Whether a request for it needs no API key."""
    return path in OPEN_PATHS or is_of_page(path)


def plain_path(path: str) -> str:
    """The path as routes are called: single slashes, none at the end. Clients join addresses in all ways."""
    return _SLASHES.sub("/", path).rstrip("/") or "/"

"""Facts about routes that layers around them need."""

from __future__ import annotations

__all__ = ["OPEN_PATHS", "PAGE_PREFIX", "PROBE_PATHS", "SCOPE_KEY", "is_of_page", "is_open"]

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
"""Routes that need no API key: probes of load balancers have none, and the front page holds nothing to hide."""

PAGE_PREFIX = "/page/"
"""Where the files of the chat page are."""

PROBE_PATHS = frozenset({"/health", "/ready", "/metrics", "/v1/status"})
"""Routes that programs ask every few seconds, day and night: the log shows them at its debug level."""

SCOPE_KEY = "ktransformers.api_key"
"""Where ApiKeys puts which of the keys a request came with (not the key itself)."""


def is_of_page(path: str) -> bool:
    """Whether this is a file of the chat page."""
    return path.startswith(PAGE_PREFIX)


def is_open(path: str) -> bool:
    """Whether a request for it needs no API key."""
    return path in OPEN_PATHS or is_of_page(path)

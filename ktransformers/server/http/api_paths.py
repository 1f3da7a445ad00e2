"""Facts about the paths of routes that layers around them need."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = [
    "LOCAL_PATHS",
    "OPEN_PATHS",
    "PAGE_PREFIX",
    "PROBE_PATHS",
    "SCOPE_KEY",
    "USE_KEY",
    "is_of_page",
    "is_open",
    "nearest_path",
    "plain_path",
]

_SLASHES = re.compile("/+")
_PREFIXES = (None, "v1", "api")
_LIKENESS = 0.85

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
    """Whether a path is that of a file of the chat page."""
    return path.startswith(PAGE_PREFIX)


def is_open(path: str) -> bool:
    """Whether a request for this path needs no API key."""
    return path in OPEN_PATHS or is_of_page(path)


def plain_path(path: str) -> str:
    """Return the path as routes are called: single slashes, none at the end. Clients join addresses in all ways."""
    return _SLASHES.sub("/", path).rstrip("/") or "/"


def nearest_path(path: str, routes: Iterable[str]) -> str | None:
    """Return the route that a client meant whose address has a part too few or too many, or a slip of letters.

    None when none is near. Parts of routes in braces stand for any.
    """
    known = [route for route in dict.fromkeys(routes) if route != "/"]
    parts = [part for part in path.split("/") if part]
    if len(parts) > 1 and (longer := next((route for route in known if route.startswith(f"{path}/")), None)):
        return longer
    for skipped in range(len(parts)):  # the longest tail first
        for prefix in _PREFIXES:
            wanted = "/".join(("", *([prefix] if prefix else []), *parts[skipped:]))
            if wanted != path and any(_fits(wanted, route) for route in known):
                return wanted
    near = difflib.get_close_matches(path, known, 1, _LIKENESS)
    return near[0] if near else None


def _fits(path: str, route: str) -> bool:
    ours, its = path.split("/"), route.split("/")
    return len(ours) == len(its) and all(b.startswith("{") or a == b for a, b in zip(ours, its, strict=True))

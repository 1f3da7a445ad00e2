"""Facts about routes that layers around them need."""

from __future__ import annotations

__all__ = ["OPEN_PATHS", "PROBE_PATHS", "SCOPE_KEY"]

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
"""Routes that need no API key: probes of load balancers have none, and the front page holds nothing to hide."""

PROBE_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Routes that programs ask every few seconds, day and night: the log shows them at its debug level."""

SCOPE_KEY = "ktransformers.api_key"
"""Where ApiKeys puts which of the keys a request came with (not the key itself)."""

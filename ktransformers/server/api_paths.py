"""Facts about routes that layers around them need."""

from __future__ import annotations

__all__ = ["OPEN_PATHS"]

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Routes that need no API key: probes of load balancers have none."""

"""Where spans go in tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from tests.support.servers.spans import Collected, Collector


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


@pytest.fixture
def collected() -> Collected:
    return Collected()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()

"""What every test of a command needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands set up the logging of the whole process; later tests must not notice."""
    logger = logging.getLogger("ktransformers")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prompts that tests type must not get into the history of whoever runs them, nor from one test to the next."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "ktransformers"

"""What the tests of messages share: the wrong files, made once, and a process that is left as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.wrong_files import make_wrong_files


@pytest.fixture(scope="session")
def wrong_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wrong_files(tmp_path_factory.mktemp("wrong"))


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands set up the logging of the whole process; later tests must not notice."""
    logger = logging.getLogger("ktransformers")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)

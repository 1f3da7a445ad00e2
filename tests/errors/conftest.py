"""What the tests of messages share: the wrong files, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models.wrong_files import make_wrong_files


@pytest.fixture(scope="session")
def wrong_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wrong_files(tmp_path_factory.mktemp("wrong"))

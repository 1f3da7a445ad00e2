"""Profiles and a browser for the tests of what is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checks.profile_folders import Run, Written, write_profile
from tests.web.conftest import browser as browser

RUN = Run(requests=16, layers=6, experts=24, top_k=3)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Written]:
    folder = tmp_path_factory.mktemp("recorded")
    return folder, write_profile(folder, RUN)

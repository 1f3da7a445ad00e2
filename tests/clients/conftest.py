"""One balance_serve process with the bundled model for all clients here, and the environments that they run in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.servers.client_environments import environment, node_modules
from tests.support.servers.server_process import ServerProcess


@pytest.fixture(scope="session")
def service() -> Iterator[ServerProcess]:
    with ServerProcess("--model_name", "demo", "--cache_lens", "8192") as process:
        yield process


@pytest.fixture(scope="session")
def interpreter_of(request: pytest.FixtureRequest) -> Callable[..., Path]:
    """interpreter_of(name, behind=()): of the environment whose pins are in NAME.txt here."""
    cache = request.config.cache.mkdir("clients")
    return lambda name, behind=(): environment(Path(__file__).parent / f"{name}.txt", cache, behind)


@pytest.fixture(scope="session")
def modules_of(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """modules_of(folder): node_modules of the packages that are pinned in that folder here, js or js/agents."""
    cache = request.config.cache.mkdir("clients")
    return lambda folder: node_modules(Path(__file__).parent / folder, cache)

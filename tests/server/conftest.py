"""One server process with the bundled model for all tests that do not need flags of their own."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from ktransformers.config import EngineConfig
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import build_engine
from tests.support.models.demo import DEMO_GGUF
from tests.support.servers.server_process import ServerProcess


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--backend_type", "ktransformers", "--model_name", "demo", "--cache_lens", "2048") as process:
        yield process


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The engine of one sequence on the same model: what answers have to be."""
    with LLM.from_engine(build_engine(EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=2048))) as made:
        yield made

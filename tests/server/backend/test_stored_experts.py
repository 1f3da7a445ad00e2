"""Servers whose model's experts are read from its file: answers, metrics, and a file that changes while they serve."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from tests.server.backend.test_balance_serve import child_pids, metrics
from tests.support.models.demo import DEMO_GGUF
from tests.support.servers.server_process import ServerProcess

NUM_REQUESTS, NUM_TOKENS = 3, 24
LEAST = 1e-6
"""GiB: the plan takes the least that slots may have."""


def prompt_of(number: int) -> str:
    return f"Count: {number} {number + 1} {number + 2} {number} {number + 1}" * (1 + 10 * (number == 0))


def ask(server: ServerProcess, number: int) -> httpx.Response:
    body = {"model": "demo", "prompt": prompt_of(number), "max_tokens": NUM_TOKENS, "ignore_eos": True}
    body |= {"temperature": 0.6 * (number % 2), "seed": number}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LLM(str(DEMO_GGUF), cpu_infer=1, cache_lens=4096, speculative="off") as llm:
        params = [
            SamplingParams(temperature=0.6 * (number % 2), seed=number, max_tokens=NUM_TOKENS, ignore_eos=True)
            for number in range(NUM_REQUESTS)
        ]
        return [one.text for one in llm.generate([prompt_of(number) for number in range(NUM_REQUESTS)], params)]


@pytest.mark.parametrize("backend", ["balance_serve", "ktransformers"])
def test_a_file_that_changes_ends_answers_and_not_the_service(
    backend: str, expected: list[str], tmp_path: Path
) -> None:
    model = Path(shutil.copy(DEMO_GGUF, tmp_path / "demo.gguf"))
    was = model.stat()
    flags = ("--backend_type", backend, "--gguf_path", str(model), "--model_name", "demo", "--cache_lens", "4096")
    disk = ("--experts_from", "disk", "--experts_ram", str(LEAST))
    batch = ("--max_batch_size", "4", "--no-spare_engine") if backend == "balance_serve" else ()
    with ServerProcess(*flags, *disk, *batch) as server, ThreadPoolExecutor(NUM_REQUESTS) as pool:

        def all_answers() -> list[httpx.Response]:
            return list(pool.map(lambda number: ask(server, number), range(NUM_REQUESTS)))

        engines = child_pids(server, "kt-engine")
        assert [text_of(one) for one in all_answers()] == expected
        data = model.read_bytes()
        os.truncate(model, 0)  # of which nothing may be mapped where steps come by
        for answer in all_answers():
            assert answer.status_code == 500
            assert f"{model} has 0 bytes" in answer.text
        with model.open("r+b") as file:
            file.write(data)
        for answer in all_answers():
            assert answer.status_code == 500
            assert f"{model} was written to" in answer.text
        os.utime(model, ns=(was.st_atime_ns, was.st_mtime_ns))
        assert [text_of(one) for one in all_answers()] == expected
        assert child_pids(server, "kt-engine") == engines
        if backend != "balance_serve":
            return
        found = metrics(server)
        assert found["ktransformers:engine_restarts_total"] == 0
        assert found["ktransformers:stored_expert_hits_total"] > 0
        assert found["ktransformers:stored_expert_misses_total"] > 0
        assert found["ktransformers:stored_expert_read_bytes_total"] > 0
        assert found["ktransformers:stored_expert_read_errors_total"] > 0
        shown = httpx.get(f"{server.url}/v1/status", timeout=60).json()["stored_experts"]
        assert shown["misses"] == found["ktransformers:stored_expert_misses_total"]

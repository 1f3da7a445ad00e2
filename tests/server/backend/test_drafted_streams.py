"""Streams of balance_serve with draft tokens, through kill -9 of the engine and while they are suspended: they end as
answers without draft tokens do."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from ktransformers.config import bundled_model
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from tests.server.backend.test_balance_serve import metrics
from tests.server.backend.test_divided import processes
from tests.support.models.demo import DEMO_CHECKPOINT
from tests.support.servers.server_process import ServerProcess

FLAGS = ("--backend_type", "balance_serve", "--model_path", str(DEMO_CHECKPOINT), "--cache_lens", "8192")
DRAFTERS = {
    "ngram": ("--speculative", "ngram"),
    "draft": ("--draft_model", str(bundled_model(""))),
    "mtp": ("--speculative", "mtp"),
}
NUM_STREAMS, NUM_TOKENS = 8, 400


def prompt_of(number: int) -> str:
    return f"Count: {number} {number + 1} {number + 2} {number} {number + 1} {number + 2} {number}"


def params_of(number: int) -> SamplingParams:
    return SamplingParams(temperature=0.6 * (number % 2), seed=number, max_tokens=NUM_TOKENS, ignore_eos=True)


def stream(server: ServerProcess, number: int, has_begun: list[int]) -> str:
    params = params_of(number)
    body = {"prompt": prompt_of(number), "max_tokens": NUM_TOKENS, "ignore_eos": True}
    body |= {"temperature": params.temperature, "seed": number}
    return server.completion(body, lambda: has_begun.append(number), request_id=f"s{number}")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_they_go_on_with_the_same_tokens(drafter: str) -> None:
    numbers = range(NUM_STREAMS)
    with LLM(model_path=DEMO_CHECKPOINT, cpu_infer=1, speculative="off") as llm:
        outputs = llm.generate([prompt_of(number) for number in numbers], [params_of(number) for number in numbers])
    with ServerProcess(*FLAGS, *DRAFTERS[drafter]) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        has_begun: list[int] = []
        answers = [pool.submit(stream, server, number, has_begun) for number in numbers]
        while not {0, 1} <= set(has_begun):
            assert not any(answer.done() for answer in answers)
        suspended = httpx.post(f"{server.url}/v1/requests/s1/suspend", timeout=60).json()
        (engine,) = processes("kt-engine", server.process.pid)
        os.kill(engine, signal.SIGKILL)
        assert not all(answer.done() for answer in answers)
        assert suspended["state"] == "suspended"
        assert httpx.post(f"{server.url}/v1/requests/s1/resume", timeout=60).json()["state"] == "running"
        assert [answer.result() for answer in answers] == [output.text for output in outputs]
        assert metrics(server)["vllm:spec_decode_num_accepted_tokens_total"] > 0
        assert server.terminate() == 0

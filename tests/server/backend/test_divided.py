"""A model divided over stages behind balance_serve: answers are those of one process, through the death of a stage."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from tests.support.models.demo import DEMO_GGUF
from tests.support.servers.server_process import ServerProcess

FLAGS = ("--backend_type", "balance_serve", "--gguf_path", str(DEMO_GGUF), "--cache_lens", "4096")
NUM_STREAMS, NUM_TOKENS = 6, 160


def processes(name: str, parent: int) -> list[int]:
    """Ids of the processes of this name that `parent` has started, itself or by others."""
    known = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat, called = (entry / "stat").read_text(), (entry / "comm").read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue
        known[int(entry.name)] = (called, int(stat.rpartition(")")[2].split()[1]))

    def is_below(pid: int) -> bool:
        while pid in known and pid != parent:
            pid = known[pid][1]
        return pid == parent

    return sorted(pid for pid, (called, _) in known.items() if called == name and is_below(pid))


def stream(server: ServerProcess, number: int, has_begun: list[int]) -> str:
    body = {"model": "demo", "prompt": f"Question {number}: what is", "max_tokens": NUM_TOKENS}
    body |= {"temperature": 0.8, "seed": number, "ignore_eos": True}
    return server.completion(body, lambda: has_begun.append(number))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [3, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_streams_end_as_if_no_stage_had_died(num_stages: int) -> None:
    prompts = [f"Question {number}: what is" for number in range(NUM_STREAMS)]
    params = [
        SamplingParams(temperature=0.8, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True)
        for number in range(NUM_STREAMS)
    ]
    with LLM(DEMO_GGUF, cache_lens=4096, cpu_infer=1) as llm:
        wanted = [output.text for output in llm.generate(prompts, params)]
    with ServerProcess(*FLAGS, "--pipeline", str(num_stages)) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        stages = processes("kt-rank", server.process.pid)
        assert len(stages) == num_stages - 1
        engines = processes("kt-engine", server.process.pid)
        has_begun: list[int] = []
        answers = [pool.submit(stream, server, number, has_begun) for number in range(NUM_STREAMS)]
        while len(has_begun) < 5 * NUM_STREAMS:
            assert not any(answer.done() for answer in answers)
        os.kill(stages[0], signal.SIGKILL)
        assert [answer.result() for answer in answers] == wanted
        again = processes("kt-rank", server.process.pid)
        assert len(again) == num_stages - 1
        assert set(again) & set(stages) == set(stages[1:])
        assert processes("kt-engine", server.process.pid) == engines
        assert server.terminate() == 0

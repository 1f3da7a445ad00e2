"""Steps that a real GPU holds until their tokens are known: nothing waits for ever, and no answer is another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.config import DEMO_MODEL_PATH, EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.batch_loop import BatchLoop
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import Hardware, build_engine
from ktransformers.engine.sampling.logits_request import RequestedLogits
from ktransformers.engine.step.cuda_graphs import StepLatch
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.engine.step.graph_sizes import GRAPH_ROWS
from ktransformers.engine.step.logits_fetch import LogitsFetch
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.errors import EngineError
from ktransformers.kernels.transfer.cuda import CudaDriver
from ktransformers.kernels.types import QuantType
from ktransformers.operators.device import cuda_memory
from ktransformers.optimize.machine import detect_machine
from tests.support.engines.failing import fail_once
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, rules_of
from tests.support.gguf.writer import write_gguf
from tests.support.models.tiny_models import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, top_k=20, max_tokens=33, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=6, presence_penalty=0.5, max_tokens=25, ignore_eos=True),  # whole rows
    SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True),
]


@pytest.fixture(params=["bundled", "hot"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> EngineConfig:
    if request.param == "bundled":
        path = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))))
        return EngineConfig(gguf_path=path, cache_lens=1024, speculative="off")
    model = tiny_model("qwen3_moe", seed=3, hidden=256)
    path = write_gguf(model, tmp_path / "model.gguf", QuantType.Q8_0, QuantType.Q8_0)
    rules = rules_of("qwen3_moe", tmp_path, EXPERTS_ON_CPU, EXPERTS_ON_CPU)
    return EngineConfig(gguf_path=path, cache_lens=1024, speculative="off", optimize_config_path=rules)


def gpu_hardware() -> Hardware:
    return Hardware(detect_machine(gpus=cuda_memory))


def answers(config: EngineConfig) -> list[list[int]]:
    with LLM.from_loop(BatchLoop(lambda report: build_engine(config, report, gpu_hardware(), max_batch_size=4))) as llm:
        outputs = llm.generate([[3 + i, 40, 41, 42] for i in range(len(CASES))], CASES)
    return [list(output.token_ids) for output in outputs]


def test_answers_are_the_same(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    held, launch_held = list[bool](), ModelRunner.launch_held

    def launched(self: ModelRunner, *inputs: Any) -> bool:
        held.append(launch_held(self, *inputs))
        return held[-1]

    monkeypatch.setattr(ModelRunner, "launch_held", launched)
    found = answers(config)
    assert sum(held) > 20
    monkeypatch.setattr(ModelRunner, "launch_held", lambda *inputs: False)
    assert found == answers(config)


def test_nothing_is_held_behind_prompts_that_no_graph_takes() -> None:
    """Twice: nothing is held before decode steps are known."""
    path = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))))
    config = EngineConfig(gguf_path=path, cache_lens=4096, chunk_size=2048, speculative="off", prefix_cache=False)
    prompt = [3 + i % 500 for i in range(GRAPH_ROWS[-1] + 200)]
    with LLM.from_loop(BatchLoop(lambda report: build_engine(config, report, gpu_hardware(), max_batch_size=4))) as llm:
        first, second = (llm.generate([[start, *prompt]], CASES[:1])[0] for start in (7, 7))
    assert first.token_ids == second.token_ids


def test_a_step_that_fails_leaves_no_gpu_waiting(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM.from_loop(BatchLoop(lambda report: build_engine(config, report, gpu_hardware(), max_batch_size=4))) as llm:
        (want,) = llm.generate([[3, 40, 41, 42]], CASES[:1])
        fail_once(monkeypatch, PagedExecutor, "_sample")
        with pytest.raises(EngineError, match="out of luck"):
            llm.generate([[3, 40, 41, 42]], CASES[:1])
        (output,) = llm.generate([[3, 40, 41, 42]], CASES[:1])
    assert output.token_ids == want.token_ids


def test_rows_that_are_asked_for_late_come_beside_a_step_that_is_held() -> None:
    """More tokens than there is room for are equally good."""
    device = torch.device("cuda")
    driver, fetch, needs = CudaDriver(device), LogitsFetch(2, 4096, device), [8, 8]
    latch = StepLatch(driver)
    logits = torch.zeros(2, 4096, device=device)
    logits[1, 7] = 3.0
    behind = torch.zeros(1, device=device)

    def hold() -> None:
        latch.close()
        behind.add_(1)

    # Kernels are loaded, which waits for the GPU.
    hold()
    latch.open()
    fetch.requested(logits, needs)
    try:
        found = fetch.requested(logits, needs, hold)
    finally:
        latch.open()
    assert isinstance(found, RequestedLogits)
    assert torch.equal(found.whole, logits.cpu())
    assert behind.item() == 2

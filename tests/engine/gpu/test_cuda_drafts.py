"""Steps with draft tokens on a real GPU: replayed, and their rows as near to those of single steps as batches are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.known_answers import KnownDrafter
from ktransformers.config import DEMO_MODEL_PATH, EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.batch_loop import BatchLoop
from ktransformers.engine.api.llm import LLM, RequestOutput
from ktransformers.engine.load.builder import Hardware, build_engine
from ktransformers.engine.step.cuda_graphs import CudaGraphs
from ktransformers.kernels.types import QuantType
from ktransformers.operators.device import cuda_memory
from ktransformers.optimize.machine import detect_machine
from ktransformers.scheduler.drafting import planner
from ktransformers.scheduler.drafting.acceptance import AcceptanceRates
from ktransformers.scheduler.drafting.prompt_lookup import MAX_MATCH
from tests.support.engines.cuda_engines import check, engine_of
from tests.support.engines.drafter_steps import equal_steps
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, EXPERTS_ON_GPU, rules_of
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import prompt
from tests.support.models.tiny_models import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("num_rows", [2, 5, 8])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_rows_of_a_step(
    model_type: str, where: str, num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed, with all logits, as each token gives them in a step of its own."""
    model = tiny_model(model_type, seed=3, hidden=256)
    path = write_gguf(model, tmp_path / "model.gguf", QuantType.Q8_0, QuantType.Q8_0, kv_b="whole")
    experts = EXPERTS_ON_CPU if where == "cpu" else EXPERTS_ON_GPU
    rules = rules_of(model_type, tmp_path, EXPERTS_ON_CPU, experts)
    engine = engine_of(path, on_gpu=True, optimize_config_path=rules)
    count, launch = [0], CudaGraphs.launch

    def counted(self: CudaGraphs, *work: Any, **how: bool) -> None:
        count[0] += 1
        launch(self, *work, **how)

    monkeypatch.setattr(CudaGraphs, "launch", counted)
    ids = prompt(model.config.vocab_size)
    start = len(ids) - num_rows
    engine.runner.forward(ids[:start], 0, [start - 1])
    want = torch.cat([engine.runner.forward([ids[at]], at, [0]).clone() for at in range(start, len(ids))])
    before = count[0]
    got = engine.runner.forward(ids[start:], start, range(num_rows)).clone()
    assert count[0] == before + 1
    check(got, want)
    engine.close()


def answered(speculative: str) -> RequestOutput:
    path = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))))
    config = EngineConfig(gguf_path=path, cache_lens=512, speculative=speculative)
    hardware = Hardware(detect_machine(gpus=cuda_memory))
    with LLM.from_loop(BatchLoop(lambda report: build_engine(config, report, hardware))) as llm:
        (output,) = llm.generate([list(range(40, 60))], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    return output


def test_drafts_of_an_answer_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, without --speculative ngram. A near tie may end in another token, behind which none is right."""
    want = answered("off").token_ids
    rates = AcceptanceRates(MAX_MATCH)
    equal_steps(monkeypatch)
    drafts = [*range(40, 60), *want]
    monkeypatch.setattr(planner, "PromptLookup", lambda ids, *args: KnownDrafter(ids, rates, drafts))
    got = answered("auto")
    assert got.stats.num_drafted > 8
    assert got.stats.num_accepted > got.stats.num_drafted // 4

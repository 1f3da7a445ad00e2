"""Prompts whose experts are streamed, or computed by a CPU that is waited for, replayed between the experts: the same as
padded steps that are not, with as many launches a layer whatever the model.

The GPU is made up, computes in fp32 and has tapes for graphs (tests/support/taped_graphs.py). The interpreter takes long
for many rows, so steps have 20 to 30 of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine import prefill as prefill_module
from ktransformers.engine import step_sizes
from ktransformers.engine.builder import Engine, Hardware, PagedEngine, build_engine, build_paged_engine
from ktransformers.engine.decode_inputs import DecodeInputs, InputMemory, StaticInputs, StepSize
from ktransformers.engine.piece_graphs import PieceGraphs
from ktransformers.kernels.cpu import MoeKernel
from ktransformers.models.registry import RULES_DIR
from ktransformers.operators import device as device_module
from ktransformers.operators.device import Device
from ktransformers.operators.experts import routed
from ktransformers.operators.experts.split import CpuRate, PrefillRates
from ktransformers.operators.experts.streamed import ExpertPrefill
from ktransformers.scheduler.records import StepPlan
from tests.support.agreement import prompt
from tests.support.gpu_engines import Gpu, sequence_start, step_row
from tests.support.launches import counted_launches
from tests.support.taped_graphs import TapedGraphs
from tests.support.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

FLAT = CpuRate((1,), (1e-3,))
RATES = PrefillRates(1e-3, 0.0, FLAT, FLAT)  # some experts are copied, the others stay
THRESHOLD, ROWS = 8, 24


@pytest.fixture(autouse=True)
def _given_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrate(prefill: ExpertPrefill, kernel: MoeKernel, expert_nbytes: int, file: object) -> None:
        prefill.rates, prefill.threshold = RATES, max(THRESHOLD, prefill.least_rows)

    monkeypatch.setattr(prefill_module, "calibrate", calibrate)


def config_of(path: Path, **settings: object) -> EngineConfig:
    values = {"cache_lens": 96, "chunk_size": ROWS, "cpu_infer": 1, "cpu_quant": "q8_0", "self_check": False}
    rules = RULES_DIR / "default-moe.yaml"  # as a file of the user's, so that experts stay on the CPU
    return EngineConfig(model_path=path, optimize_config_path=rules, **{**values, **settings})  # type: ignore[arg-type]


def hardware_of(graphs: TapedGraphs, gpu: Gpu) -> Hardware:
    return gpu.hardware(graphs=graphs, graph_rows=(ROWS,))  # type: ignore[arg-type]


def made(path: Path, graphs: TapedGraphs, gpu: Gpu | None = None, **settings: object) -> Engine:
    return build_engine(config_of(path, **settings), hardware=hardware_of(graphs, gpu or Gpu()))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second layer has experts of which some are the first one's neighbours, as everywhere; with shared ones."""
    path = tmp_path_factory.mktemp("model")
    write_safetensors(tiny_model("qwen2_moe", seed=3), path)
    return path


def chunks(engine: Engine, ids: list[int]) -> list[torch.Tensor]:
    """Logits of a prompt in chunks of up to ROWS tokens, of the last token of each."""
    found = []
    for start in range(0, len(ids), ROWS):
        part = ids[start : start + ROWS]
        found.append(engine.runner.forward(part, start, [len(part) - 1]).clone())
    return found


def test_chunks_of_a_prompt_are_replayed(model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids, graphs, gpu = (prompt(100) * 3)[:43], TapedGraphs(), Gpu()
    with caplog.at_level(logging.INFO):
        engine = made(model_path, graphs, gpu)
    assert "steps of more than 0 rows are replayed between the experts: the host chooses" in caplog.text
    assert "captured steps of 24 rows in 5 CUDA graphs in" in caplog.text  # two seams a layer
    got = chunks(engine, ids)
    ((*pieces,),) = graphs.pieces
    assert [tape.replays for tape in pieces] == [2] * 5
    assert gpu.copies.num_copies > 0
    engine.close()
    without = made(model_path, TapedGraphs(), use_cuda_graph=False)
    want = chunks(without, ids)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    without.close()

"""Steps of several rows a sequence, captured: the same as padded steps that are not, and as steps without padding.

The GPU is made up and computes in fp32. The interpreter takes long for many rows, so graphs have 20 to 36 of them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import build_engine, plan_model
from ktransformers.engine.step import graph_sizes
from ktransformers.engine.step.decode_inputs import StepSize
from ktransformers.kernels.types import QuantType
from ktransformers.scheduler.records import StepPlan
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.gpu_engines import sequence_start, step_row
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import TOLERANCE, prompt
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")


def paged_step(path: Path, rows: tuple[int, ...], lengths: tuple[int, int]) -> tuple[list[int | None], object, int]:
    """Two prompts in a step: tokens, counts of experts, and how many replays. Without rows nothing is captured."""
    graphs = FakeGraphs()
    where = {"model_path": path} if path.is_dir() else {"gguf_path": path}
    config = EngineConfig(cache_lens=96, cpu_infer=1, self_check=False, use_cuda_graph=bool(rows), **where)  # type: ignore[arg-type]
    hardware = fake_hardware(graphs=graphs, graph_rows=rows)
    paged = build_engine(config, page_size=16, max_batch_size=2, hardware=hardware)
    slots = [{} if paged.cache.states is None else {"read_slot": -1, "write_slot": i} for i in range(2)]
    starts = [sequence_start(i, [(3 * i + 5 * at) % 90 for at in range(length)]) for i, length in enumerate(lengths)]
    both = [
        step_row(i, start.token_ids, 0, [3 * i, 3 * i + 1, 3 * i + 2], **slots[i]) for i, start in enumerate(starts)
    ]
    result = paged.executor.execute(StepPlan(step_id=1, ended=[], starts=starts, rows=both))
    paged.close()
    return [one.token_id for one in result.results], result.experts, graphs.replays


@pytest.mark.exhaustive
def test_prompts_are_replayed(tmp_path: Path) -> None:
    """Of a model whose experts are on the GPU: tokens, and counts of experts, which leave padding out."""
    model = tiny_model("qwen3_moe", seed=1, layers=1)
    path = write_gguf(model, tmp_path / "m.gguf", QuantType.Q8_0, QuantType.F32)
    tokens, experts, replays = paged_step(path, (20,), (11, 6))
    assert replays == 1
    assert paged_step(path, (), (11, 6)) == (tokens, experts, 0)


@pytest.mark.exhaustive
def test_prompts_of_a_model_with_states_are_replayed(tmp_path: Path) -> None:
    """A long prompt goes chunk by chunk, and the row beside it does not. Experts are on the CPU."""
    recurrent_model("qwen3_next", num_hidden_layers=1, layer_types=["linear_attention"]).save_pretrained(tmp_path)
    tokens, _, replays = paged_step(tmp_path, (36,), (33, 1))
    assert replays == 1
    assert paged_step(tmp_path, (), (33, 1))[0] == tokens


@pytest.mark.exhaustive
def test_logits_of_a_prompt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One sequence: `==` with and without graphs, and as `transformers` has them. A step of which all logits are wanted
    fits no graph."""
    model = tiny_model("deepseek_v3", seed=1)
    ids = prompt(model.config.vocab_size)[:20]
    write_safetensors(model, tmp_path)
    config, graphs = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1), FakeGraphs()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = []
    for use_cuda_graph in (True, False):
        with caplog.at_level(logging.INFO):
            hardware = fake_hardware(graphs=graphs, graph_rows=(24,))
            engine = static_engine(replace(config, use_cuda_graph=use_cuda_graph), hardware=hardware)
        got.append(engine.runner.forward(ids, 0, [19]).clone())
        assert graphs.replays == 1
        assert (got[-1] - want[19:]).abs().max() <= TOLERANCE * want.abs().max()
        engine.close()
    assert torch.equal(*got)
    assert "captured CUDA graphs for batch sizes 1, 24 rows of 1 in" in caplog.text
    assert "steps that expand latents run without CUDA graphs" in caplog.text


def test_memory_of_graphs_is_planned(tmp_path: Path) -> None:
    write_safetensors(tiny_model("qwen3_moe", seed=1), tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1)
    hardware = fake_hardware(graph_rows=(16, 64))
    sizes = [plan_model(replace(config, **more), hardware=hardware).extra_bytes for more in ({}, {"chunk_size": 32})]  # type: ignore[arg-type]
    assert sizes[0]["cuda graphs"]["cuda:0"] == 2 * sizes[1]["cuda graphs"]["cuda:0"] > 0
    without = plan_model(replace(config, use_cuda_graph=False), hardware=hardware)
    assert "cuda graphs" not in without.extra_bytes


def test_what_the_host_decides_is_not_replayed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line for each reason, which says from how many rows on."""
    reasons = {32: None, 64: "the host chooses", 128: "the host chooses", 256: "the host waits"}
    monkeypatch.setattr(graph_sizes, "_why_none", lambda plan, flash: None)
    monkeypatch.setattr(graph_sizes, "_why_not", lambda rows, plan, layout: reasons[rows])
    monkeypatch.setattr(graph_sizes, "choices_of", lambda plan: ())
    with caplog.at_level(logging.INFO):
        found = graph_sizes.replayed_sizes(tuple(reasons), None, None, (), 4096, 4)  # type: ignore[arg-type]
    assert found == (StepSize(32, 4),)
    assert caplog.messages == [
        "steps of more than 32 rows run without CUDA graphs: the host chooses",
        "steps of more than 32 rows run without CUDA graphs: the host waits",
    ]

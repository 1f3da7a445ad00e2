"""Which experts on a GPU were chosen, and which parts of a step were timed. The oracle is `transformers` in fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.builder import Engine, build_engine
from ktransformers.engine.gpu_profile import GpuStep
from ktransformers.engine.step_runtime import gpu_records
from ktransformers.operators.marks import Label, Span
from ktransformers.profiling.oplog import OpLog
from ktransformers.profiling.records import PARTS
from tests.support.agreement import prompt
from tests.support.fake_gpus import FakeGraphs, fake_hardware
from tests.support.gpu_engines import EXPERTS_ON_CPU, EXPERTS_ON_GPU, rules_of
from tests.support.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")


def chosen_by(model: torch.nn.Module, ids: list[int], top_k: int) -> torch.Tensor:
    """[layers, T, K] in ascending order."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return torch.stack([each.topk(top_k, dim=-1)[1].sort(dim=-1)[0] for each in logits])


def counted(chosen: torch.Tensor, num_experts: int) -> list[list[int]]:
    return [each.flatten().bincount(minlength=num_experts).tolist() for each in chosen]


def engine_on(path: Path, graphs: FakeGraphs, experts: str, use_cuda_graph: bool = True) -> Engine:
    rules = rules_of("qwen3_moe", path, EXPERTS_ON_CPU, experts)
    config = EngineConfig(model_path=path, cache_lens=64, cpu_infer=1, optimize_config_path=rules)
    return build_engine(replace(config, use_cuda_graph=use_cuda_graph), hardware=fake_hardware(graphs=graphs))


@pytest.mark.parametrize("use_cuda_graph", [True, False])
def test_experts_on_a_gpu_are_counted_in_every_step(use_cuda_graph: bool, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", seed=1)
    ids, config = prompt(model.config.vocab_size), model.config
    write_safetensors(model.bfloat16(), tmp_path)
    model = model.float()
    want = chosen_by(model, ids, config.num_experts_per_tok)
    graphs = FakeGraphs()
    engine = engine_on(tmp_path, graphs, EXPERTS_ON_GPU, use_cuda_graph)
    (usage,) = engine.plan.devices.usages()
    before = usage.counts()
    profile = engine.runner.profile_gpus(True)
    assert profile is not None
    steps = [ids[:-3], *([token] for token in ids[-3:])]
    first, replays = 0, graphs.replays
    for step in steps:
        engine.runner.forward(step, first, [len(step) - 1])
        latest, here = profile.latest, want[:, first : first + len(step)]
        assert latest is not None
        assert latest.counts is not None
        assert latest.counts.tolist() == counted(here, config.num_experts)
        got = torch.stack([torch.tensor(latest.ids[layer]) for layer in range(config.num_hidden_layers)])
        assert torch.equal(got.long().sort(dim=-1)[0], here)
        first += len(step)
    assert (usage.counts() - before).tolist() == counted(want, config.num_experts)
    assert graphs.replays - replays == (3 if use_cuda_graph else 0)
    engine.close()


@pytest.mark.parametrize("experts", [EXPERTS_ON_CPU, EXPERTS_ON_GPU])
def test_parts_of_steps_are_timed_while_somebody_asks(experts: str, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", seed=1)
    ids = prompt(model.config.vocab_size)
    write_safetensors(model.bfloat16(), tmp_path)
    model = model.float()
    graphs = FakeGraphs()
    engine = engine_on(tmp_path, graphs, experts)
    before = engine.runner.forward(ids[:5], 0, [4]).clone()
    captured = list(graphs.captured)
    profile = engine.runner.profile_gpus(True)
    assert profile is not None
    assert graphs.captured == captured * 2
    assert torch.equal(engine.runner.forward(ids[:5], 0, [4]), before)
    assert profile.latest is not None
    spans = profile.latest.spans["cuda:0"]
    ends = [span.begin + span.duration for span in spans[:-1]]
    assert ends == [span.begin for span in spans[1:]]
    layer = ["linear", "attention", "linear", "router", "experts"]
    layer += ["wait_cpu"] if experts == EXPERTS_ON_CPU else []
    timed = [(span.label.part, span.label.layer) for span in spans]
    assert timed == [("other", -1), *((part, i) for i in (0, 1) for part in layer), ("lm_head", -1)]
    engine.runner.forward(ids[5:6], 5, [0])
    assert [span.label for span in profile.latest.spans["cuda:0"]] == [span.label for span in spans]
    engine.runner.profile_gpus(False)
    seen = profile.latest
    engine.runner.forward(ids[6:7], 6, [0])
    assert profile.latest is seen
    assert engine.plan.devices["cuda:0"].marks is None
    engine.close()


def test_records_of_a_gpu_are_read_as_those_of_kernels_are(tmp_path: Path) -> None:
    """Times, experts by row and counts of a step, through the records that a Recorder sends."""
    spans = [Span(Label("attention", 0), 1_000, 300), Span(Label("wait_cpu", 0), 1_300, 50)]
    counts = torch.tensor([[0, 0, 0, 0], [2, 1, 0, 1]]).numpy()
    ids = torch.tensor([[0, 1], [3, 0]], dtype=torch.int32).numpy()
    log = OpLog()
    log.feed(gpu_records(GpuStep(2, {"cuda:1": spans}, {1: ids}, counts), 7), 1)
    found = log.take(7, 900, 2_000)
    timed = [(PARTS[op["part"]], op["layer"], op["device"], op["begin_ns"], op["duration_ns"]) for op in found.ops]
    assert timed == [("attention", 0, 2, 1_000, 300), ("wait_cpu", 0, 2, 1_300, 50)]
    (call,) = found.calls
    assert (call.layer, call.counts.tolist()) == (1, [2, 1, 0, 1])
    assert call.row_index.tolist() == [0, 1]
    assert call.ids.tolist() == [[0, 1], [3, 0]]

"""Which experts on a GPU were chosen, and which parts of a step were timed. The oracle is `transformers` in fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.step.step_runtime import StepRuntime
from ktransformers.operators.device import Device
from ktransformers.profiling.gpu_steps import gpu_calls, gpu_ops
from ktransformers.profiling.messages import GpuExpertCounts, GpuRecord, GpuTimes
from ktransformers.profiling.records import PARTS
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, EXPERTS_ON_GPU, rules_of
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.models.agreement import prompt
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")


def chosen_by(model: torch.nn.Module, ids: list[int], top_k: int) -> torch.Tensor:
    """[layers, T, K] in ascending order."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return torch.stack([each.topk(top_k, dim=-1)[1].sort(dim=-1)[0] for each in logits])


def counted(chosen: torch.Tensor, num_experts: int) -> list[list[int]]:
    return [each.flatten().bincount(minlength=num_experts).tolist() for each in chosen]


def engine_on(path: Path, graphs: FakeGraphs, experts: str, use_cuda_graph: bool = True) -> StaticEngine:
    rules = rules_of("qwen3_moe", path, EXPERTS_ON_CPU, experts)
    config = EngineConfig(model_path=path, cache_lens=64, cpu_infer=1, optimize_config_path=rules)
    return static_engine(replace(config, use_cuda_graph=use_cuda_graph), hardware=fake_hardware(graphs=graphs))


@pytest.mark.exhaustive
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
    before = usage.counts.clone()
    runtime = StepRuntime(engine.runner.steps)
    runtime.start()
    steps = [ids[:-3], *([token] for token in ids[-3:])]
    first, replays = 0, graphs.replays
    for step in steps:
        runtime.begin_step(first, len(step), [len(step) - 1])
        engine.runner.forward(step, first, [len(step) - 1])
        latest, here = runtime.end_step(), want[:, first : first + len(step)]
        assert latest is not None
        calls = list(gpu_calls(latest))
        assert [call.counts.tolist() for call in calls] == counted(here, config.num_experts)
        got = torch.stack([torch.tensor(call.ids) for call in calls])
        assert torch.equal(got.long().sort(dim=-1)[0], here)
        first += len(step)
    assert (usage.counts - before).tolist() == counted(want, config.num_experts)
    runtime.stop()
    assert graphs.replays - replays == (3 if use_cuda_graph else 0)
    engine.close()


@pytest.mark.exhaustive
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
    profile = engine.runner.steps.profile_gpus(True)
    assert profile is not None
    assert graphs.captured == captured * 2
    assert torch.equal(engine.runner.forward(ids[:5], 0, [4]), before)
    assert profile.latest is not None
    (timed,) = profile.latest.devices
    assert len(timed.times) == 8 * len(timed.labels)
    layer = ["linear", "attention", "linear", "router", "experts"]
    layer += ["wait_cpu"] if experts == EXPERTS_ON_CPU else []
    labels = [("other", -1), *((part, i) for i in (0, 1) for part in layer), ("lm_head", -1), ("end", -1)]
    assert list(timed.labels) == labels
    times = torch.frombuffer(bytearray(timed.times), dtype=torch.int64)
    assert (times.diff() >= 0).all()
    engine.runner.forward(ids[5:6], 5, [0])
    assert list(profile.latest.devices[0].labels) == labels
    engine.runner.steps.profile_gpus(False)
    seen = profile.latest
    engine.runner.forward(ids[6:7], 6, [0])
    assert profile.latest is seen
    assert engine.plan.devices["cuda:0"].gpu_timers is None
    engine.close()


def test_a_step_on_gpus_becomes_operations_and_routings() -> None:
    """Clocks by hand: the last mark of all GPUs, 1,450 there, is the step's end, 9,000 here."""
    ids = torch.tensor([[[0, 0], [0, 0]], [[0, 1], [3, 0]]], dtype=torch.int32)
    record = GpuRecord(
        num_rows=2,
        began_ns=8_000,
        ended_ns=9_000,
        devices=[
            GpuTimes(0, [("linear", 0), ("end", -1)], torch.tensor([1_000, 1_100]).numpy().tobytes()),
            GpuTimes(
                1,
                [("attention", 1), ("wait_cpu", 1), ("end", -1)],
                torch.tensor([1_100, 1_400, 1_450]).numpy().tobytes(),
            ),
        ],
        rows=[0, 1],
        experts=[GpuExpertCounts(4, {1: 2}, {2: ids.numpy().tobytes()}, b"")],
    )
    timed = [
        (PARTS[op["part"]], op["layer"], op["device"], op["begin_ns"], op["duration_ns"]) for op in gpu_ops(record)
    ]
    assert timed == [("linear", 0, 1, 8_550, 100), ("attention", 1, 2, 8_650, 300), ("wait_cpu", 1, 2, 8_950, 50)]
    (call,) = gpu_calls(record)
    assert (call.layer, call.counts.tolist()) == (1, [2, 1, 0, 1])
    assert (call.row_index.tolist(), call.ids.tolist()) == ([0, 1], [[0, 1], [3, 0]])


def test_a_step_that_is_not_timed_is_one_operation() -> None:
    record = GpuRecord(num_rows=1, began_ns=8_000, ended_ns=9_000, devices=[GpuTimes(0, [], b"")], rows=[], experts=[])
    (op,) = gpu_ops(record)
    assert (PARTS[op["part"]], op["layer"], op["begin_ns"], op["duration_ns"]) == ("gpu", -1, 8_000, 1_000)


def test_layers_with_other_numbers_of_experts_are_counted_apart() -> None:
    device = Device("cuda:0", torch.device("cpu"), torch.float32, is_gpu=True)
    few, many = device.expert_usage(2, 4), device.expert_usage(2, 6)
    few.note(0, torch.tensor([3, -1]), torch.tensor([[0, 1], [2, 3]]))
    many.note(1, torch.tensor([3, 4]), torch.tensor([[5, 1], [5, 6]]))
    for usage in device.usages:
        usage.fetch()
    assert few.counts.tolist() == [[1, 1, 0, 0], [0] * 4]
    assert many.counts.tolist() == [[0] * 6, [0, 1, 0, 0, 0, 2]]
    assert device.expert_usage(2, 4) is few

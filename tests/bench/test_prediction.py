"""The measurements behind predictions on tiny sizes, and `bench prediction` on a tiny shape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import pytest
from transformers import PretrainedConfig

from ktransformers.bench.probe import cpu as probe
from ktransformers.bench.probe import steps as probe_steps
from ktransformers.bench.probe.cpu import ProbeSizes, probe_cpu, thread_counts
from ktransformers.bench.probe.steps import FAMILIES, gpu_step_costs, step_costs
from ktransformers.cli import main
from ktransformers.config import EngineConfig
from ktransformers.kernels.cpu import WorkerPool, limits
from ktransformers.kernels.types import QuantType
from ktransformers.models import synthetic_shapes
from ktransformers.models.facts import ModelFacts
from ktransformers.models.synthetic_shapes import small_config
from ktransformers.optimize.machine_speed import CpuSpeed, Curve, MachineSpeed, StepCost
from tests.support.models.tiny_models import made_shape

TINY = ProbeSizes(
    read=2 << 20,
    experts=4,
    top_k=2,
    hidden=256,
    width=256,
    linear_bytes=1 << 18,
    linear_rows=(1, 4),
    tokens=(1, 4),
    context=192,
    types=(QuantType.Q4_K, QuantType.Q8_0),
    dense_types=(QuantType.F32,),
    has_steps=False,
)


@pytest.fixture(scope="module")
def tiny_speed() -> CpuSpeed:
    return probe_cpu(1, TINY)


def test_threads_double_up_to_all() -> None:
    assert [thread_counts(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_everything_is_measured(tiny_speed: CpuSpeed) -> None:
    assert list(tiny_speed.read) == [1]
    assert min(tiny_speed.read.values()) > 0
    assert set(tiny_speed.peaks) == {"int8", "bf16", "fp32"}
    assert list(tiny_speed.linear) == ["Q4_K", "Q8_0", "F32"]
    assert list(tiny_speed.experts) == ["Q4_K", "Q8_0"]
    assert set(tiny_speed.attention) == {"grouped", "latent"}
    curves = [*tiny_speed.linear.values(), *tiny_speed.experts.values(), *tiny_speed.attention.values()]
    assert all(min(curve.seconds) > 0 for curve in curves)
    assert tiny_speed.experts["Q4_K"].at[0] == 1.0


def test_a_busy_machine_leaves_types_out_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    found = probe_cpu(1, TINY, clock=iter(range(0, 10**6, 1000)).__next__)
    assert list(found.linear) == ["Q4_K"]
    assert "Q8_0, F32 were not measured" in caplog.text


def test_nodes_are_measured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [probe.ThreadPlace(0), probe.ThreadPlace(1), probe.ThreadPlace(1)]
    monkeypatch.setattr(probe, "thread_places", lambda cores: places)
    rates, by_node = probe.probe_read(3, 2 << 20)
    assert (list(rates), list(by_node)) == ([1, 2, 3], [0, 1])


def test_fp32_has_a_peak() -> None:
    pool = WorkerPool(1)
    try:
        assert limits.fp32_peak(pool, 1) > 0
    finally:
        pool.close()


@pytest.mark.parametrize("name", FAMILIES.values())
def test_small_models_keep_their_kind_of_layers(name: str) -> None:
    small, real = (ModelFacts.of(config) for config in (small_config(name, 2), synthetic_shapes.SHAPES[name].config(2)))
    assert [layer.kind for layer in small.layers] == [layer.kind for layer in real.layers]
    assert [layer.has_experts for layer in small.layers] == [layer.has_experts for layer in real.layers]
    assert small.hidden_size == 256


def test_costs_of_prompts_are_apart_from_those_of_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps whose layers take 2 s for each row, and 3 s once; what is launched takes twice as long."""

    def times(config: PretrainedConfig, _: EngineConfig, prompts: Sequence[int]) -> list[float]:
        layers = config.num_hidden_layers
        decode = [3.0 + 2.0 * rows * layers for rows in (1, 16)]
        return decode + [(2.0 if rows > 512 else 1.0) * (3.0 + 2.0 * rows * layers) for rows in prompts]

    monkeypatch.setattr(probe_steps, "_step_times", times)
    costs = gpu_step_costs(1, EngineConfig(), {"grouped": "qwen3-30b-a3b"}, launched=(1024, 2048))
    assert costs.decode["grouped"] == StepCost(Curve((1.0, 16.0), (2.0, 32.0)), Curve((1.0, 16.0), (3.0, 3.0)))
    assert costs.replayed["grouped"] == StepCost(Curve((32.0, 512.0), (64.0, 1024.0)), Curve((32.0, 512.0), (3.0, 3.0)))
    assert costs.launched["grouped"].layer == Curve((1024.0, 2048.0), (4096.0, 8192.0))
    assert costs.launched["grouped"].step.seconds == (6.0, 6.0)


def test_prediction_beside_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_speed: CpuSpeed
) -> None:
    shape = made_shape("gpt-oss-120b", 4, partial(small_config, "qwen3-30b-a3b"))
    monkeypatch.setitem(synthetic_shapes.SHAPES, "gpt-oss-120b", shape)  # a name that the command line knows
    costs = step_costs(1, families={"grouped": "qwen3-30b-a3b"})
    assert set(costs) == {"grouped"}
    cpu = CpuSpeed(**{name: getattr(tiny_speed, name) for name in CpuSpeed.__slots__} | {"steps": costs})
    speed = MachineSpeed(0.0, 0.0, cpu)
    monkeypatch.setattr("ktransformers.bench.probe.measuring.measure_machine", lambda sizes: speed)
    args = ("--shapes", "gpt-oss-120b", "--layers", "2", "--prefill", "8", "--decode", "1", "--prompt_len", "8")
    quick = ("--rounds", "1", "--max_new_tokens", "2", "--cpu_infer", "1", "--within", "100", "--no_use_cuda")
    assert main(["bench", "prediction", "--json", *args, *quick]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(row["phase"], row["tokens"]) for row in record["rows"]] == [("prefill", 8), ("decode", 1)]
    for row in record["rows"]:
        assert row["ratio"] == pytest.approx(row["predicted"] / row["measured"])
        assert sum(row["parts_ms"].values()) == pytest.approx(1e3 * row["tokens"] / row["predicted"])
    assert record["worst"] == max(abs(row["ratio"] - 1) for row in record["rows"])
    assert main(["bench", "prediction", "--json", *args, *quick, "--within", "0"]) == 1

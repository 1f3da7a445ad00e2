"""Predictions against sums worked out by hand, and what the file of a measurement remembers."""

from __future__ import annotations

import json
import logging
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from ktransformers.operators.experts.split import STEP_COST
from ktransformers.optimize.machine_speed import (
    CpuSpeed,
    Curve,
    GpuSpeed,
    MachineSpeed,
    SpeedFile,
    StepCost,
    best_of,
    machine_key,
    nearest_type,
)
from ktransformers.optimize.predict import CPU, GPU, LAUNCH, PCIE, RAM, predict_decode, predict_prefill
from ktransformers.optimize.step_load import AttentionLoad, ExpertLoad, LayerLoad, Matrix, StepLoad

FREE = StepCost(Curve((1.0,), (0.0,)), Curve((1.0,), (0.0,)))
COSTLY = StepCost(Curve((1.0, 16.0), (0.5, 2.0)), Curve((1.0,), (0.25,)))


def machine(cost: StepCost = FREE) -> MachineSpeed:
    """Ten bytes a second, whatever is multiplied, as long as it is with one row; with 11 rows, twice as slow."""
    curve = Curve((1.0, 11.0), (0.1, 0.2))
    cpu = CpuSpeed(
        threads=2,
        isa="avx2",
        read={1: 5.0, 2: 10.0},
        linear={"Q4_K": curve},
        experts={"Q4_K": curve},
        attention={"grouped": Curve((1.0,), (0.001,)), "latent": Curve((1.0,), (0.002,))},
        steps={"grouped": cost, "latent": cost, "sinks": cost},
    )
    fast = {"Q4_K": Curve((1.0,), (0.01,))}
    gpu = GpuSpeed("made up", 100.0, 1000.0, 50.0, 50.0, 0.0, 0.125, linear=fast, experts=fast, steps=cpu.steps)
    return MachineSpeed(0.0, 1.0, cpu, {"cuda:0": gpu})


def load(*layers: LayerLoad, head: float = 0.0) -> StepLoad:
    return StepLoad(layers, (Matrix("cpu", ("Q4_K",), head),) if head else ())


def test_a_curve_is_straight_between_points_and_behind_the_last() -> None:
    curve = Curve((1.0, 3.0, 5.0), (10.0, 20.0, 60.0))
    assert [curve.of(x) for x in (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)] == [10, 10, 15, 20, 40, 60, 80]
    assert Curve((1.0, 2.0), (4.0, 1.0)).of(9.0) == 0.0
    assert Curve((4.0,), (7.0,)).of(100.0) == 7.0
    for at, seconds in (((), ()), ((1.0, 1.0), (1.0, 1.0)), ((1.0,), (1.0, 2.0)), ((1.0,), (-1.0,))):
        with pytest.raises(ValueError, match="no curve"):
            Curve(at, seconds)


def test_weights_are_read_once_a_step_and_rows_cost_arithmetic() -> None:
    layer = LayerLoad(matrices=[Matrix("cpu", ("Q4_K",), 100.0)])
    one = predict_decode(load(layer, layer, head=50.0), machine())
    assert one.seconds == pytest.approx(25.0)
    assert one.tokens_per_s == pytest.approx(1 / 25.0)
    assert one.ranked()[0] == (RAM, pytest.approx(1.0))
    many = predict_decode(load(layer, layer, head=50.0), machine(), batch=11)
    assert many.seconds == pytest.approx(50.0)
    assert many.parts[RAM] == pytest.approx(25.0)
    assert many.parts[CPU] == pytest.approx(25.0)
    assert many.tokens_per_s == pytest.approx(11 / 50.0)


def test_experts_are_those_that_even_routing_touches() -> None:
    experts = ExpertLoad("cpu", "cpu", ("Q4_K",), 400.0, num_experts=4, top_k=1)
    layer = LayerLoad(experts=[experts])
    assert predict_decode(load(layer), machine()).seconds == pytest.approx(400.0 / 4 * 0.1)
    touched = 4 * (1 - 0.75**2)
    per_byte = 0.1 + 0.1 * (2 / touched - 1) / 10  # 2 rows over the touched ones, on the curve
    assert predict_decode(load(layer), machine(), batch=2).seconds == pytest.approx(touched * 100.0 * per_byte)


def test_a_prompt_goes_in_chunks_and_asks_for_logits_once() -> None:
    attention = AttentionLoad("cpu", "grouped", width=10, position_bytes=0, window=None)
    layer = LayerLoad(attention=attention)
    found = predict_prefill(load(layer, head=10.0), machine(), tokens=5, chunk_size=2)
    assert found.seconds == pytest.approx((1 + 2 + 3 + 4 + 5) * 10 * 0.001 + 10.0 * 0.1)
    short = LayerLoad(attention=replace(attention, window=2))
    found = predict_prefill(load(short, head=10.0), machine(), tokens=5, chunk_size=2)
    assert found.seconds == pytest.approx((1 + 2 + 2 + 2 + 2) * 10 * 0.001 + 10.0 * 0.1)


def test_latent_attention_has_a_time_of_its_own() -> None:
    latent = LayerLoad(attention=AttentionLoad("cpu", "latent", width=10, position_bytes=0, window=None))
    assert predict_decode(load(latent), machine(), context=99).seconds == pytest.approx(100 * 10 * 0.002)


def test_layers_and_steps_cost_something_themselves() -> None:
    assert predict_decode(load(LayerLoad(), LayerLoad()), machine(COSTLY)).parts == {LAUNCH: 1.25}
    assert predict_decode(load(LayerLoad()), machine(COSTLY), batch=100).parts == {LAUNCH: 2.25}


def test_shared_experts_elsewhere_run_beside_routed_ones() -> None:
    routed = ExpertLoad("cpu", "cpu", ("Q4_K",), 100.0, num_experts=1, top_k=1)
    shared = Matrix("cuda:0", ("Q4_K",), 300.0, is_shared=True)
    layer = LayerLoad(layer_device="cuda:0", matrices=[shared], experts=[routed])
    found = predict_decode(load(layer), machine())
    assert found.parts == {RAM: pytest.approx(10.0), LAUNCH: 0.125}  # 3 s on the GPU, meanwhile; and the hand-over
    same = replace(shared, device="cpu", nbytes=30.0)
    assert predict_decode(load(replace(layer, matrices=[same])), machine()).seconds == pytest.approx(13.125)


def test_streamed_experts_share_the_work_in_prefill_alone() -> None:
    experts = ExpertLoad("cpu", "cuda:0", ("Q4_K",), 100.0, num_experts=1, top_k=1)
    layer = LayerLoad(layer_device="cuda:0", experts=[experts])
    found = predict_prefill(load(layer), machine(), tokens=11, chunk_size=11)
    copy, alone = 100.0 / 50.0, 100.0 * 0.2
    assert found.parts[PCIE] == pytest.approx(1 / (1 / copy + 1 / alone) + STEP_COST)
    assert PCIE not in predict_decode(load(layer), machine(), batch=11).parts


def test_attention_on_a_gpu_multiplies_or_reads() -> None:
    layer = LayerLoad(layer_device="cuda:0", attention=AttentionLoad("cuda:0", "grouped", 10, 40, None))
    assert predict_decode(load(layer), machine(), context=99).seconds == pytest.approx(100 * 40 / 100.0)
    wide = replace(layer, attention=AttentionLoad("cuda:0", "grouped", 1000, 1, None))
    assert predict_decode(load(wide), machine(), context=99).parts[GPU] == pytest.approx(200.0 - 1.0)


def test_a_type_that_was_not_measured_has_a_stand_in_that_is_named() -> None:
    found = predict_decode(load(LayerLoad(matrices=[Matrix("cpu", ("IQ4_XS",), 10.0)])), machine())
    assert found.assumed == {"IQ4_XS": "Q4_K"}
    assert nearest_type("Q5_K", dict.fromkeys(("Q4_K", "Q6_K", "BF16"))) == "Q4_K"
    assert nearest_type("F16", dict.fromkeys(("Q4_K", "BF16"))) == "BF16"


def test_the_measurement_is_kept_for_this_user_and_this_machine(tmp_path: Path) -> None:
    speed, key = machine(COSTLY), {"cpu": "a", "cores": [0, 1]}
    file = SpeedFile(key, tmp_path)
    assert file.read() is None
    assert file.write(speed)
    assert SpeedFile(dict(reversed(key.items())), tmp_path).read() == speed
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    for other in ({**key, "cores": [0]}, {**key, "cpu": "b"}, {**key, "version": "2"}):
        assert SpeedFile(other, tmp_path).read() is None


def test_a_damaged_measurement_is_none_and_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = SpeedFile({}, tmp_path)
    file.write(machine())
    whole = json.loads(file.path.read_text())
    for damaged in ("", "{", "[]", json.dumps({**whole, "speed": {"cpu": 1}}), json.dumps({"key": whole["key"]})):
        file.path.write_text(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert file.read() is None
        assert len(caplog.records) == 1
        assert "doctor --measure" in caplog.text
    file.path.write_text(json.dumps({**whole, "key": "another"}))
    assert file.read() is None
    blocked = SpeedFile({}, tmp_path / "file")
    (tmp_path / "file").write_text("")
    assert not blocked.write(machine())


def test_of_two_measurements_the_faster_points_count() -> None:
    one, other = machine(COSTLY), machine(FREE)
    slow = replace(one.cpu, linear={"Q4_K": Curve((1.0, 11.0), (0.05, 0.3))}, read={1: 6.0, 2: 9.0})
    both = best_of(one, replace(other, cpu=replace(slow, steps=other.cpu.steps)))
    assert both.cpu.linear["Q4_K"] == Curve((1.0, 11.0), (0.05, 0.2))
    assert both.cpu.read == {1: 6.0, 2: 10.0}
    assert both.cpu.steps["latent"].step.seconds == (0.0,)
    assert best_of(one, one) == one
    more = replace(one, cpu=replace(one.cpu, experts={"Q6_K": Curve((1.0,), (1.0,))}))
    assert set(best_of(one, more).cpu.experts) == {"Q4_K", "Q6_K"}


def test_the_key_names_gpus_without_asking_cuda(tmp_path: Path) -> None:
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   1\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal:       100 kB\n")
    key = machine_key(tmp_path)
    assert (key["gpus"], key["memory"]) == (["NVIDIA H200"], "100 kB")
    assert machine_key(tmp_path / "nothing")["gpus"] == []


def on_gpu(**more: object) -> MachineSpeed:
    known = machine()
    return replace(known, gpus={"cuda:0": replace(known.gpus["cuda:0"], **more)})  # type: ignore[arg-type]


def test_a_prompt_takes_as_long_as_its_kernels_or_as_whoever_launches_them() -> None:
    layer = LayerLoad(layer_device="cuda:0", matrices=[Matrix("cuda:0", ("Q4_K",), 100.0)])
    slow = StepCost(Curve((1.0, 3.0), (2.0, 4.0)), Curve((1.0,), (0.5,)))
    speed = on_gpu(launches={"grouped": slow})
    assert predict_prefill(load(layer, layer), on_gpu(), 2, 2).seconds == pytest.approx(2.0)
    launched = predict_prefill(load(layer, layer), speed, 2, 2)
    assert launched.parts == {LAUNCH: pytest.approx(2 * 3.0 + 0.5)}
    assert predict_prefill(load(layer, layer), speed, 4, 2).seconds == pytest.approx(2 * 6.5)
    assert predict_decode(load(layer, layer), speed).seconds == pytest.approx(2.0)  # replayed
    long = LayerLoad(layer_device="cuda:0", matrices=[Matrix("cuda:0", ("Q4_K",), 1000.0)])
    assert predict_prefill(load(long, long), speed, 2, 2).seconds == pytest.approx(20.0)


def test_a_replayed_prompt_takes_its_kernels_and_what_such_a_step_costs() -> None:
    layer = LayerLoad(layer_device="cuda:0", matrices=[Matrix("cuda:0", ("Q4_K",), 100.0)])
    slow = StepCost(Curve((1.0,), (9.0,)), Curve((1.0,), (0.5,)))
    replayed = StepCost(Curve((2.0, 4.0), (0.25, 0.75)), Curve((2.0,), (0.125,)))
    speed = on_gpu(launches={"grouped": slow}, replayed={"grouped": replayed}, replayed_rows=3)
    short = predict_prefill(load(layer, layer), speed, 3, 3)
    assert short.seconds == pytest.approx(2 * (1.0 + 0.5) + 0.125)
    assert short.parts[LAUNCH] == pytest.approx(2 * 0.5 + 0.125)
    assert predict_prefill(load(layer, layer), speed, 4, 4).seconds == pytest.approx(2 * 9.0 + 0.5)
    assert predict_decode(load(layer, layer), speed).seconds == pytest.approx(2.0)
    experts = ExpertLoad("cuda:0", "cpu", ("Q4_K",), 0.0, num_experts=1, top_k=1)
    streamed = LayerLoad(layer_device="cuda:0", matrices=layer.matrices, experts=[replace(experts, device="cpu")])
    assert predict_prefill(load(layer, streamed), speed, 3, 3).parts[LAUNCH] == pytest.approx(2 * 9.0 + 0.5)


def test_attention_on_a_gpu_takes_what_its_kernels_were_measured_to_take() -> None:
    layer = LayerLoad(layer_device="cuda:0", attention=AttentionLoad("cuda:0", "grouped", 10, 1, None))
    assert predict_decode(load(layer), on_gpu(), context=99).seconds == pytest.approx(2 * 100 * 10 / 1000.0)
    speed = on_gpu(attention={"grouped": Curve((1.0, 4.0), (0.01, 0.04))})
    assert predict_decode(load(layer), speed, context=99).seconds == pytest.approx(100 * 10 * 0.01)
    assert predict_decode(load(layer), speed, batch=4, context=99).seconds == pytest.approx(4 * 100 * 10 * 0.04)
    assert predict_decode(load(layer), speed, batch=5, context=99).seconds == pytest.approx(5 * 100 * 10 * 2 / 1000.0)

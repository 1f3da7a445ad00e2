"""How room on GPUs is divided between whole layers and slots for experts, on shapes of published models."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Hardware
from ktransformers.engine.model.fingerprint import ModelDigests
from ktransformers.engine.model.hot_file import HotFile
from ktransformers.engine.model.opened import OpenedModel, open_synthetic
from ktransformers.engine.plan.cache_plan import CachePlan
from ktransformers.engine.plan.dry_run import dry_run
from ktransformers.engine.plan.planned import Planned
from ktransformers.engine.plan.planning import Planner
from ktransformers.models.synthetic_shapes import find_shape
from ktransformers.optimize.hot_slots import HOT_EXPERTS, LearnedPicks, whole_layers
from ktransformers.optimize.machine import Machine
from tests.support.engines.fake_gpus import GIB, fake_hardware
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, rules_of

pytest.importorskip("triton")

LAYERS, EXPERTS, TOP_K = 48, 128, 8  # of Qwen3-30B-A3B


def machine(ram: float, *gpus: float) -> Hardware:
    """GiB of RAM and of GPUs."""
    devices = {"cpu": int(ram * GIB), **{f"cuda:{i}": int(gpu * GIB) for i, gpu in enumerate(gpus)}}
    return replace(fake_hardware(len(gpus)), machine=Machine(devices["cpu"], devices["cpu"], devices))


def qwen(**flags: object) -> OpenedModel:
    return open_synthetic(EngineConfig(cache_lens=2048, **flags), find_shape("qwen3-30b-a3b").config())  # type: ignore[arg-type]


def planned(opened: OpenedModel, hardware: Hardware) -> Planned:
    return Planner(opened, None, CachePlan.of(opened)).plan(hardware)[0]


def on_gpu(plan: Planned) -> float:
    """Experts in video memory, in layers."""
    return len(plan.filling.moved) + sum(sum(hot.slots.values()) for hot in plan.hots) / EXPERTS


@pytest.mark.parametrize("gib", [6, 10, 16])
def test_even_routing_finds_as_many_experts_there_as_in_whole_layers(gib: int) -> None:
    """And hand-overs are no more than what 2 % of a step allow, by this test's own sum."""
    hardware = machine(64, gib)
    auto, off = planned(qwen(), hardware), planned(qwen(hot_experts="off"), hardware)
    assert auto.plan.misfit() is None
    assert not off.hots
    assert off.filling.moved
    assert on_gpu(auto) > on_gpu(off) - 0.25  # maps and the last part of a slot; whole layers leave part of one free
    more = len(off.filling.moved) - len(auto.filling.moved)
    assert more > 0
    (hot,) = auto.hots
    assert set(hot.slots) & set(auto.filling.moved) == set()
    assert len(hot.slots) + len(auto.filling.moved) == LAYERS
    assert max(hot.slots.values()) - min(hot.slots.values()) <= 1
    read = TOP_K * max(hot.expert_nbytes.values())
    step = 1.1e-3 + LAYERS * 50e-6 + (LAYERS - len(off.filling.moved)) * (42e-6 + read / 100e9)
    assert more * (42e-6 - 12e-6 - read / 1.5e12) < 0.025 * step


def test_off_is_whole_layers_from_the_last_one() -> None:
    off = planned(qwen(hot_experts="off"), machine(64, 10))
    numbers = sorted(int(key.split(".")[2]) for key in off.filling.moved)
    assert numbers == list(range(LAYERS - len(numbers), LAYERS))
    assert HOT_EXPERTS not in off.plan.extra_bytes
    assert off.plan.slots == {}


def test_it_is_the_default_and_all_experts_go_whole_where_they_fit() -> None:
    assert EngineConfig().hot_experts == "auto"
    plan = planned(qwen(), machine(64, 40))
    assert len(plan.filling.moved) == LAYERS
    assert not plan.hots


def test_more_layers_go_whole_where_ram_is_short() -> None:
    """Slots need their experts in RAM as well."""
    roomy = planned(qwen(), machine(64, 12))
    need = roomy.plan.total_bytes["cpu"] / GIB
    tight = planned(qwen(), machine(need - 2, 12))
    assert tight.plan.misfit() is None
    assert len(tight.filling.moved) > len(roomy.filling.moved)
    assert tight.hots
    least = planned(qwen(hot_experts="off"), machine(64, 12)).plan.total_bytes["cpu"] / GIB
    assert planned(qwen(), machine(least + 0.01, 12)).plan.misfit() is None


def test_too_little_for_slots_is_left_to_whole_layers(caplog: pytest.LogCaptureFixture) -> None:
    off = planned(qwen(hot_experts="off"), machine(64, 16))
    one = max(entry.nbytes["cuda:0"] for entry in off.plan.entries if entry.key in off.filling.moved)
    room = (off.plan.total_bytes["cuda:0"] - (len(off.filling.moved) - 1) * one) / GIB
    caplog.set_level(logging.INFO)
    found = planned(qwen(), machine(64, room))
    assert not found.hots
    assert len(found.filling.moved) == len(planned(qwen(hot_experts="off"), machine(64, room)).filling.moved)
    assert "hot experts get no slots on cuda:0" in caplog.text


def test_a_rule_file_keeps_its_layers_and_gets_slots_beside(tmp_path: Path) -> None:
    rules = rules_of("qwen3_moe", tmp_path, EXPERTS_ON_CPU, EXPERTS_ON_CPU)
    plan = planned(qwen(optimize_config_path=rules), machine(64, 10))
    assert not plan.filling.moved
    (hot,) = plan.hots
    assert len(hot.slots) == LAYERS
    without = planned(qwen(optimize_config_path=rules, hot_experts="off"), machine(64, 10))
    assert HOT_EXPERTS not in without.plan.extra_bytes


def test_every_gpu_has_slots_by_what_it_has_left() -> None:
    """Layers are spread by free memory, and each GPU's pool takes what its layers leave."""
    hardware = machine(64, 6, 9)
    plan = planned(qwen(), hardware)
    assert plan.plan.misfit() is None
    assert [hot.device for hot in plan.hots] == ["cuda:0", "cuda:1"]
    for hot in plan.hots:
        left = hardware.machine.devices[hot.device] - plan.plan.total_bytes[hot.device]
        assert 0 <= left < 2 * max(hot.expert_nbytes.values())
    assert plan.plan.extra_bytes[HOT_EXPERTS] == {hot.device: hot.nbytes for hot in plan.hots}
    one, two = (
        sum(hot.slots.values()) + EXPERTS * list(plan.filling.moved.values()).count(hot.device) for hot in plan.hots
    )
    assert one < two < 2.5 * one
    assert plan.expert_bytes_on_cpu < planned(qwen(), machine(64, 9)).expert_bytes_on_cpu


@pytest.mark.parametrize(
    ("fitting", "layers", "read", "want"),
    [
        (48, 48, 20_000_000, 48),  # nothing is left to the CPU
        (20, 61, 200_000_000, 0),  # DeepSeek-V3: reading experts is nearly all of a step
        (0, 48, 20_000_000, 0),
        (47, 48, 20_000_000, 44),  # 87 us of loss are allowed of 4.34 ms, at 23 us a hand-over
    ],
)
def test_how_many_layers_go_whole(fitting: int, layers: int, read: int, want: int) -> None:
    assert whole_layers(fitting, layers, read) == want


def test_more_layers_have_slots_where_few_experts_were_picked() -> None:
    """By hand: of the 4 experts of a layer one has all picks. The room of one layer holds those of three others."""
    learned = LearnedPicks.of([np.array([8.0, 0.0, 0.0, 0.0]), np.array([0.0, 0.0, 2.0, 0.0])])
    assert learned is not None
    assert [learned.hits(share) for share in (0.0, 1 / 8, 1 / 4, 1.0)] == [0.0, 0.5, 1.0, 1.0]
    assert whole_layers(6, 8, 20_000_000, learned) == 5
    even = LearnedPicks.of([np.ones(4)] * 3)
    assert whole_layers(6, 8, 20_000_000, even) == 6  # slots would serve no more, and have more hand-overs
    assert LearnedPicks.of([]) is None
    assert LearnedPicks.of([np.zeros(4)]) is None
    assert LearnedPicks.of([np.ones(4), np.ones(3)]) is None


def test_plans_know_what_was_learned_of_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    opened, hardware = qwen(), machine(64, 10)
    before = planned(opened, hardware)
    scores = np.concatenate([np.full(16, 100.0), np.ones(EXPERTS - 16)])
    HotFile(ModelDigests.of(opened)).add(dict.fromkeys(range(LAYERS), scores))
    after = planned(qwen(), hardware)
    (hot,) = after.hots  # no more slots than hold what is picked nearly always, and the rest of the room whole layers
    assert 16 * len(hot.slots) < sum(hot.slots.values()) < 24 * len(hot.slots)
    assert len(after.filling.moved) > len(before.filling.moved)
    assert on_gpu(after) > on_gpu(before) - 0.25


def test_slots_are_in_what_a_step_reads() -> None:
    """The bound and the prediction count an expert as read where it lies, as often as even routing has it."""
    auto, off = dry_run(qwen(), machine(64, 10)), dry_run(qwen(hot_experts="off"), machine(64, 10))
    share = sum(share for _, share in auto.plan.slots.values())
    whole = [entry for entry in auto.plan.entries if entry.operator == "KTransformersExperts"]
    assert {device for device, _ in auto.plan.slots.values()} == {"cuda:0"}
    reads = [preview.summary.reads.bytes_per_token() for preview in (auto, off)]
    assert 0.95 * reads[1]["cpu"] < reads[0]["cpu"] <= reads[1]["cpu"]  # what whole layers leave free is used as well
    layers = [layer.experts for layer in auto.summary.load.layers]
    slotted = [[(one.device, one.share) for one in experts] for experts in layers if len(experts) == 2]
    assert len(slotted) == len(auto.plan.slots) < len(whole)
    assert sum(one[1][1] for one in slotted) == pytest.approx(share)
    assert all(abs(sum(part for _, part in one) - 1.0) < 1e-9 for one in slotted)
    assert all([device for device, _ in one] == ["cpu", "cuda:0"] for one in slotted)

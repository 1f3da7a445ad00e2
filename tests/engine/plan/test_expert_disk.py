"""Plans whose experts stay in files: when, how much RAM their slots get, and what is said."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Hardware, plan_model
from ktransformers.engine.model.opened import OpenedModel, open_model, open_synthetic
from ktransformers.engine.plan.dry_run import dry_run
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.models.synthetic_shapes import find_shape
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.expert_slots import CHUNK_FROM_DISK, EXPERT_SLOTS, on_gpus
from ktransformers.optimize.machine import Machine
from ktransformers.optimize.plan import Plan
from ktransformers.optimize.summary import parts_of
from ktransformers.server.multi_model.needs import ToPlan, pinned, plan_needs
from tests.support.engines.fake_gpus import GIB, fake_hardware
from tests.support.gguf.writer import write_gguf
from tests.support.models.tiny_models import tiny_model, write_safetensors

RESERVE, SHARE = 512 << 20, 1 / 16


def machine(ram: int, *gpus: int) -> Hardware:
    """Bytes of RAM and of GPUs."""
    devices = {"cpu": ram, **{f"cuda:{i}": gpu for i, gpu in enumerate(gpus)}}
    return replace(fake_hardware(max(len(gpus), 1)), machine=Machine(ram, ram, devices))


def shape(name: str = "qwen3-30b-a3b", **flags: object) -> OpenedModel:
    config = EngineConfig(**flags)  # type: ignore[arg-type]
    return open_synthetic(config, find_shape(name).config(), stands_for_files=True)


def planned(opened: OpenedModel, hardware: Hardware) -> Plan:
    return plan_model(opened.config, opened, hardware)


def slots_of(plan: Plan) -> int:
    return plan.extra_bytes.get(EXPERT_SLOTS, {}).get("cpu", 0)


def test_auto_is_all_in_ram_where_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    plan = planned(shape(), machine(64 * GIB))
    assert (plan.stored_experts, slots_of(plan)) == (0, 0)
    assert "disk" not in caplog.text


def test_auto_reads_from_the_disk_what_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    opened, ram = shape(), 12 * GIB
    plan = planned(opened, machine(ram))
    assert plan.misfit() is None
    experts = sum(entry.stored_experts for entry in plan.entries)
    assert plan.stored_experts == experts > ram
    rest = plan.total_bytes["cpu"] - slots_of(plan)
    assert slots_of(plan) == ram - rest - RESERVE - int(SHARE * ram)
    (line,) = [record.getMessage() for record in caplog.records if "on the disk" in record.getMessage()]
    assert line.endswith("(docs/disk.md)")
    assert {entry.note for entry in plan.entries if entry.stored_experts} == {"on the disk, those used most in RAM"}
    found = {(part.name, part.devices): part.nbytes for part in parts_of(plan, dict.fromkeys(_experts(plan), 128))}
    assert found["experts", ("files",)] == experts
    assert found[EXPERT_SLOTS, ("cpu",)] == slots_of(plan)


def _experts(plan: Plan) -> list[str]:
    return [key for key, operator in plan.operators.items() if isinstance(operator, KTransformersExperts)]


def test_what_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    large = planned(shape(experts_from="disk"), machine(64 * GIB))
    assert slots_of(large) == large.stored_experts
    some = planned(shape(experts_from="disk", experts_ram=3.5), machine(64 * GIB))
    assert slots_of(some) == int(3.5 * GIB)
    least = planned(shape(experts_from="disk", experts_ram=1e-6), machine(64 * GIB))
    records = Counter(entry.stored_experts // 128 for entry in least.entries if entry.stored_experts)
    (nbytes,) = records
    # Of 3.1 MB: the 8 of a token, and twice 10 (32 MiB) that are read meanwhile.
    assert slots_of(least) == (8 + 20) * nbytes
    over = planned(shape(experts_ram=30.0), machine(8 * GIB))
    assert over.misfit() is not None
    ram = planned(shape(experts_from="ram"), machine(12 * GIB))
    assert ram.misfit() is not None
    assert ram.stored_experts == 0


def test_flags_that_make_it_fit_are_offered() -> None:
    ram = dry_run(shape(experts_from="ram"), machine(12 * GIB))
    assert ram.fit_suggestions is not None
    assert ("--experts_from auto", True) in [(one.flag, one.is_enough) for one in ram.fit_suggestions.each]
    over = dry_run(shape(experts_from="disk", experts_ram=15.0), machine(12 * GIB))
    assert over.fit_suggestions is not None
    assert ("--experts_ram 0", True) in [(one.flag, one.is_enough) for one in over.fit_suggestions.each]


def test_chunks_are_long_for_each_reads_all() -> None:
    assert dry_run(shape(), machine(12 * GIB)).summary.chunk_size == CHUNK_FROM_DISK
    assert dry_run(shape(chunk_size=64), machine(12 * GIB)).summary.chunk_size == 64
    assert dry_run(shape(), machine(64 * GIB)).summary.chunk_size == 512


def test_with_a_gpu_three_tiers_and_no_streaming(caplog: pytest.LogCaptureFixture) -> None:
    """Reading from the disk is so slow that no whole layer is worth it; RAM is for those that have no slot there."""
    caplog.set_level(logging.INFO)
    plan = planned(shape(), machine(8 * GIB, 8 * GIB))
    assert plan.misfit() is None
    stored = [entry for entry in plan.entries if entry.stored_experts]
    whole = [key for key in _experts(plan) if plan.device_of(key) == "cuda:0"]
    assert len(stored) == 48
    assert not whole
    assert plan.extra_bytes["hot experts"]["cuda:0"] > GIB
    assert 0 < on_gpus(plan) <= plan.extra_bytes["hot experts"]["cuda:0"]
    assert slots_of(plan) < plan.stored_experts - on_gpus(plan)
    assert not plan.extra_bytes.get("expert staging")
    assert "the CPU computes those without a slot on a GPU, in long prompts all" in caplog.text
    more = planned(shape(experts_from="disk"), machine(64 * GIB, 8 * GIB))
    assert slots_of(more) == more.stored_experts - on_gpus(more)


def test_slots_on_a_gpu_as_asked() -> None:
    for number, count in (("4", 4), ("off", 0)):
        plan = planned(shape(experts_from="disk", hot_experts=number), machine(8 * GIB, 8 * GIB))
        stored = [entry for entry in plan.entries if entry.stored_experts]
        assert on_gpus(plan) == sum(count * entry.stored_experts // 128 for entry in stored)
        assert len(stored) < 48  # whole layers have the rest


def test_contradictions_are_refused() -> None:
    for flags, text in (
        ({"experts_from": "ram", "experts_ram": 3.0}, "--experts_ram is for slots"),
        ({"experts_from": "disk", "pipeline": 2}, "is for one process"),
        ({"experts_from": "disk", "tensor_parallel": 2}, "is for one process"),
        ({"experts_from": "tape"}, "is not one of auto, ram, disk"),
        ({"experts_ram": -1.0}, "--experts_ram must be between 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            EngineConfig(**flags).resolved(needs_model=False)  # type: ignore[arg-type]


def test_a_model_that_is_made_up_has_no_files() -> None:
    config = EngineConfig(experts_from="disk")
    with pytest.raises(UnsupportedError, match="made up in memory"):
        planned(open_synthetic(config, find_shape("qwen3-30b-a3b").config()), machine(64 * GIB))


def test_files_that_need_a_conversion_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With auto it is a warning, and the plan is that of all in RAM."""
    folder = write_safetensors(tiny_model("qwen3_moe", hidden=256), tmp_path)
    opened = open_model(EngineConfig(model_path=folder, cache_lens=64, cpu_quant="q4_0"))
    all_in_ram = planned(opened, machine(GIB))
    plan = planned(opened, machine(all_in_ram.total_bytes["cpu"] - 1))
    assert plan.misfit() is not None
    assert "ktransformers pack MODEL" in caplog.text


def test_models_beside_each_other_take_what_was_planned(tmp_path: Path) -> None:
    write_gguf(tiny_model("qwen3_moe", hidden=256), tmp_path / "model.gguf", QuantType.Q4_K, QuantType.Q8_0)
    config = EngineConfig(gguf_path=tmp_path / "model.gguf", cache_lens=64)
    needs = plan_needs(ToPlan(config))
    assert (needs.expert_slots, pinned(config, needs).experts_from) == (0, "ram")
    needs = plan_needs(ToPlan(replace(config, experts_from="disk", experts_ram=1e-6)))
    made = pinned(config, needs)
    assert (made.experts_from, int(made.experts_ram * GIB)) == ("disk", needs.expert_slots)
    assert plan_needs(ToPlan(made)).nbytes == needs.nbytes

"""Where a tower goes, what the plan says of it, and engines that have one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import PretrainedConfig

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Hardware, build_engine, plan_model
from ktransformers.engine.media.encoder import FEATURE_BYTES, TowerEncoder
from ktransformers.engine.media.family import PictureFamily
from ktransformers.engine.model.opened import OpenedModel, open_model
from ktransformers.engine.plan.tower_plan import PICTURES, PLANNED_PIXELS, TOWER, PlannedTower, with_tower
from ktransformers.errors import CapacityError, TensorMismatchError
from ktransformers.operators.exact import NativeMathMode
from ktransformers.optimize.plan import Plan, PlanEntry
from tests.support.engines.fake_gpus import GIB, fake_hardware
from tests.support.pictures.towers import IMAGE_TOKEN, heard, picture, save_picture, tiny_with_tower

EXPERT_BYTES = 10 * GIB
DIGEST = bytes(range(32))
GPU = "cuda:0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_vl_moe")
    model = tiny_with_tower("qwen3_vl_moe", seed=1)
    model.save_pretrained(path)
    save_picture(path, DIGEST, picture("qwen3_vl_moe", model, 2, 3))
    return path


def config_of(folder: Path, **settings: object) -> EngineConfig:
    where = {"model_path": folder, "picture_folder": folder}
    return EngineConfig(cache_lens=64, cpu_infer=1, **{**where, **settings})  # type: ignore[arg-type]


def planned(opened: OpenedModel, hardware: Hardware) -> Plan:
    return plan_model(opened.config, opened, hardware)


def test_its_bytes_are_lines_of_the_plan(folder: Path) -> None:
    opened = open_model(config_of(folder, use_cuda=False))
    assert opened.tower is not None
    plan = planned(opened, fake_hardware().without_gpus())
    count = sum(parameter.numel() for parameter in opened.tower.model.parameters())
    assert plan.extra_bytes[TOWER] == {"cpu": 4 * count}
    blocks = opened.tower.model.model.visual.blocks
    block = sum(parameter.numel() for parameter in blocks[0].parameters())
    mergers = opened.tower.model.model.visual.deepstack_merger_list
    merger = sum(parameter.numel() for parameter in mergers[0].parameters())
    rest = count - 3 * block - 2 * merger
    rows, width = PLANNED_PIXELS // 16**2, 128 + 128  # of a merger's first matrix
    activations = 2 * rows * width
    assert plan.extra_bytes[PICTURES] == {"cpu": 4 * (rest + 3 * max(block, merger) + activations) + FEATURE_BYTES}
    without = planned(open_model(replace(opened.config, picture_folder=None)), fake_hardware().without_gpus())
    assert {TOWER, PICTURES} & without.extra_bytes.keys() == set()


def test_what_does_not_fit_is_refused_with_its_line(folder: Path) -> None:
    hardware = fake_hardware().without_gpus()
    machine = replace(hardware.machine, available_bytes=FEATURE_BYTES, devices={"cpu": FEATURE_BYTES})
    with pytest.raises(CapacityError, match=r"cpu: weights .* \+ tower .* \+ pictures "):
        build_engine(config_of(folder), hardware=replace(hardware, machine=machine))


@pytest.mark.parametrize(
    ("tower_device", "room", "place"),
    [
        ("auto", "all", "cuda:0"),
        ("auto", "work", "cuda:0, with weights from RAM"),
        ("auto", "none", "cpu"),
        ("cpu", "all", "cpu"),
        ("cuda", "all", "cuda:0"),
        ("cuda", "none", "cuda:0, with weights from RAM"),
    ],
)
def test_places(folder: Path, tower_device: str, room: str, place: str) -> None:
    """Whole on a GPU where experts lose nothing by it, streamed where its work has room."""
    opened = open_model(config_of(folder, tower_device=tower_device))
    assert opened.tower is not None
    plan = replace(planned(opened, fake_hardware()), extra_bytes={})
    plan = replace(plan, entries=tuple(_with_experts_on_cpu(entry) for entry in plan.entries))
    used = plan.total_bytes[GPU]

    def found(left: int) -> PlannedTower:
        machine = replace(plan.machine, devices={**plan.machine.devices, GPU: used + left})
        tower = with_tower(replace(plan, machine=machine), opened.tower, opened.config)[1]
        assert tower is not None
        return tower

    left = {"all": 2 * GIB + EXPERT_BYTES, "work": 2 * GIB, "none": 1 << 10}[room]
    assert str(found(left).place) == place


def _with_experts_on_cpu(entry: PlanEntry) -> PlanEntry:
    return replace(entry, nbytes={"cpu": EXPERT_BYTES}) if entry.key.endswith("layers.1.mlp.experts") else entry


def test_an_engine_with_a_tower(folder: Path) -> None:
    model = tiny_with_tower("qwen3_vl_moe", seed=1)
    engine = build_engine(config_of(folder, use_cuda=False))
    try:
        assert isinstance(engine.pictures, TowerEncoder)
        assert engine.executor.pictures is engine.pictures
        got = engine.pictures.features(DIGEST)
        with NativeMathMode(engine.pool):
            want = heard(model, [IMAGE_TOKEN] * 6, **picture("qwen3_vl_moe", model, 2, 3))
        assert torch.equal(got.hidden, want["inputs_embeds"][0])
    finally:
        engine.close()


def test_its_family_is_asked_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which makes masks of a whole config: not before its weights are read and again behind that."""
    asked, of = list[object](), PictureFamily.of

    def ask(config: PretrainedConfig) -> PictureFamily:
        asked.append(config)
        return of(config)

    monkeypatch.setattr(PictureFamily, "of", ask)
    engine = build_engine(config_of(folder, use_cuda=False))
    try:
        assert engine.pictures is not None
        assert len(asked) == 1
    finally:
        engine.close()


def test_on_a_gpu(folder: Path) -> None:
    model = tiny_with_tower("qwen3_vl_moe", seed=1)
    engine = build_engine(config_of(folder, tower_device="cuda"), hardware=fake_hardware())
    try:
        assert engine.pictures is not None
        got = engine.pictures.features(DIGEST)
        want = heard(model, [IMAGE_TOKEN] * 6, **picture("qwen3_vl_moe", model, 2, 3))["inputs_embeds"][0]
        assert (got.hidden - want).abs().max() <= 1e-5 * want.abs().max()
    finally:
        engine.close()


def test_an_engine_without_pictures_loads_no_tower(folder: Path) -> None:
    engine = build_engine(config_of(folder, use_cuda=False, picture_folder=None))
    try:
        assert engine.pictures is None
    finally:
        engine.close()


def test_a_part_of_a_tower_ends_the_load(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    del stored[next(name for name in stored if "visual.merger" in name)]
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(TensorMismatchError, match=r"visual\.merger\.\S+ is missing"):
        build_engine(config_of(tmp_path, use_cuda=False))

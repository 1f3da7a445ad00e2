"""What would make a model fit: every remedy is planned again, by the planner itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ktransformers.bench.common.bandwidth import BandwidthFile, bandwidths
from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Hardware, plan_model
from ktransformers.engine.model.opened import OpenedModel, open_model, open_synthetic
from ktransformers.engine.plan.dry_run import DryRun, dry_run
from ktransformers.engine.plan.fit_suggestions import needed_bits
from ktransformers.errors import EngineError
from ktransformers.models.synthetic_shapes import find_shape
from ktransformers.optimize.machine import Machine
from tests.support.engines.fake_gpus import GIB, fake_hardware
from tests.support.models.tiny_models import tiny_model, write_safetensors


def machine(ram: float, *gpus: float) -> Hardware:
    """GiB of RAM and of GPUs."""
    devices = {"cpu": int(ram * GIB), **{f"cuda:{i}": int(gpu * GIB) for i, gpu in enumerate(gpus)}}
    return replace(fake_hardware(max(len(gpus), 1)), machine=Machine(devices["cpu"], devices["cpu"], devices))


def qwen(**flags: object) -> OpenedModel:
    return open_synthetic(EngineConfig(**flags), find_shape("qwen3-30b-a3b").config())  # type: ignore[arg-type]


def check_each(opened: OpenedModel, hardware: Hardware, preview: DryRun) -> None:
    """What every remedy says is what a plan with it says."""
    assert preview.fit_suggestions is not None
    for remedy in preview.fit_suggestions.each:
        there = hardware.without_gpus() if remedy.config.use_cuda is False else hardware
        again = plan_model(remedy.config, replace(opened, config=remedy.config), there)
        assert (again.misfit() is None) == remedy.is_enough, remedy.flag
        if len(hardware.machine.devices) == 1:
            assert remedy.saves == preview.plan.total_bytes["cpu"] - again.total_bytes["cpu"]
    joined = plan_model(
        preview.fit_suggestions.config, replace(opened, config=preview.fit_suggestions.config), hardware
    )
    assert (joined.misfit() is None) == preview.fit_suggestions.are_enough


def test_what_fits_needs_no_remedy() -> None:
    preview = dry_run(qwen(), machine(64))
    assert preview.fit_suggestions is None
    assert preview.summary.cache_tokens == 8192


def test_the_mildest_flags_that_fit() -> None:
    opened, hardware = qwen(), machine(19.9)
    preview = dry_run(opened, hardware)
    assert preview.fit_suggestions is not None
    remedy, narrower = preview.fit_suggestions.each
    assert (remedy.flag, remedy.is_enough) == ("--cache_lens 4096", True)
    assert (narrower.flag, narrower.is_enough) == ("--kv_type bf16", True)
    assert (
        remedy.saves == narrower.saves == 4096 * 48 * 4 * 2 * 4 * 128
    )  # layers, bytes, keys and values, KV heads of 128
    check_each(opened, hardware, preview)


def test_nothing_helps_where_the_weights_alone_are_too_large() -> None:
    opened, hardware = qwen(), machine(10)
    preview = dry_run(opened, hardware)
    assert preview.fit_suggestions is not None
    assert not preview.fit_suggestions.are_enough
    check_each(opened, hardware, preview)
    cache = sum(preview.plan.extra_bytes["kv cache"].values())
    assert needed_bits(preview.plan, 1000) == 8 * (10 * GIB - cache) / 1000


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("flags", "gpus", "wanted"),
    [
        ({"use_cuda": True}, (1.5,), {"--cache_lens 1024", "--no_use_cuda"}),
        (
            {"use_cuda": True, "gpu_memory": 2.0},
            (24.0,),
            {"--cache_lens 2048", "--kv_type int8", "--gpu_memory 0", "--no_use_cuda"},
        ),
        ({"use_cuda": True, "chunk_size": 16384, "cache_lens": 512}, (2.0,), {"--chunk_size 2048", "--no_use_cuda"}),
    ],
)
def test_remedies_of_a_gpu(flags: dict[str, object], gpus: tuple[float, ...], wanted: set[str]) -> None:
    opened, hardware = qwen(**flags), machine(64, *gpus)
    preview = dry_run(opened, hardware)
    assert preview.fit_suggestions is not None
    assert wanted == {remedy.flag for remedy in preview.fit_suggestions.each if remedy.is_enough}
    check_each(opened, hardware, preview)


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("qwen3_moe", hidden=256, max_position_embeddings=4096)
    return write_safetensors(model, tmp_path_factory.mktemp("plain"))


def test_experts_can_be_quantized(unquantized: Path) -> None:
    opened = open_model(EngineConfig(model_path=unquantized, experts_from="ram"))
    whole = dry_run(opened, machine(1))
    assert whole.fit_suggestions is None
    assert whole.summary.disk_bytes == sum(file.stat().st_size for file in unquantized.glob("*.safetensors"))
    assert whole.summary.name == unquantized.name
    needed = whole.plan.total_bytes["cpu"]
    for missing in (needed // 2, needed // 5):
        hardware = machine((needed - missing) / GIB)
        preview = dry_run(opened, hardware)
        assert preview.fit_suggestions is not None
        assert any(remedy.flag.startswith("--cpu_quant") for remedy in preview.fit_suggestions.each)
        check_each(opened, hardware, preview)


def test_several_remedies_may_suffice_together_only(unquantized: Path) -> None:
    opened = open_model(EngineConfig(model_path=unquantized, cache_lens=1024))
    needed = dry_run(opened, machine(1)).plan.total_bytes["cpu"]
    config = replace(opened.config, cache_lens=512, kv_type="int8", cpu_quant="q4_k")
    least = plan_model(config, replace(opened, config=config), machine(1)).total_bytes["cpu"]
    hardware = machine((least + 4096) / GIB)
    preview = dry_run(opened, hardware)
    assert preview.fit_suggestions is not None
    assert [(one.flag, one.is_enough) for one in preview.fit_suggestions.each] == [
        ("--cache_lens 512", False),
        ("--kv_type int8", False),
        ("--cpu_quant q4_k", False),
    ]
    assert preview.fit_suggestions.are_enough
    assert preview.fit_suggestions.saves == needed - least
    check_each(opened, hardware, preview)


def test_bandwidth_is_measured_once_and_the_best_is_kept(tmp_path: Path) -> None:
    rates = iter([5e9, 4e9, 6e9])

    def ask(is_anew: bool = False) -> dict[str, float]:
        return bandwidths(["cpu"], 2, folder=tmp_path, is_anew=is_anew, ram=lambda threads: next(rates))

    assert [ask(), ask(), ask(True), ask(True), ask()] == [{"cpu": rate} for rate in (5e9, 5e9, 5e9, 6e9, 6e9)]
    assert bandwidths(["cpu"], 3, folder=tmp_path, ram=lambda threads: 1e9 * threads) == {"cpu": 3e9}


def test_a_damaged_file_is_measured_anew(tmp_path: Path) -> None:
    file = BandwidthFile({"cpu": "x"}, tmp_path)
    assert file.keep(3e9) == 3e9
    for text in ("{", "[]", '{"key": 1}', '{"key": "other", "bytes_per_s": 1}'):
        file.path.write_text(text)
        assert file.read() is None
    file.path.unlink()
    file.path.mkdir()
    assert file.keep(2e9) == 2e9  # cannot be written: measured every time


def test_what_cannot_be_measured_is_missing(tmp_path: Path) -> None:
    def fails(device: str) -> float:
        raise EngineError("out of memory\nmore")

    assert bandwidths(["cpu", "cuda:0"], 1, folder=tmp_path, ram=lambda n: 1e9, gpu=fails) == {"cpu": 1e9}

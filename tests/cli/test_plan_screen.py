"""The plan on one screen, for all published shapes and several machines."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from ktransformers.cli.models.plan import expect
from ktransformers.cli.models.plan_screen import screen, summary_json, verdict
from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Hardware
from ktransformers.engine.model.opened import open_synthetic
from ktransformers.engine.model.skeleton import check_kinds
from ktransformers.engine.plan.dry_run import DryRun, dry_run
from ktransformers.errors import UnsupportedError
from ktransformers.models.facts import LayerKind, ModelFacts
from ktransformers.models.synthetic_shapes import SHAPES
from ktransformers.optimize.disk_prediction import predict_from_disk
from ktransformers.optimize.machine import Machine
from ktransformers.optimize.machine_speed import CpuSpeed, Curve, MachineSpeed, StepCost
from ktransformers.optimize.predict import Expected
from tests.support.engines.fake_gpus import GIB, fake_hardware
from tests.support.models.tiny_models import MODEL_TYPES, MOE_TYPES, tiny_config

RATES: Mapping[str, float] = {"cpu": 43e9, **{f"cuda:{i}": 4000e9 for i in range(8)}}


def has_caches(name: str) -> bool:
    """Whether all of a shape's layers have a cache: `plan` refuses others."""
    try:
        check_kinds(ModelFacts.of(SHAPES[name].config()))
    except UnsupportedError:
        return False
    return True


def has_states(name: str) -> bool:
    """Whether layers read and write a state in each step, which predictions do not count."""
    return any(layer.kind is LayerKind.RECURRENT for layer in ModelFacts.of(SHAPES[name].config()).layers)


PLANNED = [name for name in SHAPES if has_caches(name)]
MACHINES = {"small": (8.0,), "desktop": (60.0, 11.0), "gpus": (512.0, *[24.0] * 8)}


def machine(ram: float, *gpus: float) -> Hardware:
    devices = {"cpu": int(ram * GIB), **{f"cuda:{i}": int(gpu * GIB) for i, gpu in enumerate(gpus)}}
    return replace(fake_hardware(max(len(gpus), 1)), machine=Machine(devices["cpu"], devices["cpu"], devices))


@functools.cache
def outlook_of(name: str, *gib: float, **flags: object) -> DryRun:
    config = EngineConfig(**flags)  # type: ignore[arg-type]
    return dry_run(open_synthetic(config, SHAPES[name].config()), machine(*gib), name)


@pytest.mark.every(5)
@pytest.mark.parametrize("gib", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("name", PLANNED)
def test_one_screen(name: str, gib: tuple[float, ...]) -> None:
    preview = outlook_of(name, *gib)
    lines = screen(preview, RATES)
    assert [line for line in lines if len(line) > 80] == []
    assert len(lines) <= 24
    assert not any("..." in line for line in lines)
    assert lines[0].startswith("fits: " if preview.fit_suggestions is None else "does not fit: ")
    json.dumps(summary_json(preview, RATES))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_family_has_a_screen(model_type: str) -> None:
    """The numbers of all families are found: parameters by the modules, the rest by the plan."""
    opened = open_synthetic(EngineConfig(), tiny_config(model_type, hidden=256))
    preview = dry_run(opened, machine(8.0))
    lines = screen(preview, RATES)
    assert [line for line in lines if len(line) > 80] == []
    size, reads = preview.summary.size, preview.summary.reads
    assert size.parameters == sum(tensor.numel() for tensor in opened.model.parameters())
    assert (size.experts, size.top_k in (2, 4)) == ((8, True) if model_type in MOE_TYPES else (0, False))
    assert 0 < reads.bytes_per_token()["cpu"] < preview.plan.weight_bytes["cpu"]
    assert sum(part.nbytes for part in preview.summary.parts) == preview.plan.total_bytes["cpu"]


def test_a_model_that_fits() -> None:
    assert screen(outlook_of("qwen3-30b-a3b", 22.0), RATES) == [
        "fits: 20.2 GiB of 22.0 GiB free",
        "",
        "model        qwen3-30b-a3b (qwen3_moe, 48 layers, 8 of 128 experts a token)",
        "parameters   30.5 billion, 3.0 billion of them for each token",
        "weights      18.7 GiB in memory, 5.3 bits per weight",
        "context      40,960 tokens; the cache holds 8,192, a step 512 of a prompt",
        "decode       at most 21 tokens/s, 11.8 with 8,192 tokens in the cache:",
        "             2.03 GB a token at 43 GB/s (RAM)",
        "",
        "part                where             size  types",
        "experts             RAM           17.8 GiB  Q4_K, Q6_K",
        "attention           RAM            0.5 GiB  Q4_K, F32",
        "dense and shared    RAM           48.8 MiB  F32",
        "embeddings and head RAM            0.4 GiB  Q6_K, Q4_K",
        "cache               RAM            1.5 GiB",
    ]


def test_what_does_not_fit_says_what_would_help() -> None:
    lines = screen(outlook_of("qwen3-30b-a3b", 19.9), RATES)
    assert lines[0] == "does not fit: 20.2 GiB needed, 19.9 GiB free"
    assert lines[1] == "  --cache_lens 4096 saves 0.8 GiB: it fits then"
    assert lines[2] == "  --kv_type bf16 saves 0.8 GiB: it fits then"
    lines = screen(outlook_of("deepseek-v2-lite", 8.0), RATES)
    assert lines[:3] == [
        "does not fit: 11.2 GiB needed, 8.0 GiB free",
        "  --cache_lens 512, --kv_type int8: still 2.7 GiB missing",
        "  a file of at most 4.1 bits per weight would fit; this one has 5.9",
    ]


def test_devices_are_named_where_there_are_several() -> None:
    preview = outlook_of("deepseek-v3", 512.0, 80.0)
    assert verdict(preview) == "fits: 403.0 GiB of 512.0 GiB free (RAM), 80.0 GiB of 80.0 GiB free (cuda:0)"
    lines = screen(preview, RATES)
    assert "             11.40 GB a token at 43 GB/s (RAM), 15.52 GB at 4,000 (cuda:0)" in lines
    spread = screen(outlook_of("deepseek-v3", *MACHINES["gpus"]), RATES)
    assert any(line.startswith("hot experts         cuda:0-7 ") for line in spread)


def test_remedies_of_a_gpu_are_listed() -> None:
    lines = screen(outlook_of("deepseek-v3", 512.0, 24.0, gpu_memory=12.0, use_cuda=True), RATES)
    assert lines[:4] == [
        "does not fit: 16.4 GiB needed on cuda:0, 12.0 GiB free",
        "  --gpu_memory 0 gives 12.0 GiB: it fits then",
        "  --no_use_cuda: it fits then, on the CPU alone",
        "",
    ]


@pytest.mark.exhaustive
def test_remedies_that_suffice_together_only() -> None:
    preview = outlook_of("deepseek-v3", 512.0, 14.2, use_cuda=True)
    assert preview.fit_suggestions is not None
    each = tuple(one for one in preview.fit_suggestions.each if not one.is_enough)
    lines = screen(replace(preview, fit_suggestions=replace(preview.fit_suggestions, each=each)), RATES)
    assert lines[:5] == [
        "does not fit: 16.4 GiB needed on cuda:0, 14.2 GiB free",
        "  --cache_lens 512 saves 1.0 GiB",
        "  --kv_type int8 saves 0.8 GiB",
        "  --chunk_size 512 saves 2.0 GiB",
        "  together they save 3.1 GiB: it fits then",
    ]


def test_without_bandwidth_nothing_is_predicted() -> None:
    preview = outlook_of("gpt-oss-20b", 64.0, 24.0)
    (line,) = [line for line in screen(preview, {"cpu": 1e9}) if line.startswith("decode")]
    assert line == "decode       not predicted: the bandwidth of cuda:0 is not known"
    assert [row["tokens_per_s_at_most"] for row in summary_json(preview, {"cpu": 1e9})["decode"]] == [None, None]


def test_json_has_the_numbers_of_the_screen() -> None:
    document = summary_json(outlook_of("qwen3-30b-a3b", 19.9), RATES)
    assert document["parameters"] == 30_532_122_624
    assert document["verdict"] == "does not fit: 20.2 GiB needed, 19.9 GiB free"
    assert [(one["flag"], one["is_enough"]) for one in document["remedies"]] == [
        ("--cache_lens 4096", True),
        ("--kv_type bf16", True),
    ]
    assert document["remedies"][0]["saves_bytes"] == 805_306_368
    empty, full = document["decode"]
    assert (empty["context"], full["context"]) == (0, 8192)
    read = empty["bytes_per_token"]["cpu"]
    assert full["bytes_per_token"]["cpu"] == read + 2 * 805_306_368
    assert empty["tokens_per_s_at_most"] == pytest.approx(43e9 / read)
    assert sum(part["nbytes"] for part in document["parts"]) == document["memory_bytes"] + 2 * 805_306_368


def expected_on(preview: DryRun, threads: int | None = None) -> Expected:
    """On a machine where every byte takes a nanosecond and nothing else takes time."""
    curve, free = Curve((1.0,), (1e-9,)), StepCost(Curve((1.0,), (0.0,)), Curve((1.0,), (0.0,)))
    curves = {"Q4_K": curve, "Q8_0": curve}
    cpu = CpuSpeed(
        threads=threads or preview.num_threads,
        isa="avx2",
        read={1: 1e9},
        linear=curves,
        experts=curves,
        attention=dict.fromkeys(("grouped", "latent"), Curve((1.0,), (0.0,))),
        steps=dict.fromkeys(("grouped", "latent", "sinks"), free),
    )
    return expect(preview, MachineSpeed(0.0, 0.0, cpu), 1, 512)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [name for name in PLANNED if not has_states(name)])
def test_a_prediction_on_the_screen(name: str) -> None:
    preview = outlook_of(name, 1000.0, use_cuda=False)
    expected = expected_on(preview)
    prefill, decode = expected.predictions
    read = preview.summary.reads.bytes_per_token(0)["cpu"]
    assert decode.seconds == pytest.approx(1e-9 * read)  # no more and no less than the bound counts
    lines = screen(preview, RATES, expected)
    assert [line for line in lines if len(line) > 80] == []
    assert any(line.startswith("predicted    prefill ") for line in lines)
    first, second = summary_json(preview, RATES, expected)["predicted"]
    assert (first["phase"], second["phase"]) == ("prefill", "decode")
    assert first["tokens"] == prefill.tokens == 512
    assert sum(second["seconds_by_resource"].values()) == pytest.approx(second["seconds"])
    assert second["limits"][0][0] == "RAM bandwidth"


def test_three_tiers_of_experts() -> None:
    """GPU, RAM and disk: what each has, and finds of a token's."""
    config = EngineConfig(experts_from="disk")
    opened = open_synthetic(config, SHAPES["qwen3-30b-a3b"].config(), stands_for_files=True)
    preview = dry_run(opened, machine(12.0, 8.0))
    plan, summary = preview.plan, preview.summary
    disk = predict_from_disk(plan, summary.top_k, summary.chunk_size, 2e9)
    assert 0 < disk.gpu_hits[0] < disk.gpu_hits[1] < disk.hits[1] < 1
    lines = screen(preview, RATES, None, disk)
    assert [line for line in lines if len(line) > 80] == []
    first = next(i for i, line in enumerate(lines) if line.startswith("from disk"))
    assert "of experts" in lines[first]
    assert f"on GPUs, with {disk.gpu_hits[0]:.0%} to {disk.gpu_hits[1]:.0%} of what a token uses" in lines[first + 1]
    assert f"{disk.hits[0]:.0%} to {disk.hits[1]:.0%} found there or in RAM" in lines[first + 2]


def test_why_nothing_is_predicted() -> None:
    preview = outlook_of("gpt-oss-20b", 64.0, 24.0)
    assert expect(preview, None, 1, 512).reason.startswith("ktransformers doctor")
    assert expected_on(preview).reason == "cuda:0 was not measured: ktransformers doctor --measure"
    on_cpu = outlook_of("gpt-oss-20b", 64.0, use_cuda=False)
    assert "1000 threads were measured" in expected_on(on_cpu, 1000).reason
    (line,) = [line for line in screen(on_cpu, RATES, expect(on_cpu, None, 1, 512)) if line.startswith("predicted")]
    assert line == "predicted    nothing: ktransformers doctor measures this machine first"

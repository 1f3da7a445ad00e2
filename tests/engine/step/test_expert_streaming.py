"""Models whose experts are streamed to a GPU in large steps: plans, placement, chunk sizes and results.

The GPU is made up (fake_gpus.py); rates are given, so that the split is the same on every machine.
"""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import build_engine, plan_model
from ktransformers.engine.step import expert_streaming as module
from ktransformers.errors import KernelError
from ktransformers.kernels.cpu import MoeKernel
from ktransformers.operators.experts.split import CpuRate, PrefillRates
from ktransformers.operators.experts.streamed import ExpertPrefill
from ktransformers.optimize.report import print_plan
from ktransformers.optimize.streaming import STAGING
from ktransformers.scheduler.records import StepPlan
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, Gpu, rules_of, sequence_start, step_row
from tests.support.engines.one_sequence import static_engine
from tests.support.models.agreement import prompt
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

FLAT = CpuRate((1,), (1e-3,))
TOP_K = 4
RATES = PrefillRates(1e-3, 0.0, FLAT, FLAT)


@pytest.fixture(autouse=True)
def _given_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrate(prefill: ExpertPrefill, kernel: MoeKernel, expert_nbytes: int, file: object) -> None:
        prefill.rates, prefill.threshold = RATES, max(8, prefill.least_rows)

    monkeypatch.setattr(module, "calibrate", calibrate)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unquantized but for the experts, because the interpreter takes its time for quantized products."""
    path = tmp_path_factory.mktemp("model")
    write_safetensors(tiny_model("qwen3_moe", seed=3), path)
    return path


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped rules, as a file of the user's, so that experts stay on the CPU."""
    return rules_of("qwen3_moe", tmp_path_factory.mktemp("rules"), EXPERTS_ON_CPU, EXPERTS_ON_CPU)


@pytest.fixture
def config(model_path: Path, rules: Path) -> EngineConfig:
    """No slots, unless a test asks for them."""
    options = {"cache_lens": 64, "cpu_infer": 1, "cpu_quant": "q8_0", "hot_experts": "off"}
    return EngineConfig(model_path=model_path, optimize_config_path=rules, **options)  # type: ignore[arg-type]


def test_a_streamed_prompt_gives_what_the_cpu_gives(config: EngineConfig) -> None:
    """Fp16 activations on the GPU, int8 ones on the CPU: as far apart as in tests/engine/gpu/test_gpu.py."""
    gpu = Gpu()
    engine = static_engine(config, hardware=gpu.hardware())
    assert engine.config.chunk_size == 4096
    (stream,) = engine.plan.devices["cuda:0"].services
    assert sum(gpu.driver.pinned_ranges.values()) > 0
    ids = prompt(100)
    got = engine.runner.forward(ids, 0, range(len(ids))).clone()
    assert gpu.copies.num_copies > 0
    assert stream.prefill.last_split is not None
    assert stream.prefill.last_split.on_gpu
    copied = gpu.copies.num_copies
    engine.runner.forward([5], len(ids), [0])
    assert gpu.copies.num_copies == copied  # decode is not streamed
    engine.close()
    assert gpu.driver.pinned_ranges == {}
    plain = static_engine(config, hardware=fake_hardware())
    want = plain.runner.forward(ids, 0, range(len(ids)))
    plain.close()
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.median() <= 3e-2
    # A row whose router nearly ties may take another expert and differ by more.
    assert (errors > 3e-2).sum() <= 2


def test_a_streamed_prompt_uses_slots(config: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What lies in slots is not copied, and the prompt's result is what it is without them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ids, results, copied = prompt(100), [], []
    for slots in ("off", "5"):
        gpu = Gpu()
        engine = static_engine(replace(config, hot_experts=slots), hardware=gpu.hardware())
        (stream,) = engine.plan.devices["cuda:0"].services
        assert stream.prefill.shape.num_held == (0 if slots == "off" else 5)
        before = gpu.copies.num_bytes
        results.append(engine.runner.forward(ids, 0, range(len(ids))).clone())
        copied.append(gpu.copies.num_bytes - before)
        split = stream.prefill.last_split
        assert split is not None
        assert len(split.held) == (0 if slots == "off" else 5)
        assert not set(split.held) & set(split.passing)
        engine.close()
    assert 0 <= copied[1] < copied[0]
    errors = (results[1] - results[0]).norm(dim=-1) / results[0].norm(dim=-1)
    assert errors.median() <= 3e-2
    assert (errors > 3e-2).sum() <= 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(("max_batch_size", "is_streamed"), [(4, True), (12, False)])
def test_a_step_of_many_sequences_is_streamed_too(max_batch_size: int, is_streamed: bool, config: EngineConfig) -> None:
    """Unless it is no larger than steps that are captured as graphs, in which the host must not wait."""
    gpu = Gpu()
    config = replace(config, use_cuda_graph=False)
    paged = build_engine(config, page_size=4, max_batch_size=max_batch_size, hardware=gpu.hardware())
    assert paged.config.chunk_size == 4096
    starts = [sequence_start(i, [3 + i, 5, 8 - i, 7]) for i in range(3)]
    rows = [step_row(i, start.token_ids, 0, [i]) for i, start in enumerate(starts)]
    result = paged.executor.execute(StepPlan(step_id=1, ended=[], starts=starts, rows=rows))
    assert (gpu.copies.num_copies > 0) is is_streamed
    assert result.experts[0] == 2 * 12 * TOP_K  # layers, tokens, experts of each
    paged.close()


def test_the_plan_shows_it(config: EngineConfig) -> None:
    plan = plan_model(config, hardware=fake_hardware())
    staging = plan.extra_bytes[STAGING]
    assert set(staging) == {"cuda:0", "cpu"}
    assert plan.total_bytes["cuda:0"] >= staging["cuda:0"] + plan.extra_bytes["workspace"]["cuda:0"]
    text = io.StringIO()
    print_plan(plan, Console(file=text))
    assert STAGING in text.getvalue()
    assert "streamed to cuda:0 in large steps" in text.getvalue()
    ops = {entry.prefill_op for entry in plan.entries if entry.operator == "KTransformersExperts"}
    assert ops == {"KExpertsMarlin"}


def test_a_small_budget_streams_nothing(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    everything = plan_model(config, hardware=fake_hardware())
    needed = everything.total_bytes["cuda:0"] - everything.extra_bytes[STAGING]["cuda:0"]
    plan = plan_model(replace(config, gpu_memory=(needed + 1000) / 2**30), hardware=fake_hardware())
    assert plan.misfit() is None
    assert STAGING not in plan.extra_bytes
    assert "experts are not streamed to cuda:0: that takes at least" in caplog.text
    half = replace(config, gpu_memory=(needed + 3 * everything.extra_bytes[STAGING]["cuda:0"]) / 2**30)
    assert plan_model(half, hardware=fake_hardware()).misfit() is None


PLACES = {"prefill_device: cpu": False, "prefill_device: cuda": True, "prefill_op: KExpertsMarlin": True, "": True}


@pytest.mark.parametrize("words", PLACES)
def test_rules_say_whether(words: str, config: EngineConfig, tmp_path: Path) -> None:
    more = f", {words}" if words else ""
    rule = (
        "- match: {name: 'mlp.experts$'}\n"
        "  replace: {class: ktransformers.operators.experts.KTransformersExperts, "
        f"kwargs: {{generate_device: cpu{more}}}}}\n"
    )
    rules = rules_of("qwen3_moe", tmp_path, "- match", "- match", before=rule)
    plan = plan_model(replace(config, optimize_config_path=rules), hardware=fake_hardware())
    assert (STAGING in plan.extra_bytes) == PLACES[words]
    on_cpu = plan_model(replace(config, optimize_config_path=rules), hardware=fake_hardware(num_gpus=0))
    assert STAGING not in on_cpu.extra_bytes


def test_experts_that_all_fit_are_not_streamed(config: EngineConfig) -> None:
    plan = plan_model(replace(config, optimize_config_path=None), hardware=fake_hardware())
    assert STAGING not in plan.extra_bytes
    assert {e.placement.generate_device for e in plan.entries if e.operator == "KTransformersExperts"} == {"cuda:0"}


def test_memory_that_cannot_be_pinned(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = Gpu()

    def pin(address: int, nbytes: int) -> None:
        raise KernelError("cuMemHostRegister_v2 failed on cuda:0 with error 2: out of memory")

    monkeypatch.setattr(gpu.driver, "pin", pin)
    engine = static_engine(config, hardware=gpu.hardware())
    assert [r.levelname for r in caplog.records if "cannot be pinned" in r.getMessage()] == ["WARNING"]
    assert not engine.plan.devices["cuda:0"].services
    engine.close()


def test_chunks_are_as_asked_for(config: EngineConfig) -> None:
    for asked, num_gpus, got in ((16, 1, 16), (0, 0, 512)):
        engine = static_engine(replace(config, chunk_size=asked), hardware=fake_hardware(num_gpus=num_gpus))
        assert engine.config.chunk_size == got
        engine.close()

"""Engines whose prefill attends with FlashInfer: logits against `transformers`, and who gets it when.

FlashInfer is made up (fake_flashinfer.py), the GPU too. Both compute in fp32, so that the tolerance is
that of tests/engine/gpu/test_gpu.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import build_engine, plan_model
from ktransformers.errors import ConfigError
from ktransformers.scheduler.records import StepPlan
from tests.support.engines import fake_flashinfer
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.gpu_engines import sequence_start, step_row
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.models.agreement import TOLERANCE, prompt
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
MODELS = {
    "qwen3_moe": {"head_dim": 64},
    "llama": {"head_dim": 64},
    "deepseek_v3": LATENT,
    "deepseek_v2": LATENT,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write_safetensors(tiny_model("qwen3_moe", seed=1, head_dim=64), tmp_path)
    return tmp_path


def engine_of(path: Path, backend: str = "auto") -> StaticEngine:
    config = EngineConfig(model_path=path, cache_lens=60, cpu_infer=1, attention_backend=backend)
    return static_engine(config, hardware=fake_hardware())


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize("model_type", MODELS)
def test_prefill_agrees_with_transformers(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two chunks of a prompt, then tokens one by one: one plan for both layers of a chunk, none for a token."""
    calls = fake_flashinfer.install(monkeypatch)
    model = tiny_model(model_type, seed=1, **MODELS[model_type])
    write_safetensors(model, tmp_path)
    with caplog.at_level(logging.INFO), closing(engine_of(tmp_path)) as engine:
        assert "FlashInfer 0.0-fake in prefill steps, Triton in decode steps" in caplog.text
        ids = prompt(model.config.vocab_size)
        calls.plans.clear()
        calls.runs.clear()
        chunks = [(0, 12), (12, 22), (22, 23), (23, 24)]
        parts = [engine.runner.forward(ids[a:b], a, range(b - a)).clone() for a, b in chunks]
    assert len(calls.plans) == 2
    assert calls.runs == ["mla" if "deepseek" in model_type else "gqa"] * 4
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert (torch.cat(parts) - want).abs().max() <= TOLERANCE * want.abs().max()


def test_windows_are_planned_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layers one sees 8 positions, of 20."""
    calls = fake_flashinfer.install(monkeypatch)
    layer_types = ["sliding_attention", "full_attention"]
    values = {"head_dim": 64, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    model = tiny_model("qwen3", seed=1, **values, layer_types=layer_types)
    write_safetensors(model, tmp_path)
    with closing(engine_of(tmp_path, "flashinfer")) as engine:
        calls.plans.clear()
        ids = prompt(model.config.vocab_size)[:20]
        got = engine.runner.forward(ids, 0, range(20))
    assert [plan["window_left"] for plan in calls.plans] == [7, -1]
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.exhaustive
def test_sequences_share_a_prefill_step(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of paged steps, on scattered pages, one in two parts: tokens are those of steps without FlashInfer."""
    calls = fake_flashinfer.install(monkeypatch)
    ids = prompt(160)
    tables = [[9, 2, 7], [4, 0], [3, 11]]
    steps = [
        [step_row(0, ids[:5], 0, tables[0]), step_row(1, ids[5:12], 0, tables[1])],
        [step_row(0, ids[12:18], 5, tables[0]), step_row(2, ids[:8], 0, tables[2])],
    ]
    tokens = []
    for backend in ("flashinfer", "triton"):
        config = EngineConfig(model_path=saved, cache_lens=64, cpu_infer=1, attention_backend=backend)
        paged = build_engine(config, page_size=4, max_batch_size=4, hardware=fake_hardware())
        if backend == "flashinfer":
            calls.runs.clear()  # of the trial and of the first step
        with closing(paged):
            for number, rows in enumerate(steps):
                starts = [sequence_start(row.run_id, [*row.token_ids]) for row in rows if row.start == 0]
                plan = StepPlan(step_id=number, ended=[], starts=starts, rows=rows)
                tokens.append([result.token_id for result in paged.executor.execute(plan).results])
    assert len(calls.runs) == 2 * 2
    assert tokens[:2] == tokens[2:]


def test_it_takes_its_memory(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)
    config = EngineConfig(model_path=saved, cache_lens=64, cpu_infer=1)
    plan = plan_model(config, hardware=fake_hardware())
    assert plan.extra_bytes["flashinfer"] == {"cuda:0": 136 << 20}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Lines about attention, as they come."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ktransformers.engine.plan.attention")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lines
    log.removeHandler(handler)
    log.setLevel(before)


def test_without_flashinfer(saved: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    fake_flashinfer.remove(monkeypatch)
    engine_of(saved).close()
    assert said == ["attention on GPUs: Triton (FlashInfer is not used: it is not installed)"]
    with pytest.raises(ConfigError, match=r"self_attn: it is not installed.*pip install 'ktransformers-engine\[flash"):
        engine_of(saved, "flashinfer")


@pytest.mark.exhaustive
def test_triton_is_what_was_asked_for(saved: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    calls = fake_flashinfer.install(monkeypatch)
    with closing(engine_of(saved, "triton")) as engine:
        engine.runner.forward(prompt(160), 0, [0])
    assert not calls.plans
    assert said == ["attention on GPUs: Triton (FlashInfer is not used: --attention_backend triton)"]


def test_wrong_results_rule_it_out(saved: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    calls = fake_flashinfer.install(monkeypatch)
    calls.fault = 0.5
    engine_of(saved).close()
    assert "its result differs from Triton's by 0.5" in said[-1]
    with pytest.raises(ConfigError, match="differs from Triton's"):
        engine_of(saved, "flashinfer")


def test_failures_rule_it_out(saved: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    fake_flashinfer.install(monkeypatch)

    def plan(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Ninja build failed.\nmany lines")

    monkeypatch.setattr(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan", plan)
    engine_of(saved).close()
    want = (
        "attention on GPUs: Triton (FlashInfer is not used: it failed when tried (RuntimeError: Ninja build failed.))"
    )
    assert said[-1] == want
    with pytest.raises(ConfigError, match="Ninja build failed"):
        engine_of(saved, "flashinfer")


def test_sinks_stay_with_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    fake_flashinfer.install(monkeypatch)
    write_safetensors(tiny_model("gpt_oss", seed=1, head_dim=64), tmp_path)
    engine_of(tmp_path).close()
    assert "it has sinks, gates or norms of its own" in said[0]
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn: it is no plain grouped-query attention"):
        engine_of(tmp_path, "flashinfer")


def test_a_choice_needs_a_gpu(saved: Path) -> None:
    for backend in ("triton", "flashinfer"):
        with pytest.raises(ConfigError, match=f"--attention_backend {backend}: no attention"):
            plan_model(EngineConfig(model_path=saved, attention_backend=backend))
    with pytest.raises(ConfigError, match="not one of auto, triton, flashinfer"):
        EngineConfig(model_path=saved, attention_backend="cudnn").resolved()

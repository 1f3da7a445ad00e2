"""Layers on a GPU whose experts the CPU computes from files: as from RAM. The GPU is made up (fake_gpus.py)."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.kernels.cpu.expert_store import ReadError
from ktransformers.kernels.types import QuantType
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, rules_of
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.tiny_models import tiny_model

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    write_gguf(tiny_model("qwen3_moe", seed=3), tmp_path / "model.gguf", QuantType.Q8_0, QuantType.Q8_0)
    rules = rules_of("qwen3_moe", tmp_path, EXPERTS_ON_CPU, EXPERTS_ON_CPU)
    return EngineConfig(
        gguf_path=tmp_path / "model.gguf",
        optimize_config_path=rules,
        cache_lens=64,
        cpu_infer=1,
        self_check=False,
        hot_experts="off",
    )


def logits_of(engine: StaticEngine) -> list[torch.Tensor]:
    prompt = engine.runner.forward([5, 9, 3, 7], 0, [0, 1, 2, 3]).clone()
    return [prompt, *(engine.runner.forward([token], 4 + i, [0]).clone() for i, token in enumerate([8, 1, 9]))]


def read_something(engine: StaticEngine) -> None:
    for token in range(20):
        engine.runner.forward([token], 7, [0])


def test_results_are_those_of_experts_in_ram(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plain = static_engine(config, hardware=fake_hardware())
    wanted = logits_of(plain)
    plain.close()
    engine = static_engine(replace(config, experts_from="disk", experts_ram=1e-6), hardware=fake_hardware())
    assert "the CPU computes them, in prompts, too" in caplog.text
    for one, want in zip(logits_of(engine), wanted, strict=True):
        assert torch.equal(one, want)
    assert engine.plan.devices.async_cpu_experts()
    assert engine.expert_files.store.stats().misses > 0
    engine.expert_files.store.handle._fail_next(1)
    with pytest.raises(ReadError, match=r"model\.gguf"):
        read_something(engine)
    for one, want in zip(logits_of(engine), wanted, strict=True):
        assert torch.equal(one, want)
    engine.close()

"""Models with layers on a GPU: logits against `transformers` in fp32, and against our own engine on the CPU.

The GPU is made up (tests/support/fake_gpus.py) and computes in fp32, so that only the order of summation differs and the
tolerance is that of tests/models/test_agreement.py: what is tested is what runs where, and that nothing gets lost.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.fake_gpus import fake_hardware
from tests.support.tiny_models import tiny_model, write_safetensors

from ktransformers.config import EngineConfig
from ktransformers.engine.builder import Engine, build_engine

pytest.importorskip("triton")

TOLERANCE = 1e-4
PROMPT_LEN = 24


def prompt(vocab_size: int) -> list[int]:
    return torch.randint(0, vocab_size, (PROMPT_LEN,), generator=torch.Generator().manual_seed(7)).tolist()


def gpu_engine(folder: Path, num_gpus: int = 1, **settings: object) -> Engine:
    config = EngineConfig(model_path=folder, cache_lens=64, cpu_infer=1, **settings)  # type: ignore[arg-type]
    return build_engine(config, hardware=fake_hardware(num_gpus))


def logits_in_steps(engine: Engine, ids: list[int]) -> torch.Tensor:
    """Logits of all positions: a prefill, then a few steps of one row."""
    first = engine.runner.forward(ids[:-3], 0, range(len(ids) - 3))
    rest = [engine.runner.forward([token], len(ids) - 3 + i, [0]) for i, token in enumerate(ids[-3:])]
    return torch.cat([first, *rest])


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_moe", "deepseek_v3", "deepseek_v2", "mixtral", "qwen2_moe", "llama", "gpt_oss", "glm4_moe", "granitemoe"],
)
def test_default_placement_agrees_with_transformers(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type, seed=1)
    ids = prompt(model.config.vocab_size)
    write_safetensors(model, tmp_path)
    engine = gpu_engine(tmp_path)
    assert {home.device for home in engine.plan.homes} == {"cuda:0"}
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = logits_in_steps(engine, ids)
    assert got.dtype is torch.float32
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()

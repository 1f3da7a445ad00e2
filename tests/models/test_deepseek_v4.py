"""DeepSeek-V4 under the names and in the formats of its published files, and on other numbers of threads.

Logits, chunks and steps are compared in test_agreement.py and test_families.py, packed sequences in tests/engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from tests.support.engines.one_sequence import static_engine
from tests.support.models.agreement import INT8_TOLERANCE, TOLERANCE, logits_of, prompt
from tests.support.models.fp8_models import published_tensors, write_published
from tests.support.models.tiny_models import tiny_model, write_safetensors

LENGTH = 48  # three windows; more entries than the indexer chooses


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("deepseek_v4", seed=3, layers=3)


@pytest.fixture(scope="module")
def want(model: PreTrainedModel) -> torch.Tensor:
    return logits_of(model, prompt(model.config.vocab_size, LENGTH))


def forward(folder: Path, num_threads: int) -> torch.Tensor:
    config = EngineConfig(model_path=folder, cache_lens=LENGTH, cpu_infer=num_threads)
    engine = static_engine(config)
    try:
        return engine.runner.forward(prompt(engine.runner.vocab_size, LENGTH), 0, range(LENGTH))
    finally:
        engine.close()


def test_the_names_of_published_files(model: PreTrainedModel, want: torch.Tensor, tmp_path: Path) -> None:
    """Without the base model's prefix, with names of its own, and with a block for multi-token prediction."""
    file = write_safetensors(model, tmp_path) / "model.safetensors"
    safetensors.torch.save_file({**published_tensors(model, None), "mtp.0.norm.weight": torch.ones(64)}, file)
    assert (forward(tmp_path, 1) - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("block", [(128, 128), (32, 32)])
def test_fp4_and_fp8_as_published(block: tuple[int, int], tmp_path: Path) -> None:
    """V4 has blocks of 128 x 128, V4.1 of 32 x 32; the widest matrices here have several of both, some of them cut."""
    model = tiny_model("deepseek_v4", seed=3, layers=3, hidden=256, q_lora_rank=160)
    write_published(model, tmp_path, block)
    want = logits_of(model, prompt(model.config.vocab_size, LENGTH))
    got = forward(tmp_path, 1)
    assert (got - want).abs().max() <= INT8_TOLERANCE * want.abs().max()
    assert torch.equal(forward(tmp_path, 2), got)


def test_threads_change_nothing(model: PreTrainedModel, want: torch.Tensor, tmp_path: Path) -> None:
    write_safetensors(model, tmp_path)
    alone = forward(tmp_path, 1)
    assert (alone - want).abs().max() <= TOLERANCE * want.abs().max()
    assert torch.equal(forward(tmp_path, 2), alone)

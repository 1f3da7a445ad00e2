"""DeepSeek-V4 under the names of its published files, and on other numbers of threads.

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
from tests.support.models.agreement import TOLERANCE, logits_of, prompt
from tests.support.models.tiny_models import tiny_model, write_safetensors

LENGTH = 48  # three windows; more entries than the indexer chooses
PUBLISHED = {
    "model.embed_tokens.weight": "embed.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}


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
    tensors = safetensors.torch.load_file(file)
    assert set(PUBLISHED) <= set(tensors)
    renamed = {PUBLISHED.get(name, name.removeprefix("model.")): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file({**renamed, "mtp.0.norm.weight": torch.ones(64)}, file)
    assert (forward(tmp_path, 1) - want).abs().max() <= TOLERANCE * want.abs().max()


def test_threads_change_nothing(model: PreTrainedModel, want: torch.Tensor, tmp_path: Path) -> None:
    write_safetensors(model, tmp_path)
    alone = forward(tmp_path, 1)
    assert (alone - want).abs().max() <= TOLERANCE * want.abs().max()
    assert torch.equal(forward(tmp_path, 2), alone)

"""Counts in a model's config are held against its files before anything is sized by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import describe_model, open_model
from ktransformers.errors import KTransformersError
from tests.support.models.tiny_models import tiny_model, write_safetensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_safetensors(tiny_model("qwen3_moe"), tmp_path_factory.mktemp("model"))
    return path if path.is_dir() else path.parent


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"num_hidden_layers": 60_000}, "config says 60000 layers, but the files hold"),
        ({"num_hidden_layers": 1 << 31}, "'num_hidden_layers' 2147483648, which no model has"),
        ({"num_labels": 1 << 31}, "'num_labels' 2147483648, which no model has"),
        ({"num_local_experts": 60_000}, "needs model.layers.0.* of shape .60000, "),
        ({"num_local_experts": 1 << 40}, "'num_local_experts' 1099511627776, which no model has"),
        ({"num_experts_per_tok": 500}, "num_experts_per_tok 500, but there are"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok 0, but there are"),
        ({"hidden_size": 1 << 30}, "needs|cannot build"),
        ({"head_dim": 1 << 30}, "needs|cannot build"),
        ({"vocab_size": 10**30}, "'vocab_size' a number of 100 bits, which no model has"),
        ({"pad_token_id": 10**9}, "cannot build model type qwen3_moe"),
        ({"layer_types": {"a": 1}}, "cannot be used|layers of type|cannot build"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id|cannot be used"),
        ({"max_position_embeddings": 1 << 50}, "max_position_embeddings 1125899906842624, which no model has"),
    ],
)
def test_absurd_configs_are_refused(values: dict[str, object], why: str, folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), **values}))
    with pytest.raises(KTransformersError, match=why):
        describe_model(open_model(EngineConfig(model_path=tmp_path)))

"""Models whose Python code comes with them, as --trust_remote_code runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import PreTrainedModel

from tests.support.models.own_code.configuration_softplus_moe import SoftplusMoeConfig
from tests.support.models.own_code.modeling_softplus_moe import SoftplusMoeForCausalLM
from tests.support.models.tiny_models import NUM_EXPERTS, VOCAB_SIZE, random_model, write_safetensors

__all__ = ["softplus_moe", "write_with_code"]


def softplus_moe(seed: int = 1) -> PreTrainedModel:
    """A tiny model with tiny_model's weights."""
    config = SoftplusMoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=3,
        max_position_embeddings=512,
        sliding_window=None,
        tie_word_embeddings=False,
    )
    return random_model(config, seed, make=SoftplusMoeForCausalLM)


def write_with_code(model: PreTrainedModel, folder: Path) -> Path:
    """Save a model as authors publish theirs: weights, a config.json with an auto_map, Python files."""
    path = write_safetensors(model, folder) / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["auto_map"] = {
        "AutoConfig": "configuration_softplus_moe.SoftplusMoeConfig",
        "AutoModelForCausalLM": "modeling_softplus_moe.SoftplusMoeForCausalLM",
    }
    path.write_text(json.dumps(values), encoding="utf-8")
    for file in Path(__file__).parent.glob("*_softplus_moe.py"):
        shutil.copy(file, folder)
    return folder

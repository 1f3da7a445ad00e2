"""Every architecture that the installed `gguf` package knows: a tiny file of it is read, or a reason is recorded."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ktransformers.engine.opened import config_of_model
from ktransformers.errors import UnsupportedError
from ktransformers.models.facts import ModelFacts
from ktransformers.models.gguf_families import FAMILIES
from ktransformers.models.gguf_refused import REFUSED, check_architecture
from ktransformers.weights.gguf import open_gguf
from ktransformers.weights.gguf_source import GGUFSource
from ktransformers.weights.names import ARCHITECTURES
from tests.support.gguf_writer import ARCH_OF, write_gguf
from tests.support.source_checks import check_whole_model
from tests.support.tiny_models import MODEL_TYPES, NUM_EXPERTS, tiny_model

_SLIDING = {"sliding_window": 16}
_NO_WINDOW = {"sliding_window": None}
MORE_TYPES: dict[str, dict[str, object]] = {
    "gemma": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "layers": 6, "layer_types": None},
    "phi": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "phi3": _SLIDING,
    "gpt_bigcode": {"n_inner": 96, "tie_word_embeddings": True},
    "starcoder2": {},
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True, "use_qk_norm": True},
    "cohere2": {**_SLIDING, "layers": 4, "logit_scale": 0.25, "tie_word_embeddings": True, "head_dim": 32},
    "olmo": {"clip_qkv": 0.75},
    "olmo2": {},
    "olmo3": {},
    "glm4": {
        "head_dim": 32,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "jais2": {},
    "exaone4": {**_SLIDING, "layers": 4, "head_dim": 32},
    "granite": {"embedding_multiplier": 6.0, "residual_multiplier": 0.25, "attention_multiplier": 0.125},
    "arcee": {},
    "ernie4_5": {"head_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 32},
    "smollm3": {"layers": 4, "no_rope_layers": None},
    "seed_oss": {"head_dim": 32, "attention_bias": True},
    "ministral3": _NO_WINDOW,
    "granitemoeshared": {
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "embedding_multiplier": 6.0,
    },
    "exaone_moe": {"layers": 3},
    "afmoe": {"layers": 4, "layer_types": None, "mup_enabled": True},
    "llama4_text": {
        "head_dim": 32,
        "layers": 4,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
    },
    "glm_moe_dsa": {
        "layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 8,
    },
}
"""Families beyond MODEL_TYPES, which test_gguf_config.py reads: config values with which every feature is on."""
SAME_AS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3_moe", "minicpm": "granite"}
"""Architectures whose text part is a family of another name."""
_MINICPM = {**MORE_TYPES["granite"], "attention_multiplier": 16**-0.5}


def models() -> list[tuple[str, str]]:
    """(architecture, model type) of all files that are written here."""
    own = [(ARCH_OF[model_type], model_type) for model_type in MORE_TYPES]
    return [*own, *SAME_AS.items()]


def built(arch: str, model_type: str) -> PreTrainedModel:
    values = _MINICPM if arch == "minicpm" else MORE_TYPES.get(model_type, {})
    model = tiny_model(model_type, **dict(values))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight"):  # 1 is added to some in the file: they must not lose bits by that
                tensor.copy_((tensor * 1024).round() / 1024)
    return model


def test_every_architecture_has_an_entry() -> None:
    """A new architecture in a newer gguf package fails here by name: add it to FAMILIES or REFUSED."""
    known = {name for arch, name in gguf.MODEL_ARCH_NAMES.items() if arch is not gguf.MODEL_ARCH.MMPROJ}
    assert set(FAMILIES) | set(REFUSED) >= known
    assert set(FAMILIES) & set(REFUSED) == set()
    assert set(FAMILIES) == set(ARCHITECTURES)
    tested = {arch for arch, _ in models()} | {ARCH_OF[model_type] for model_type in MODEL_TYPES}
    assert tested == set(FAMILIES)


@pytest.mark.parametrize("arch", sorted(REFUSED))
def test_refusals_say_why(arch: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{arch}' are not supported: {REFUSED[arch]}"):
        check_architecture(arch, FAMILIES)


@pytest.mark.parametrize(("arch", "model_type"), models())
def test_a_file_is_its_model(arch: str, model_type: str, tmp_path: Path) -> None:
    """The config from metadata alone computes the same logits, and every tensor comes back as it was."""
    model = built(arch, model_type)
    opened = open_gguf(write_gguf(model, tmp_path / "m.gguf", arch=arch))
    config = config_of_model(opened)
    assert config.model_type == model_type
    rebuilt = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    assert {n: p.shape for n, p in rebuilt.state_dict().items()} == {n: p.shape for n, p in model.state_dict().items()}
    rebuilt.load_state_dict(model.state_dict())
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        assert torch.equal(rebuilt(tokens).logits, model(tokens).logits)
    for module in rebuilt.modules():
        if type(module).__name__ == "Llama4TextExperts":  # says nothing of its layout, [E, in, out]
            module.is_transposed = True
    check_whole_model(GGUFSource(opened, ModelFacts.of(config)), rebuilt)

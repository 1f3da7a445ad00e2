"""Tiny random models of the families with latent attention, with values under which everything of theirs shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

from tests.support.models.tiny_models import NUM_EXPERTS, random_model, tiny_config

__all__ = [
    "BLOCK_VALUES",
    "INDEXED_TYPES",
    "LATENT_TYPES",
    "WHOLE_TYPES",
    "latent_config",
    "latent_model",
    "latent_values",
]

_LATENT: dict[str, object] = {
    "moe_intermediate_size": 96,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}

_GROWING_ROPE: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,  # queries grow with their position
}

# Sequences of tests are longer than index_topk. With few heads many scores would be 0, and which of them are chosen is
# up to torch's top-k, which does not say.
_INDEX: dict[str, object] = {"index_topk": 16, "index_n_heads": 8, "index_head_dim": 24}

_OF_FAMILIES: dict[str, dict[str, object]] = {
    "bailing_hybrid": {"num_experts": NUM_EXPERTS, "layer_types": ["full_attention"] * 4},
    "deepseek_v32": _INDEX,
    "glm4_moe_lite": {},
    "glm_moe_dsa": {**_INDEX, "indexer_types": ["full", "full", "shared", "shared"]},
    "kimi_linear": {"num_experts": NUM_EXPERTS, "layer_types": ["full_attention"] * 4},
    "longcat_flash": {
        "num_layers": 2,
        "head_dim": 8,
        "moe_topk": 3,
        "zero_expert_num": 3,
        "expert_ffn_hidden_size": 96,
        "ffn_hidden_size": 96,
    },
    "mistral4": {"first_k_dense_replace": 1, "rope_parameters": _GROWING_ROPE},
}
LATENT_TYPES = tuple(_OF_FAMILIES)
WHOLE_TYPES = ("deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minimax_m3_vl_text")
INDEXED_TYPES = ("deepseek_v32", "glm_moe_dsa")
"""Of the two that have other layers beside, the models have none: this is about latent attention.

WHOLE_TYPES are families all of whose layers are compared, by tests/models/attention/test_latent_families.py and
test_sparse_attention.py; INDEXED_TYPES attend to positions that an indexer chooses."""

_UNKNOWN: dict[str, tuple[str, ...]] = {
    "longcat_flash": (
        *("mlp_layer_types", "n_group", "topk_group", "norm_topk_prob"),
        *("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
    ),
    "mistral4": ("mlp_layer_types",),
}

BLOCK_VALUES: dict[str, Any] = {
    "layers": 4,
    "head_dim": 16,
    "rotary_dim": 8,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 96,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 4,
    "index_topk_blocks": 4,
    "index_local_blocks": 1,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
"""Of minimax_m3_vl_text, which attends to chosen blocks of grouped keys, for `tiny_config`."""

_CLASSES: dict[str, Callable[[Any], PreTrainedModel]] = {"mistral4": Mistral4ForCausalLM}
"""Of families that transformers builds by no AutoModelForCausalLM."""


def latent_values(model_type: str, **overrides: object) -> dict[str, Any]:
    """What `tiny_config` is told of four layers, the first of them dense."""
    values = {"layers": 4, **_LATENT, **_OF_FAMILIES[model_type], **overrides}
    return {name: value for name, value in values.items() if name not in _UNKNOWN.get(model_type, ())}


def latent_config(model_type: str, **overrides: object) -> PretrainedConfig:
    """A config with `latent_values`."""
    return tiny_config(model_type, **latent_values(model_type, **overrides))


def latent_model(model_type: str, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A model of `latent_config`, with the weights of `tiny_model`."""
    return random_model(latent_config(model_type, **overrides), seed, make=_CLASSES.get(model_type))

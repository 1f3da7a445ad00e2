"""Tiny random models of families whose GGUF architectures tests/support/gguf/newer.py writes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ktransformers.engine.model.text_models import causal_class
from tests.support.models.latent_models import BLOCK_VALUES
from tests.support.models.pooled_models import pooled_values
from tests.support.models.tiny_models import NUM_EXPERTS, WINDOW, random_model, tiny_config

__all__ = ["CASES", "newer_model"]

FULL, SLIDING = "full_attention", "sliding_attention"
_EXPERTS: dict[str, object] = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED: dict[str, object] = {"n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_YARN: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 3.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
_INDEXED: dict[str, object] = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 8}
_LAGUNA: dict[str, object] = {
    **_EXPERTS,
    "layers": 5,
    "head_dim": 16,
    "num_attention_heads": 8,
    "num_attention_heads_per_layer": [4, 8, 8, 8, 4],
    "layer_types": [FULL, SLIDING, SLIDING, SLIDING, FULL],
    "sliding_window": WINDOW,
    "shared_expert_intermediate_size": 48,
    "moe_routed_scaling_factor": 2.5,
    "rope_parameters": {
        FULL: {**_YARN, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
    },
}
_COHERE: dict[str, object] = {
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "layers": 4,
    "head_dim": 32,
    "layer_types": [FULL, SLIDING, SLIDING, FULL],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "prefix_dense_intermediate_size": 128,
    "sliding_window": WINDOW,
    "logit_scale": 0.25,
    "tie_word_embeddings": True,
}
_GRANITE: dict[str, object] = {
    "layers": 4,
    "layer_types": [FULL, SLIDING, FULL, SLIDING],
    "layer_rope_theta": [0.0, 10000.0, 10000.0, 10000.0],
    "sliding_window": WINDOW,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.25,
    "attention_multiplier": 0.125,
    "logits_scaling": 4.0,
}
_LLAMA3: dict[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "partial_rotary_factor": 0.5,
}
CASES: Mapping[str, tuple[str, str, dict[str, object]]] = {
    "laguna": ("laguna", "laguna", _LAGUNA),
    "laguna, gates of elements": ("laguna", "laguna", {**_LAGUNA, "gating": "per-element"}),
    "mellum": (
        "mellum",
        "mellum",
        {
            "layers": 3,
            "layer_types": [FULL, SLIDING, FULL],
            "rope_parameters": {FULL: _YARN, SLIDING: {"rope_type": "default", "rope_theta": 1000.0}},
        },
    ),
    "cohere2moe": (
        "cohere2moe",
        "cohere2_moe",
        {**_COHERE, "expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    ),
    "cohere2_moe": ("cohere2_moe", "cohere2_moe", {**_COHERE, "rms_norm_eps": 1e-5}),
    "hy_v3": ("hy_v3", "hy_v3", {**_EXPERTS, "layers": 3, "head_dim": 32, "num_shared_experts": 2}),
    "minimax-m3": ("minimax-m3", "minimax_m3_vl_text", {**BLOCK_VALUES, "shared_intermediate_size": 64}),
    "deepseek32": (
        "deepseek32",
        "deepseek_v32",
        {**_ROUTED, **_LATENT, **_INDEXED, "layers": 3, "n_group": 2, "topk_group": 1},
    ),
    "bailingmoe3": (
        "bailingmoe3",
        "bailing_hybrid",
        {
            **_LATENT,
            "layers": 4,
            "moe_intermediate_size": 32,
            "num_local_experts": NUM_EXPERTS,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "head_dim": 32,
            "layer_group_size": 2,
            "num_mtp_layers": 0,
        },
    ),
    "granite_swa": ("granite_swa", "granite_swa", _GRANITE),
    "granite_swa with experts": (
        "granite_swa",
        "granitemoe_swa",
        {**_GRANITE, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
    ),
    "mistral4": (
        "mistral4",
        "mistral4",
        {
            **_ROUTED,
            **_LATENT,
            "layers": 3,
            "first_k_dense_replace": 1,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "step35": (
        "step35",
        "step3p5",
        {
            **_ROUTED,
            "layers": 4,
            "head_dim": 32,
            "num_sliding_attention_heads": 8,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "sliding_window": WINDOW,
            "share_expert_dim": 48,
            "moe_router_scaling_factor": 3.0,
            "swiglu_limits": [0.0, 0.0, 0.5, 0.0],
            "swiglu_limits_shared": [0.0, 0.0, 0.0, 0.5],
            "rope_parameters": {
                FULL: _LLAMA3,
                SLIDING: {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "glm5-next": ("glm5-next", "glm5_next_text", {**pooled_values("glm5_next_text"), "layers": 4}),
    "hy_v4": (
        "hy_v4",
        "hy_v4",
        {
            **_ROUTED,
            **_LATENT,
            **_INDEXED,
            "layers": 4,
            "indexer_types": ["full", "full", "shared", "full"],
            "swiglu_limit": 0.5,
            "hc_mult": 3,
        },
    ),
    "chatglm": (
        "chatglm",
        "glm",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "exaone": ("exaone", "llama", {"head_dim": 16, "tie_word_embeddings": True}),
    "minicpm3": ("minicpm3", "minicpm3", {**_LATENT, "v_head_dim": 16}),
    "youtu": ("deepseek2", "youtu", _LATENT),
}
"""Name -> architecture of the file, model type, config values."""


def newer_model(name: str) -> PreTrainedModel:
    """A random model of CASES, in fp32."""
    _, model_type, values = CASES[name]
    config: PretrainedConfig = tiny_config(model_type, **{"pad_token_id": 0, **values})  # type: ignore[arg-type]
    model = random_model(config, 1, make=lambda given: causal_class(given)._from_config(given, dtype=torch.float32))
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if key.endswith("A_log"):
                tensor.copy_(tensor - 1.0)  # states forget neither all nor nothing
    return model

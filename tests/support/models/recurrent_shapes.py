"""Tiny configs of families with recurrent layers, in four layers of which some attend."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PretrainedConfig

from tests.support.models.tiny_models import tiny_config

_TURNS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_EXPERTS: dict[str, object] = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}
_DELTA: dict[str, object] = {
    "layer_types": _TURNS,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,  # no multiple of two by two: a wrong order of heads shows
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_STATES_ONLY: dict[str, object] = dict.fromkeys(
    ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rope_parameters")
)
"""What configs of families without attention do not say."""
_MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
_DELTA_35 = {**_DELTA, "rope_parameters": {**_DELTA["rope_parameters"], **_MROPE}}  # type: ignore[dict-item]
_MAMBA2: dict[str, object] = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12}

RECURRENT: Mapping[str, dict[str, object]] = {
    "qwen3_next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": []},
    "qwen3_5_text": _DELTA_35,
    "qwen3_5_moe_text": {**_DELTA_35, **_EXPERTS, "shared_expert_intermediate_size": 48},
    "kimi_linear": {
        "layer_types": _TURNS,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "moe_intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 6,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "nemotron_h": {
        **_MAMBA2,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "head_dim": 16,
        "n_routed_experts": 8,
        "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 2.5,
    },
    "nemotron_h dense": {
        **_MAMBA2,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "head_dim": 16,
    },
    "nemotron_h latent": {
        **_MAMBA2,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "head_dim": 16,
        "n_routed_experts": 8,
        "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": 32,
    },
    "granitemoehybrid": {
        "layer_types": _TURNS,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.25,
        "attention_multiplier": 0.125,
        "logits_scaling": 4.0,
    },
    "granitemoehybrid dense": {
        "layer_types": _TURNS,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_d_state": 12,
        "mamba_dt_rank": 5,
    },
    "falcon_h1": {
        "head_dim": 16,
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "mamba_d_ssm": 96,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
    "falcon_h1 without norm": {
        "head_dim": 16,
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
        "mamba_d_state": 12,
        "mamba_d_ssm": 96,
        "mamba_norm_before_gate": False,
    },
    "mamba": {**_STATES_ONLY, "intermediate_size": 128, "state_size": 12, "time_step_rank": 5},
    "falcon_mamba": {**_STATES_ONLY, "intermediate_size": 128, "state_size": 12, "time_step_rank": 5},
    "mamba2": {**_STATES_ONLY, "state_size": 12, "num_heads": 8, "head_dim": 16, "n_groups": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "tie_word_embeddings": True},
    "lfm2_moe": {
        **_EXPERTS,
        "layer_types": ["conv", "full_attention"] * 2,
        "num_dense_layers": 1,
        "tie_word_embeddings": True,
    },
}
"""Values by model type; a second word tells variants apart."""


def recurrent_config(name: str, **overrides: object) -> PretrainedConfig:
    """The config of RECURRENT of that name."""
    return tiny_config(name.split()[0], layers=4, **{**RECURRENT[name], **overrides})

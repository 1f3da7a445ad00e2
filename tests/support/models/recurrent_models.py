"""Tiny random models of the families with recurrent layers. Every kind of layer is in each of them."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.models.tiny_models import NUM_EXPERTS, VOCAB_SIZE, random_model

_COMMON: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_DELTA: dict[str, object] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 32,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
    "layer_types": _KINDS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_MLA: dict[str, object] = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
FALCON_MULTIPLIERS: dict[str, object] = {
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.75, 1.5],
    "key_multiplier": 0.25,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.875,
    "ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 0.625],
    "ssm_in_multiplier": 1.75,
    "ssm_out_multiplier": 0.375,
}
"""Of Falcon-H1, none of them 1."""

_VALUES: dict[str, dict[str, object]] = {
    "bailing_hybrid": {
        **_MLA,
        "q_lora_rank": 32,
        "layer_types": _KINDS,
        "linear_head_dim": 16,
        "linear_num_heads": 6,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 2,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "qwen3_next": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "lfm2_moe": {
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "num_dense_layers": 1,
        "conv_bias": True,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "jamba": {
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 12,
        "mamba_proj_bias": True,
    },
    "nemotron_h": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "head_dim": 16,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 48,
        "n_group": 1,
        "topk_group": 1,
    },
    "granitemoehybrid": {
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "layer_types": _KINDS,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_d_head": 16,
        "mamba_expand": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "position_embedding_type": "rope",
    },
    "kimi_linear": {
        **_MLA,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 48,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": _KINDS,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "minimax": {
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "layer_types": _KINDS,
        "block_size": 16,
        "linear_attn_alpha_factor": 1.5,
        "head_dim": 16,
    },
    "zaya": {
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 48,
        "router_hidden_size": 32,
        "head_dim": 16,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid"],
        "sliding_window": 16,
        "attention_bias": True,
        "cca_time0": 3,
        "cca_time1": 3,
    },
    "olmo_hybrid": {
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": _KINDS,
    },
    "falcon_h1": {
        "head_dim": 16,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        **FALCON_MULTIPLIERS,
    },
    "zamba": {
        "tie_word_embeddings": True,  # and blocks with them
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 12,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 16,
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "use_mem_rope": True,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
    },
    "recurrent_gemma": {
        "head_dim": 16,
        "lru_width": 80,
        "attention_window_size": 24,  # its third layer's
    },
    "lfm3": {
        "head_dim": 16,
        "sliding_window": 24,
        "conv_bias": True,
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    },
    "mamba": {"state_size": 8, "time_step_rank": 12},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 12},
    "mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2},
}
RECURRENT_TYPES = tuple(_VALUES)
STATES_ONLY = frozenset({"mamba", "falcon_mamba", "mamba2"})
"""Families without any attention, whose configs say nothing of heads and positions."""
_OF_OTHERS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")


def recurrent_values(model_type: str) -> dict[str, object]:
    """Of its config."""
    left_out = _OF_OTHERS if model_type in STATES_ONLY else ()
    common = {name: value for name, value in _COMMON.items() if name not in left_out}
    return {**common, **_VALUES[model_type]}


def recurrent_config(model_type: str, **overrides: object) -> PretrainedConfig:
    config: PretrainedConfig = CONFIG_MAPPING[model_type](**{**recurrent_values(model_type), **overrides})
    return config


def recurrent_model(model_type: str, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """In fp32, with weights as tiny_model's. Decays are such that a state forgets neither all nor nothing."""
    model = random_model(recurrent_config(model_type, **overrides), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("A_log"):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator) - 1.0)
            elif name.endswith("recurrent_param"):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator) - 3.0)
            elif "conv" in name.rsplit(".", 2)[-2] and parameter.dim() == 3:
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model

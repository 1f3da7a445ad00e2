"""Tiny random models for images and text, of which the text part is run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from tests.support.models.tiny_models import fill_randomly, tiny_config

_VISION: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "projection_hidden_size": 32,
    "deepstack_visual_indexes": [],
    "image_size": 28,
    "num_position_embeddings": 16,
}
"""Under all names that vision configs have for their sizes; each takes those that it knows."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_EXPERTS: dict[str, object] = {"moe_intermediate_size": 96, "num_experts_per_tok": 2}
_DEEPSEEK_EXPERTS: dict[str, object] = {
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_GATED_DELTA_NET: dict[str, object] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}

COMPOSITES: Mapping[str, tuple[str, dict[str, object]]] = {
    "kimi_k25": ("deepseek_v3", {}),
    "mistral3": ("mistral", {}),
    "mistral3 of mistral4": (
        "mistral4",
        {
            **_DEEPSEEK_EXPERTS,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "gemma3": ("gemma3_text", {}),
    "qwen3_vl": ("qwen3_vl_text", {"head_dim": 16, "rope_parameters": _ROPE}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", {**_EXPERTS, "num_experts": 8, "head_dim": 16, "rope_parameters": _ROPE}),
    "glm4v": ("glm4v_text", {"rope_parameters": _ROPE}),
    "glm46v": ("glm4v_text", {"rope_parameters": _ROPE}),
    "glm4v_moe": (
        "glm4v_moe_text",
        {**_DEEPSEEK_EXPERTS, "head_dim": 32, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    ),
    "ernie4_5_vl_moe": (
        "ernie4_5_vl_moe_text",
        {
            "moe_intermediate_size": [96, 48],
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
        },
    ),
    "granite4_vision": (
        "granite4_vision_text",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 4.0},
    ),
    "granite_docling": (
        "granite_docling_text",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 4.0},
    ),
    "idefics3": ("llama", {}),
    "molmo2": ("molmo2_text", {"head_dim": 16}),
    "paligemma": ("gemma", {}),
    "paligemma of gemma2": (
        "gemma2",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    ),
    "exaone4_5": ("exaone4", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}),
    "step3p7": (
        "step3p5",
        {
            **_EXPERTS,
            "head_dim": 16,
            "n_routed_experts": 8,
            "share_expert_dim": 48,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": None,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 128,
            "num_local_experts": 8,
            "attention_chunk_size": 16,
            "moe_layers": [1],
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 16,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 160,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": None,
        },
    ),
    "qwen3_5": ("qwen3_5_text", _GATED_DELTA_NET),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**_GATED_DELTA_NET, **_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48},
    ),
    "minimax_m3_vl": (
        "minimax_m3_vl_text",
        {
            "head_dim": 16,
            "rotary_dim": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 48,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "glm5_next": (
        "glm5_next_text",
        {
            **_DEEPSEEK_EXPERTS,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "index_topk": 16,
            "index_kpool": 4,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "qwen4_exp": (
        "qwen4_exp_text",
        {
            **_GATED_DELTA_NET,
            **_EXPERTS,
            "num_experts": 8,
            "shared_expert_intermediate_size": 48,
            "hc_lowrank": 16,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
    ),
}
"""Model types, the types of their text configs, and values of those."""

WHOLE: Mapping[str, dict[str, object]] = {
    "paligemma": {
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "projection_dim": 64,
        "hidden_size": 64,
    },
    "idefics3": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
        "scale_factor": 2,
    },
    "molmo2": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "image_size": [56, 56],
            "patch_size": 14,
        },
        "adapter_config": {
            "vision_feature_layer": [2, 1],
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 48,
            "text_hidden_size": 64,
        },
    },
    "granite_docling": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "scale_factor": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "granite4_vision": {
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 64,  # which its projectors follow
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "qformer_config": {
            "model_type": "blip_2_qformer",
            "num_hidden_layers": 1,
            "intermediate_size": 48,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": False,
        },
        "vision_feature_select_strategy": "full",
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "image_grid_pinpoints": [[56, 56], [112, 168], [224, 112]],
    },
}
"""By model type: values of the composite's own config, which are small enough as they are."""


def tiny_composite(name: str, seed: int = 0, **text_values: object) -> PreTrainedModel:
    """A composite of COMPOSITES with two layers of text and one of images, in fp32 and eval mode."""
    text_type, values = COMPOSITES[name]
    text = tiny_config(text_type, **{**values, **text_values}).to_dict()
    model_type = name.split()[0]
    config = CONFIG_MAPPING[model_type](text_config=text, **WHOLE.get(model_type, {}))
    for part in (config.vision_config, config):
        if part is not None and model_type not in WHOLE:
            _shrink(part)
    config.tie_word_embeddings = False
    config._attn_implementation = "eager"
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    fill_randomly(model, seed)
    return model.eval()


def _shrink(config: PretrainedConfig) -> None:
    for name, value in _VISION.items():
        if name in config.__dict__:
            setattr(config, name, value)

"""Tiny random models for images and text, of which the text part is run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from tests.support.tiny_models import fill_randomly, tiny_config

_VISION: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
}
"""Under all names that vision configs have for their sizes; each takes those that it knows."""

_MROPE: dict[str, object] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
}

COMPOSITES: Mapping[str, tuple[str, dict[str, object]]] = {
    "kimi_k25": ("deepseek_v3", {}),
    "mistral3": ("mistral", {}),
    "qwen3_vl": ("qwen3_vl_text", {**_MROPE, "head_dim": 16}),
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text",
        {**_MROPE, "head_dim": 16, "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "glm4v": ("glm4v_text", {**_MROPE}),
    "glm46v": ("glm4v_text", {**_MROPE}),
    "glm4v_moe": (
        "glm4v_moe_text",
        {
            "rope_parameters": {**_MROPE["rope_parameters"], "partial_rotary_factor": 0.5},  # type: ignore[dict-item]
            "head_dim": 32,
            "moe_intermediate_size": 96,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
"""Model types, the types of their text configs, and values of those."""


def tiny_composite(model_type: str, seed: int = 0, **text_values: object) -> PreTrainedModel:
    """A composite of `model_type` with two layers of text and one of images, in fp32 and eval mode."""
    text_type, values = COMPOSITES[model_type]
    text = tiny_config(text_type, **{**values, **text_values}).to_dict()
    config = CONFIG_MAPPING[model_type](text_config=text)
    vision = config.vision_config
    for name, value in _VISION.items():
        if hasattr(vision, name):
            setattr(vision, name, value)
    config.tie_word_embeddings = False
    config._attn_implementation = "eager"
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    fill_randomly(model, seed)
    return model.eval()

"""Tiny configs of families whose attention has something of its own: shapes by layer, shared keys, chunks, gates.

Windows and chunks are of 16 positions, shorter than the prompts of the tests. Widths are odd where that is allowed.
"""

from __future__ import annotations

from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.support.models.tiny_models import NUM_EXPERTS, VOCAB_SIZE, WINDOW

__all__ = ["CASES", "COMMON", "config_of"]

S, F = "sliding_attention", "full_attention"
COMMON: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, object] = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
_ROUTED: dict[str, object] = {"n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
_ROTATIONS: dict[str, object] = {
    S: {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
    F: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_GEMMA: dict[str, object] = {
    "layer_types": [S, F, S, S, F],
    "sliding_window": WINDOW,
    "head_dim": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
}
_LLAMA4: dict[str, object] = {
    "head_dim": 16,
    "attention_chunk_size": WINDOW,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 1,
    "no_rope_layers": [1, 0, 1, 0],
    "floor_scale": 8,
}

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "gemma4": ("gemma4_text", {**_GEMMA, "global_head_dim": 32}),
    "gemma4-shared": (
        "gemma4_text",
        {**_GEMMA, "global_head_dim": 44, "hidden_size": 76, "num_kv_shared_layers": 3, "layer_types": [S, F, S, S, F],
         "use_double_wide_mlp": True, "tie_word_embeddings": True, "final_logit_softcapping": 30.0},
    ),
    "gemma4-moe": (
        "gemma4_text",
        {**_GEMMA, **_EXPERTS, "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
         "hidden_size_per_layer_input": 0, "enable_moe_block": True, "top_k_experts": 2},
    ),
    "gemma3n": (
        "gemma3n_text",
        {**_GEMMA, "num_kv_shared_layers": 2, "laurel_rank": 8, "altup_num_inputs": 3,
         "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0, 0.0]},
    ),
    "llama4": ("llama4_text", _LLAMA4),
    "llama4-two-experts": (
        "llama4_text",
        {**_LLAMA4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "use_qk_norm": False,
         "attention_bias": True, "intermediate_size_mlp": 100, "num_key_value_heads": 4, "hidden_size": 76},
    ),
    "llama4-narrow": (
        "llama4_text", {**_LLAMA4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    ),
    "laguna": (
        "laguna",
        {**_EXPERTS, "head_dim": 16, "sliding_window": WINDOW, "layer_types": [F, S, S, F],
         "num_attention_heads_per_layer": [4, 6, 6, 4], "rope_parameters": _ROTATIONS,
         "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "shared_expert_intermediate_size": 96},
    ),
    "laguna-gates": (
        "laguna",
        {**_EXPERTS, "head_dim": 24, "hidden_size": 76, "sliding_window": WINDOW, "layer_types": [S, S, F, F],
         "num_attention_heads_per_layer": [2, 6, 4, 4], "rope_parameters": _ROTATIONS, "gating": "per-element",
         "mlp_layer_types": ["sparse"] * 4, "shared_expert_intermediate_size": 100, "attention_bias": True},
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {**_ROUTED, "head_dim": 24, "v_head_dim": 16, "sliding_window": WINDOW, "layer_types": [F, S, S, F]},
    ),
    "mimo_v2_flash-wide-values": (
        "mimo_v2_flash",
        {**_ROUTED, "head_dim": 20, "v_head_dim": 36, "hidden_size": 76, "num_key_value_heads": 1,
         "attention_bias": True, "sliding_window": WINDOW, "layer_types": [S, S, S, F], "n_group": 4, "topk_group": 2},
    ),
    "cohere2_moe": (
        "cohere2_moe",
        {**_EXPERTS, "head_dim": 16, "sliding_window": WINDOW, "layer_types": [S, S, S, F]},
    ),
    "solar_open": ("solar_open", {**_ROUTED, "head_dim": 16, "n_shared_experts": 1}),
    "hy_v3": ("hy_v3", {**_EXPERTS, "head_dim": 16, "num_shared_experts": 1}),
    "flex_olmo": ("flex_olmo", {**_EXPERTS}),
    "granitemoeshared": (
        "granitemoeshared",
        {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "shared_intermediate_size": 96},
    ),
    "cohere_compass": (  # positions by time, height and width
        "cohere_compass_text",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": [S, S, S, F],
         "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1000.0} for kind in (S, F)}},
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "nemotron": ("nemotron", {}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
}  # fmt: skip
"""By name: model_type, and values of its config besides the common ones."""


def config_of(name: str, **values: object) -> PretrainedConfig:
    model_type, own = CASES[name]
    layers = own.get("layer_types")
    count = len(layers) if isinstance(layers, list) else 4
    config: PretrainedConfig = CONFIG_MAPPING[model_type](**{**COMMON, "num_hidden_layers": count, **own, **values})
    return config

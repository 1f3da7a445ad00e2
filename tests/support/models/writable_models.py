"""Tiny models that `quantize` writes, and those that it refuses because llama.cpp opens no such file."""

from __future__ import annotations

__all__ = ["FACTORS", "LONGROPE", "REFUSED", "WRITTEN"]

_CONTEXTS = {"max_position_embeddings": 2048}
LONGROPE: dict[str, object] = {
    **_CONTEXTS,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 512,
    },
}
FACTORS: dict[str, object] = {
    **_CONTEXTS,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
LINEAR: dict[str, object] = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
YARN: dict[str, object] = {
    **_CONTEXTS,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}
_TIED: dict[str, object] = {"tie_word_embeddings": True}
_BIAS: dict[str, object] = {"attention_bias": True}
_EVEN: dict[str, object] = {"num_key_value_heads": 4}

WRITTEN: list[tuple[str, dict[str, object]]] = [
    *[("llama", values) for values in ({}, _BIAS, {"mlp_bias": True}, _TIED, LINEAR, YARN, LONGROPE, FACTORS)],
    *[("mistral", {"sliding_window": None}), ("mixtral", {"sliding_window": None})],
    *[("qwen2", values) for values in ({}, _TIED, LINEAR, YARN)],
    *[("qwen3", values) for values in ({}, _TIED, LINEAR, YARN)],
    *[("qwen2_moe", values) for values in ({}, LINEAR)],
    *[("qwen3_moe", values) for values in ({}, _TIED, YARN)],
    *[("deepseek_v2", {"q_lora_rank": 32}), ("deepseek_v3", {}), ("deepseek_v3", _TIED)],
    *[("dots1", _EVEN), ("olmoe", _EVEN)],
    *[("ernie4_5_moe", values) for values in ({}, _TIED, LINEAR, YARN, {"moe_num_shared_experts": 0})],
    *[("glm4_moe", values) for values in ({}, _BIAS, {"use_qk_norm": False}, LINEAR, YARN)],
    ("gpt_oss", {}),
    *[("granitemoe", values) for values in ({}, _BIAS, _TIED, LONGROPE)],
    *[("hunyuan_v1_moe", values) for values in ({}, _TIED)],
    *[("minimax_m2", values) for values in ({}, YARN)],
    ("phimoe", {}),
]
"""What llama.cpp opens. It computes gpt_oss and phimoe otherwise: docs/quantize.md."""

REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("qwen2", LONGROPE, r"qwen2 file.*rope_factors_long\.weight"),
    ("qwen2_moe", FACTORS, r"qwen2moe file.*rope_freqs\.weight"),
    ("qwen2_moe", _TIED, r"asks for output\.weight"),
    ("qwen3", _BIAS, r"does not read blk\.0\.attn_output\.bias"),
    ("qwen3_moe", _BIAS, r"does not read blk\.0\.attn_output\.bias"),
    ("qwen3_moe", FACTORS, r"rope_freqs\.weight"),
    ("deepseek_v2", {}, "queries without a latent"),
    ("deepseek_v2", {"q_lora_rank": 32, "attention_bias": True}, r"does not read blk\.0\.attn_(q_a|kv_a_mqa)\.bias"),
    ("deepseek_v3", _BIAS, r"does not read blk\.0\.attn_(q_a|kv_a_mqa)\.bias"),
    ("deepseek_v3", LONGROPE, r"rope_factors_long\.weight"),
    ("deepseek_v3", {"n_group": 2, "topk_group": 2}, "2 of 2 groups of experts"),
    ("dots1", {}, "2 heads of keys for 4 of queries"),
    ("dots1", {**_EVEN, **_TIED}, r"asks for output\.weight"),
    ("dots1", {**_EVEN, **_BIAS}, r"attn_output\.bias"),
    ("ernie4_5_moe", {"use_bias": True}, r"does not read blk\.0\.ffn_(gate|up|down)\.bias"),
    ("ernie4_5_moe", FACTORS, r"rope_freqs\.weight"),
    ("glm4_moe", LONGROPE, r"rope_factors_long\.weight"),
    ("gpt_oss", _TIED, r"asks for output\.weight"),
    ("gpt_oss", {"attention_bias": False}, r"asks for blk\.0\.attn_output\.bias"),
    ("hunyuan_v1_moe", _BIAS, r"does not read blk\.0\.attn_output\.bias"),
    ("minimax_m2", FACTORS, r"rope_freqs\.weight"),
    ("minimax_m2", _TIED, r"asks for output\.weight"),
    ("olmoe", {}, "2 heads of keys for 4 of queries"),
    ("olmoe", {**_EVEN, **_BIAS}, r"does not read blk\.0\.attn_output\.bias"),
    ("phimoe", _TIED, r"asks for output\.weight"),
    ("phimoe", {"attention_bias": False}, r"asks for blk\.0\.attn_output\.bias"),
]
"""And what the message must name."""

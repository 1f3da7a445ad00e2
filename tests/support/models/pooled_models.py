"""Tiny random models of the families whose attention sees pools of positions that an indexer chooses."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ktransformers.engine.model.text_models import causal_class
from tests.support.models.tiny_models import NUM_EXPERTS, VOCAB_SIZE, random_model

__all__ = ["EOS", "POOLED_TYPES", "pooled_config", "pooled_model", "pooled_values"]

EOS = 2
_COMMON: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
}
# 16 positions are chosen, and up to 3 behind them. With few index heads many scores would be 0, and which of them are
# chosen is up to torch's top-k, which does not say.
_VALUES: dict[str, dict[str, object]] = {
    "glm5_next_text": {
        "num_key_value_heads": 4,
        "n_routed_experts": NUM_EXPERTS,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
        "indexer_types": ["full", "full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "index_topk": 16,
        "index_kpool": 4,
        "index_n_heads": 16,
        "index_head_dim": 24,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 4,
        "swiglu_limit": 0.5,  # so that it shows
    },
    "qwen4_exp_text": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": NUM_EXPERTS,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "output_gate_type": "sigmoid",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
        "hc_count": 3,
        "hc_lowrank": 16,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32,
        "ngram_size": 3,
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 200,
        "split_ngram_parts": 12,  # more than sort by their names alone
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 24,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
}
POOLED_TYPES = tuple(_VALUES)


def pooled_values(model_type: str) -> dict[str, Any]:
    """Of its config."""
    return {**_COMMON, **_VALUES[model_type]}


def pooled_config(model_type: str, **overrides: object) -> PretrainedConfig:
    config: PretrainedConfig = CONFIG_MAPPING[model_type](**{**pooled_values(model_type), **overrides})
    return config


def pooled_model(model_type: str, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """In fp32, with weights as tiny_model's. States forget neither all nor nothing, and convolutions show."""
    config = pooled_config(model_type, **overrides)
    model = random_model(config, seed, make=lambda given: causal_class(given)._from_config(given, dtype=torch.float32))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("A_log"):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator) - 1.0)
            elif name.endswith("conv1d.weight"):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model

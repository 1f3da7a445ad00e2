"""Tiny random Hugging Face models of every family that the tests cover."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ktransformers.models.synthetic_shapes import PublishedShape

DENSE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
WINDOW = 16  # positions that a layer with a window sees
WINDOWED_TYPES = (
    "mistral",
    "mixtral",
    "ministral3",
    "gemma2",
    "gemma3_text",
    "olmo3",
    "exaone_moe",
    "mellum",
    "gpt_oss",
)
"""Families whose tiny models have layers with windows, alone or in turn with others."""
UNROTATED_TYPES = ("smollm3", "exaone_moe", "afmoe")
"""Families of which some layers do not rotate queries and keys."""
MOE_TYPES = (
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "mixtral",
    "olmoe",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "ernie4_5_moe",
    "phimoe",
    "dots1",
    "minimax_m2",
    "hunyuan_v1_moe",
)
MODEL_TYPES = (*DENSE_TYPES, *MOE_TYPES)

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
    "original_max_position_embeddings": 24,
    "factor": 4.0,
    "partial_rotary_factor": 1.0,
}
SCALED_ROPES = {
    "phi3": (
        _LONGROPE,
        {"max_position_embeddings": 96, "original_max_position_embeddings": 24, "sliding_window": None},
    ),
    "phimoe": (
        {**_LONGROPE, "long_mscale": 1.2, "short_mscale": 1.1},
        {"max_position_embeddings": 96, "original_max_position_embeddings": 24},
    ),
    "llama": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, {"max_position_embeddings": 24}),
}
"""Families with rotations whose factors depend on the longest sequence: rope_parameters, and further values."""

NUM_EXPERTS = 8
VOCAB_SIZE = 160


def tiny_config(model_type: str, *, hidden: int = 64, layers: int = 2, **overrides: object) -> PretrainedConfig:
    """A config of `model_type` in which every feature of the family is on.

    hidden 64 gives experts 96 wide (no multiple of 64), hidden 256 gives 256 (which K-quants need). There are 8 experts
    of which 2 or 4 are used, 4 heads, 2 KV heads, and a head_dim that is not hidden / heads where a family allows it.
    """
    inner = hidden * 3 // 2 if hidden % 256 else hidden
    values: dict[str, object] = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    values.update(_FAMILY_VALUES.get(model_type, lambda inner, layers: {})(inner, layers))
    values.update(copy.deepcopy(overrides))  # configs write into dictionaries that they are given
    config: PretrainedConfig = CONFIG_MAPPING[model_type](**values)
    return config


def tiny_model(model_type: str, seed: int = 0, **config_values: object) -> PreTrainedModel:
    """A model of tiny_config(model_type, **config_values) in fp32 and eval mode.

    Weights are normal with a standard deviation of 1 / sqrt(fan in), so that activations neither vanish nor explode;
    norms are near 1; biases, sinks and correction biases are small but not zero, so that losing one shows.
    """
    return random_model(tiny_config(model_type, **config_values), seed)


def random_model(
    config: PretrainedConfig,
    seed: int = 0,
    auto: type = AutoModelForCausalLM,
    make: Callable[[Any], PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """A model of `config` with tiny_model's weights. auto: the class of transformers that makes it; make: what does
    where none does."""
    config._attn_implementation = "eager"
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32) if make is None else make(config)  # type: ignore[attr-defined]
    fill_randomly(model, seed)
    return model.eval()


def fill_randomly(model: PreTrainedModel, seed: int) -> None:
    """Give `model` tiny_model's weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters())
    tensors.update({name: b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")})
    tables = {name: b for name, b in model.named_buffers() if name.endswith("tid2eid")}  # experts of each token
    with torch.no_grad():
        for _, table in sorted(tables.items()):
            table.copy_(
                torch.rand(len(table), int(model.config.num_local_experts), generator=generator).argsort()[
                    :, : table.shape[1]
                ]
            )
        for name, tensor in sorted(tensors.items()):
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                tensor.copy_(1 + 0.1 * noise)
            elif tensor.dim() < 2 or name.endswith("bias"):
                tensor.copy_(0.1 * noise)
            elif "embed_tokens" in name:
                tensor.copy_(noise)
            else:
                fan_in = tensor.shape[-2] if _is_transposed(model.config, name) else tensor.shape[-1]
                tensor.copy_(noise * max(fan_in, 1) ** -0.5)


def write_safetensors(model: PreTrainedModel, folder: Path, max_shard_size: str = "1GB") -> Path:
    """Save in the layout of published checkpoints (transformers undoes its own renames and fusions)."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def _is_transposed(config: PretrainedConfig, name: str) -> bool:
    return config.model_type == "gpt_oss" and ".experts." in name


def _qwen2_moe(inner: int, layers: int) -> dict[str, object]:
    return {
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "mlp_only_layers": [],
    }


def _qwen3_moe(inner: int, layers: int) -> dict[str, object]:
    return {
        "moe_intermediate_size": inner,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 4,
        "head_dim": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _deepseek_v2(inner: int, layers: int) -> dict[str, object]:
    return {
        "moe_intermediate_size": inner,
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    }


def _deepseek_v3(inner: int, layers: int) -> dict[str, object]:
    return {
        **_deepseek_v2(inner, layers),
        "q_lora_rank": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }


def deepseek_v4_values(layers: int) -> dict[str, object]:
    """Layers of every kind that the family has, in turn, and routers of both."""
    kinds = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    return {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "sliding_window": WINDOW,
        "layer_types": [kinds[(i + 1) % 3] for i in range(layers)],
        "mlp_layer_types": [("hash_moe", "moe")[i > 0] for i in range(layers)],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 4,
        "index_n_heads": 16,  # with few, many entries score 0, and which of them are chosen is left to chance
        "index_head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 24,
        "rope_parameters": None,  # of its own, two of them
    }


def _deepseek_v4(inner: int, layers: int) -> dict[str, object]:
    experts = {"moe_intermediate_size": inner, "n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
    return {**deepseek_v4_values(layers), **experts}


def _glm4_moe(inner: int, layers: int) -> dict[str, object]:
    return {
        "moe_intermediate_size": inner,
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "head_dim": 32,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }


def _gpt_oss(inner: int, layers: int) -> dict[str, object]:
    return {
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "sliding_window": 16,
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(layers)],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    }


def _granitemoe(inner: int, layers: int) -> dict[str, object]:
    return {
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.25,
        "attention_multiplier": 0.125,
        "logits_scaling": 4.0,
    }


def _ernie(inner: int, layers: int) -> dict[str, object]:
    return {
        "moe_intermediate_size": inner,
        "moe_num_experts": NUM_EXPERTS,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": layers - 1,
        "moe_layer_interval": 1,
    }


def _dots1(inner: int, layers: int) -> dict[str, object]:
    return {
        "moe_intermediate_size": inner,
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "head_dim": 32,
        "sliding_window": None,
        "layer_types": ["full_attention"] * layers,
    }


def _in_turn(layers: int) -> dict[str, object]:
    """A window in every other layer, the first one included."""
    return {
        "sliding_window": WINDOW,
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(layers)],
    }


_TWO_ROTATIONS: dict[str, object] = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    }
}


_MINISTRAL_ROPE: dict[str, object] = {
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


def _sigmoid_experts(inner: int) -> dict[str, object]:
    return {
        "moe_intermediate_size": inner,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
    }


def _exaone_moe(inner: int, layers: int) -> dict[str, object]:
    kinds = ["dense"] + ["sparse"] * (layers - 1)
    return {**_sigmoid_experts(inner), **_in_turn(layers), "mlp_layer_types": kinds}


def _afmoe(inner: int, layers: int) -> dict[str, object]:
    return {**_sigmoid_experts(inner), **_in_turn(layers), "num_dense_layers": 1}


def _mellum(inner: int, layers: int) -> dict[str, object]:
    return {**_sigmoid_experts(inner), **_in_turn(layers), **_TWO_ROTATIONS}


_FAMILY_VALUES = {
    "qwen3": lambda inner, layers: {"head_dim": 32},
    "mistral": lambda inner, layers: {"head_dim": 32, "sliding_window": WINDOW},
    "ministral3": lambda inner, layers: {"head_dim": 32, "sliding_window": WINDOW, "rope_parameters": _MINISTRAL_ROPE},
    "gemma2": lambda inner, layers: {**_in_turn(layers), "head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": lambda inner, layers: {**_in_turn(layers), **_TWO_ROTATIONS, "head_dim": 16},
    "olmo3": lambda inner, layers: {**_in_turn(layers), **_TWO_ROTATIONS},
    "smollm3": lambda inner, layers: {"no_rope_layers": [(i + 1) % 2 for i in range(layers)]},
    "exaone_moe": _exaone_moe,
    "afmoe": _afmoe,
    "mellum": _mellum,
    "mixtral": lambda inner, layers: {
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
    },
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v4": _deepseek_v4,
    "olmoe": lambda inner, layers: {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "ernie4_5_moe": _ernie,
    "phimoe": lambda inner, layers: {
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "dots1": _dots1,
    "minimax_m2": lambda inner, layers: {
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "hunyuan_v1_moe": lambda inner, layers: {
        "num_experts": NUM_EXPERTS,
        "moe_topk": [2] * layers,
        "head_dim": 16,
    },
}


def made_shape(name: str, num_layers: int, make: Callable[[int], PretrainedConfig]) -> PublishedShape:
    """A shape for --synthetic whose config for so many layers is what `make` returns."""

    def kind(*, num_hidden_layers: int, **_: object) -> PretrainedConfig:
        return make(num_hidden_layers)

    return PublishedShape(name, num_layers, cast(type[PretrainedConfig], kind), "", lambda num_layers: {})

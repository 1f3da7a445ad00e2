"""Shapes of published models as configs built in code, for measuring without their files. Knows no weights.

The values are those of the models' own config.json on the Hugging Face hub; only the number of layers can be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV4Config,
    Glm5NextTextConfig,
    GptOssConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen4ExpTextConfig,
)

from ktransformers.errors import ConfigError

__all__ = ["SHAPES", "PublishedShape", "find_shape", "small_config"]


@dataclass(frozen=True, slots=True)
class PublishedShape:
    """Shape of a published model, by name. num_layers: of the whole model; values(n): what the config says with the
    first n of them. has_mtp: whether its files hold a layer for multi-token prediction.
    """

    name: str
    num_layers: int
    kind: type[PretrainedConfig]
    architecture: str
    values: Callable[[int], dict[str, object]]
    has_mtp: bool = False

    def config(self, num_layers: int | None = None) -> PretrainedConfig:
        """Return the config with `num_layers` layers, all by default. Raises ConfigError when the model has not so
        many.
        """
        count = self.num_layers if num_layers is None else num_layers
        if not 1 <= count <= self.num_layers:
            raise ConfigError(f"--layers {count}: {self.name} has 1 to {self.num_layers} layers")
        common = {"architectures": [self.architecture], "num_hidden_layers": count, "tie_word_embeddings": False}
        ends = {"bos_token_id": None, "eos_token_id": None}  # answers go on
        return self.kind(**{**common, **ends, **self.values(count)})


def _yarn(factor: float, original: int, theta: float = 10000.0, **more: object) -> dict[str, object]:
    rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}
    return {**rope, "beta_fast": 32.0, "beta_slow": 1.0, **more}


def _qwen3_30b_a3b(num_layers: int) -> dict[str, object]:
    return {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_GATED_DELTA_NET: dict[str, object] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
}
"""What all families of Qwen with recurrent layers share; every fourth layer attends."""


def _recurrent_first(num_layers: int) -> list[str]:
    return ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)]


def _qwen3_6_35b_a3b(num_layers: int) -> dict[str, object]:
    rope = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
    return dict(
        vocab_size=248320,
        layer_types=_recurrent_first(num_layers),
        num_experts=256,
        num_experts_per_tok=8,
        rope_parameters={**rope, "mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        **_GATED_DELTA_NET,
    )


def _qwen3_coder_next(num_layers: int) -> dict[str, object]:
    return dict(
        vocab_size=151936,
        layer_types=_recurrent_first(num_layers),
        intermediate_size=5120,
        num_experts=512,
        num_experts_per_tok=10,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rope_parameters={"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.25},
        **_GATED_DELTA_NET,
    )


def _qwen3_8_flash_next(num_layers: int) -> dict[str, object]:
    rope = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
    values = {
        **_GATED_DELTA_NET,
        "hidden_size": 2560,
        "num_attention_heads": 24,
        "linear_num_value_heads": 48,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "eos_token_id": 248044,  # between texts n-grams begin anew
    }
    return dict(
        vocab_size=248320,
        layer_types=_recurrent_first(num_layers),
        num_experts=512,
        num_experts_per_tok=10,
        output_gate_type="sigmoid",
        hc_count=4,
        hc_lowrank=320,
        ple_layer_ids=[2] if num_layers > 1 else None,
        ple_embed_dim=2560,
        ple_conv_kernel_size=4,
        ngram_size=3,
        heads_per_ngram=8,
        ngram_vocab_size_base=20000000,
        split_ngram_parts=128,
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=128,
        indexer_budget=2048,
        indexer_compress_ratio=4,
        rope_parameters={**rope, "mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        **values,
    )


def _deepseek_v2_lite(num_layers: int) -> dict[str, object]:
    return {
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707),
    }


def _deepseek_v3(num_layers: int) -> dict[str, object]:
    return {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
    }


def _deepseek_v4_flash(num_layers: int) -> dict[str, object]:
    """Two layers with a window alone, then compressed ones in turn; the first three route by token."""
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
    return {
        "vocab_size": 129280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "layer_types": ["sliding_attention" if i < 2 else kinds[i % 2] for i in range(num_layers)],
        "mlp_layer_types": ["hash_moe" if i < 3 else "moe" for i in range(num_layers)],
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "partial_rotary_factor": 0.125,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_parameters": _yarn(16.0, 65536),
    }


def _glm_5_3_flash(num_layers: int) -> dict[str, object]:
    """The language model; every fourth layer attends, the others have a state."""
    return {
        "vocab_size": 154880,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "layer_types": ["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)],
        "mlp_layer_types": ["dense" if i < 3 else "sparse" for i in range(num_layers)],
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "n_routed_experts": 288,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_kpool": 4,
        "linear_head_dim": 128,
        "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "pad_token_id": None,
    }


def _gpt_oss(num_layers: int, num_experts: int) -> dict[str, object]:
    return {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": num_experts,
        "num_experts_per_tok": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)],
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _yarn(32.0, 4096, 150000.0, truncate=False),
    }


def _qwen3_32b(num_layers: int) -> dict[str, object]:
    return {
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }


SHAPES: Mapping[str, PublishedShape] = {
    shape.name: shape
    for shape in (
        PublishedShape("qwen3-30b-a3b", 48, Qwen3MoeConfig, "Qwen3MoeForCausalLM", _qwen3_30b_a3b),
        PublishedShape("deepseek-v2-lite", 27, DeepseekV2Config, "DeepseekV2ForCausalLM", _deepseek_v2_lite),
        PublishedShape("deepseek-v3", 61, DeepseekV3Config, "DeepseekV3ForCausalLM", _deepseek_v3, has_mtp=True),
        PublishedShape(
            "deepseek-v4-flash", 43, DeepseekV4Config, "DeepseekV4ForCausalLM", _deepseek_v4_flash, has_mtp=True
        ),
        PublishedShape("glm-5.3-flash", 45, Glm5NextTextConfig, "Glm5NextForConditionalGeneration", _glm_5_3_flash),
        PublishedShape("gpt-oss-20b", 24, GptOssConfig, "GptOssForCausalLM", partial(_gpt_oss, num_experts=32)),
        PublishedShape("gpt-oss-120b", 36, GptOssConfig, "GptOssForCausalLM", partial(_gpt_oss, num_experts=128)),
        PublishedShape(
            "qwen3.6-35b-a3b", 40, Qwen3_5MoeTextConfig, "Qwen3_5MoeForCausalLM", _qwen3_6_35b_a3b, has_mtp=True
        ),
        PublishedShape(
            "qwen3-coder-next", 48, Qwen3NextConfig, "Qwen3NextForCausalLM", _qwen3_coder_next, has_mtp=True
        ),
        PublishedShape(
            "qwen3.8-flash-next", 48, Qwen4ExpTextConfig, "Qwen4ExpForCausalLM", _qwen3_8_flash_next, has_mtp=True
        ),
        PublishedShape("qwen3-32b", 64, Qwen3Config, "Qwen3ForCausalLM", _qwen3_32b),
    )
}


def find_shape(name: str) -> PublishedShape:
    """Return the shape called `name`. Raises ConfigError that lists the names."""
    shape = SHAPES.get(name.lower())
    if shape is None:
        raise ConfigError(f"--synthetic {name} is not one of {', '.join(SHAPES)}")
    return shape


_NARROW = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "vocab_size": 1024,
    "num_experts": 16,
    "n_routed_experts": 16,
    "num_local_experts": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "hc_lowrank": 32,
    "ngram_vocab_size_base": 200,
}


def small_config(name: str, layers: int) -> PretrainedConfig:
    """Return the config of a published shape with `layers` layers of width 256."""
    config = find_shape(name).config(layers)
    for key, value in _NARROW.items():
        if hasattr(config, key):
            setattr(config, key, value)
    return config

"""What llama.cpp's converter writes as metadata of architectures that the `gguf` package does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["METADATA"]

SOFTMAX, SIGMOID = 1, 2
SLIDING = "sliding_attention"


def _common(c: Any) -> dict[str, Any]:
    rope = c.rope_parameters or {}
    local, rope = rope.get(SLIDING), rope.get("full_attention", rope)
    values: dict[str, Any] = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "tokenizer.ggml.model": "no_vocab",
        "tokenizer.ggml.bos_token_id": c.bos_token_id,
        "tokenizer.ggml.eos_token_id": c.eos_token_id,
    }
    if getattr(c, "rms_norm_eps", None) is not None:
        values["attention.layer_norm_rms_epsilon"] = c.rms_norm_eps
    if "rope_theta" in rope:
        values["rope.freq_base"] = rope["rope_theta"]
    if local is not None:
        values["rope.freq_base_swa"] = local["rope_theta"]
    if rope.get("rope_type") == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        }
    return values


def _heads(c: Any) -> dict[str, Any]:
    return {
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
    }


def _head_dim(c: Any) -> dict[str, Any]:
    return {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}


def _experts(c: Any, gating: int | None, scale: float | None = None, norm: bool | None = True) -> dict[str, Any]:
    count = getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None) or c.n_routed_experts
    values: dict[str, Any] = {
        "expert_count": count,
        "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": getattr(c, "moe_intermediate_size", None) or c.intermediate_size,
    }
    said = {"expert_gating_func": gating, "expert_weights_scale": scale, "expert_weights_norm": norm}
    return values | {key: value for key, value in said.items() if value is not None}


def _windows(c: Any) -> dict[str, Any]:
    return {
        "attention.sliding_window": c.sliding_window,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in c.layer_types],
    }


def _latent(c: Any) -> dict[str, Any]:
    values = {
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": c.kv_lora_rank + c.qk_rope_head_dim,
        "attention.value_length": c.kv_lora_rank,
        "attention.key_length_mla": c.qk_nope_head_dim + c.qk_rope_head_dim,
        "attention.value_length_mla": c.v_head_dim,
        "attention.kv_lora_rank": c.kv_lora_rank,
        "rope.dimension_count": c.qk_rope_head_dim,
    }
    return values | ({"attention.q_lora_rank": c.q_lora_rank} if c.q_lora_rank else {})


def _deepseek_experts(c: Any, gating: int | None = SIGMOID) -> dict[str, Any]:
    kinds = getattr(c, "mlp_layer_types", None)
    return {
        **_experts(c, gating, c.routed_scaling_factor, c.norm_topk_prob),
        "expert_shared_count": c.n_shared_experts,
        "expert_group_count": c.n_group,
        "expert_group_used_count": c.topk_group,
        "leading_dense_block_count": kinds.count("dense") if kinds else c.first_k_dense_replace,
    }


def _indexer(c: Any) -> dict[str, Any]:
    return {
        "attention.indexer.head_count": c.index_n_heads,
        "attention.indexer.key_length": c.index_head_dim,
        "attention.indexer.top_k": c.index_topk,
    }


def _full(c: Any) -> dict[str, Any]:
    return {"attention.indexer.types": [kind == "full" for kind in c.indexer_types]}


def _linear(c: Any) -> dict[str, Any]:
    kinds = [0 if kind == "linear_attention" else 1 for kind in c.layer_types]
    return {
        "attention.head_count_kv": kinds,
        "ssm.conv_kernel": c.linear_conv_kernel_dim,
        "kda.head_dim": c.linear_head_dim,
    }


def _laguna(c: Any) -> dict[str, Any]:
    """Without a pattern of windows, which llama.cpp takes as: the first of four layers sees all."""
    rope = c.rope_parameters
    return {
        **_common(c),
        **_heads(c),
        **_head_dim(c),
        **_experts(c, SIGMOID, c.moe_routed_scaling_factor),
        "vocab_size": c.vocab_size,
        "attention.head_count": list(c.num_attention_heads_per_layer),
        "attention.sliding_window": c.sliding_window,
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
        "leading_dense_block_count": c.mlp_layer_types.count("dense"),
        "rope.dimension_count": int(c.head_dim * rope["full_attention"]["partial_rotary_factor"]),
        "rope.dimension_count_swa": int(c.head_dim * rope[SLIDING]["partial_rotary_factor"]),
    }


def _mellum(c: Any) -> dict[str, Any]:
    return {**_common(c), **_heads(c), **_head_dim(c), **_experts(c, None, norm=None), **_windows(c)}


def _cohere2moe(c: Any) -> dict[str, Any]:
    return {
        **_common(c),
        **_heads(c),
        **_head_dim(c),
        **_windows(c),
        **_experts(c, SIGMOID if c.expert_selection_fn == "sigmoid" else SOFTMAX, norm=c.norm_topk_prob),
        "attention.layer_norm_epsilon": c.layer_norm_eps,
        "feed_forward_length": c.prefix_dense_intermediate_size,
        "expert_shared_count": c.num_shared_experts,
        "expert_shared_feed_forward_length": c.num_shared_experts * c.intermediate_size,
        "leading_dense_block_count": c.mlp_layer_types.count("dense"),
        "logit_scale": c.logit_scale,
        "rope.dimension_count": c.head_dim,
        "rope.scaling.type": "none",
    }


def _cohere2_moe(c: Any) -> dict[str, Any]:
    """ik_llama.cpp's: norms that do not subtract the mean."""
    values = _cohere2moe(c)
    values.pop("attention.layer_norm_epsilon")
    return values


def _hy_v3(c: Any) -> dict[str, Any]:
    shared = c.num_shared_experts * c.moe_intermediate_size
    experts = _experts(c, SIGMOID, c.router_scaling_factor)
    return {**_common(c), **_heads(c), **_head_dim(c), **experts, "expert_shared_feed_forward_length": shared}


def _minimax_m3(c: Any) -> dict[str, Any]:
    return {
        **_common(c),
        **_heads(c),
        **_head_dim(c),
        **_experts(c, SIGMOID, c.routed_scaling_factor),
        "feed_forward_length": c.dense_intermediate_size,
        "rope.dimension_count": c.rotary_dim,
        "expert_shared_count": 1,
        "attention.indexer.head_count": c.index_n_heads,
        "attention.indexer.key_length": c.index_head_dim,
        "attention.indexer.top_k": c.index_topk_blocks,
        "attention.indexer.block_size": c.index_block_size,
        "attention.indexer.local_blocks": c.index_local_blocks,
        "leading_dense_block_count": c.mlp_layer_types.count("dense"),
    }


def _deepseek32(c: Any) -> dict[str, Any]:
    return {**_common(c), **_latent(c), **_deepseek_experts(c), **_indexer(c)}


def _bailingmoe3(c: Any) -> dict[str, Any]:
    return {
        **_common(c),
        **_latent(c),
        **_deepseek_experts(c),
        **_linear(c),
        "kda.safe_gate": True,
        "kda.gate_lower_bound": c.kda_lower_bound,
        "expert_shared_feed_forward_length": c.moe_intermediate_size,
    }


def _granite_swa(c: Any) -> dict[str, Any]:
    values = {
        **_common(c),
        **_heads(c),
        **_windows(c),
        "rope.dimension_count": c.hidden_size // c.num_attention_heads,
        "attention.rope_pattern": [theta != 0 for theta in c.layer_rope_theta],
        "attention.scale": c.attention_multiplier,
        "embedding_scale": c.embedding_multiplier,
        "residual_scale": c.residual_multiplier,
        "logit_scale": c.logits_scaling,
    }
    if c.model_type == "granitemoe_swa":
        values |= {"expert_count": c.num_local_experts, "expert_used_count": c.num_experts_per_tok}
        values["expert_shared_feed_forward_length"] = c.shared_intermediate_size
    return values


def _mistral4(c: Any) -> dict[str, Any]:
    multiplier = {"rope.scaling.yarn_log_multiplier": 0.1 * c.rope_parameters["mscale_all_dim"]}
    return {**_common(c), **_latent(c), **_deepseek_experts(c, None), **multiplier}


def _step35(c: Any) -> dict[str, Any]:
    slides = [kind == SLIDING for kind in c.layer_types]
    full, local = (c.per_layer_config[slides.index(one)].num_attention_heads for one in (False, True))
    experts = _experts(c, None, c.moe_router_scaling_factor)
    return {
        **_common(c),
        **_head_dim(c),
        **_windows(c),
        **experts,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": [local if one else full for one in slides],
        "attention.head_count_kv": [c.num_key_value_heads] * c.num_hidden_layers,
        "expert_shared_feed_forward_length": c.share_expert_dim,
        "leading_dense_block_count": c.mlp_layer_types.count("dense"),
        "moe_every_n_layers": 1,
        "swiglu_clamp_exp": [float(one) for one in c.swiglu_limits],
        "swiglu_clamp_shexp": [float(one) for one in c.swiglu_limits_shared],
    }


def _glm5_next(c: Any) -> dict[str, Any]:
    return {
        **_common(c),
        **_latent(c),
        **_deepseek_experts(c),
        **_indexer(c),
        **_full(c),
        **_linear(c),
        "attention.layer_norm_epsilon": 1e-6,
        "attention.indexer.kpool": c.index_kpool,
        "attention.indexer.kpool_select_tail": c.index_kpool_always_select_tail,
        "kda.gate_lower_bound": c.linear_lower_bound,
        "hyper_connection.count": c.hc_mult,
        "hyper_connection.epsilon": c.hc_eps,
        "hyper_connection.sinkhorn_iterations": c.hc_sinkhorn_iters,
        "swiglu_clamp_exp": [c.swiglu_limit] * c.num_hidden_layers,
        "swiglu_clamp_shexp": [c.swiglu_limit] * c.num_hidden_layers,
    }


def _hy_v4(c: Any) -> dict[str, Any]:
    return {
        **_common(c),
        **_latent(c),
        **_deepseek_experts(c),
        **_indexer(c),
        **_full(c),
        "hyper_connection.count": c.hc_mult,
        "hyper_connection.epsilon": c.hc_eps,
        "hyper_connection.magnitude": c.hc_magnitude,
        "swiglu_clamp_exp": [c.swiglu_limit] * c.num_hidden_layers,
    }


def _chatglm(c: Any) -> dict[str, Any]:
    turning = int(c.head_dim * c.rope_parameters["partial_rotary_factor"])
    return {**_common(c), **_heads(c), "rope.dimension_count": turning}


def _exaone(c: Any) -> dict[str, Any]:
    return {**_common(c), **_heads(c), "rope.dimension_count": c.head_dim}


def _minicpm3(c: Any) -> dict[str, Any]:
    key = c.qk_nope_head_dim + c.qk_rope_head_dim
    kept = {name: value for name, value in _latent(c).items() if "value_length" not in name and "_mla" not in name}
    return {**_common(c), **kept, "attention.head_count_kv": c.num_key_value_heads, "attention.key_length": key}


def _youtu(c: Any) -> dict[str, Any]:
    none = {"expert_shared_count": 0, "leading_dense_block_count": c.num_hidden_layers}
    return {**_common(c), **_latent(c), **none, "expert_feed_forward_length": c.intermediate_size}


METADATA: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "bailingmoe3": _bailingmoe3,
    "chatglm": _chatglm,
    "cohere2_moe": _cohere2_moe,
    "cohere2moe": _cohere2moe,
    "deepseek2": _youtu,
    "deepseek32": _deepseek32,
    "exaone": _exaone,
    "glm5-next": _glm5_next,
    "granite_swa": _granite_swa,
    "hy_v3": _hy_v3,
    "hy_v4": _hy_v4,
    "laguna": _laguna,
    "mellum": _mellum,
    "minicpm3": _minicpm3,
    "minimax-m3": _minimax_m3,
    "mistral4": _mistral4,
    "step35": _step35,
}

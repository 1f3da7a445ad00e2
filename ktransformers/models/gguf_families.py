"""Per GGUF architecture: the `transformers` model type, and the config values that only its family has.

What a converter does not write because llama.cpp assumes it (a router that normalizes, groups of experts) is filled in
from the published models of the family. Each entry is tested against the config that a file was written from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ktransformers.errors import FormatError, UnsupportedError
from ktransformers.models.gguf_metadata import Metadata, Values, rope_parameters

__all__ = ["FAMILIES", "expert_values"]

logger = logging.getLogger(__name__)

SOFTMAX, SIGMOID = 1, 2  # gguf.ExpertGatingFuncType


def _head_dim(gguf: Metadata) -> Values:
    value = gguf.find_int("attention.key_length", 1) or gguf.find_int("rope.dimension_count", 2)
    return {} if value is None else {"head_dim": value}


def _partial_rotary(gguf: Metadata) -> Values:
    """rope_parameters with the share of head_dim that rotates; only for families that rotate a part."""
    head_dim = gguf.int("attention.key_length")
    share = gguf.int("rope.dimension_count", 2) / head_dim
    return {"head_dim": head_dim, "rope_parameters": {**rope_parameters(gguf, None), "partial_rotary_factor": share}}


def _experts(gguf: Metadata, count: str, used: str = "num_experts_per_tok") -> Values:
    experts, chosen = gguf.int("expert_count"), gguf.int("expert_used_count")
    router = gguf.shape("ffn_gate_inp.weight")
    if router is not None and router[0] != experts:
        raise FormatError(f"{gguf.arch}.expert_count is {experts}, but ffn_gate_inp.weight has {router[0]} rows")
    if chosen > experts:
        raise FormatError(f"{gguf.arch}.expert_used_count is {chosen}, but there are {experts} experts")
    values: Values = {count: experts, used: chosen}
    gate = gguf.shape("ffn_gate_exps.weight") or gguf.shape("ffn_up_exps.weight")
    if gate is not None and len(gate) < 2:
        raise FormatError(f"the experts' tensors are no matrices: their shape is {gate}")
    width = gguf.find_int("expert_feed_forward_length", 1)
    if width is None and gate is not None:
        width = gate[-2]
    if width is not None:
        values["moe_intermediate_size"] = width
    return values


expert_values = _experts


def _gating(gguf: Metadata, default: int) -> int:
    value = gguf.find_int("expert_gating_func") or default
    if value not in (SOFTMAX, SIGMOID):
        raise UnsupportedError(f"{gguf.arch}.expert_gating_func {value} is not supported (softmax and sigmoid are)")
    return value


def _expect_gating(gguf: Metadata, wanted: int) -> None:
    if _gating(gguf, wanted) != wanted:
        raise UnsupportedError(f"{gguf.arch} with this expert_gating_func is no known model; pass --model_path")


def _routing(gguf: Metadata) -> Values:
    """What the DeepSeek-like routers share."""
    return {
        "n_shared_experts": gguf.int("expert_shared_count"),
        "first_k_dense_replace": gguf.int("leading_dense_block_count", 0),
        "routed_scaling_factor": gguf.float("expert_weights_scale", 1.0),
        "norm_topk_prob": gguf.bool("expert_weights_norm", False),
        "n_group": gguf.find_int("expert_group_count") or 1,
        "topk_group": gguf.find_int("expert_group_used_count") or 1,
    }


def _llama(gguf: Metadata) -> tuple[str, Values]:
    has_bias = gguf.has(r"attn_q\.bias")
    window = gguf.find_int("attention.sliding_window", 1)  # llama.cpp's converter writes none
    if has_bias != gguf.has(r"attn_output\.bias"):
        raise UnsupportedError("a llama file with biases on some attention projections only; pass --model_path")
    if gguf.find_int("expert_count"):
        if has_bias:
            raise UnsupportedError("a mixtral file with attention biases is no known model; pass --model_path")
        mixtral = _experts(gguf, "num_local_experts")
        inner = mixtral.pop("moe_intermediate_size", None)
        return "mixtral", {**mixtral, **_head_dim(gguf), "intermediate_size": inner, "sliding_window": window}
    if window and not has_bias:
        return "mistral", {**_head_dim(gguf), "sliding_window": window}
    return "llama", {**_head_dim(gguf), "attention_bias": has_bias, "mlp_bias": gguf.has(r"ffn_down\.bias")}


def _qwen2(gguf: Metadata) -> tuple[str, Values]:
    return "qwen2", {"use_sliding_window": False}


def _qwen3(gguf: Metadata) -> tuple[str, Values]:
    return "qwen3", {**_head_dim(gguf), "use_sliding_window": False, "attention_bias": gguf.has(r"attn_q\.bias")}


def _qwen2moe(gguf: Metadata) -> tuple[str, Values]:
    shared = gguf.find_int("expert_shared_feed_forward_length", 1)
    shape = gguf.shape("ffn_up_shexp.weight")
    if shared is None and shape is not None:
        shared = shape[0]
    # Qwen's converter does not write norm_topk_prob; every published Qwen2-MoE has it false, every Qwen3-MoE true.
    return "qwen2_moe", {
        **_experts(gguf, "num_experts"),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": gguf.bool("expert_weights_norm", False),
        "use_sliding_window": False,
        "qkv_bias": gguf.has(r"attn_q\.bias"),
    }


def _qwen3moe(gguf: Metadata) -> tuple[str, Values]:
    return "qwen3_moe", {
        **_experts(gguf, "num_experts"),
        **_head_dim(gguf),
        "norm_topk_prob": gguf.bool("expert_weights_norm", True),
        "use_sliding_window": False,
        "attention_bias": gguf.has(r"attn_q\.bias"),
        "mlp_only_layers": [
            layer for layer in range(gguf.layers) if f"blk.{layer}.ffn_gate_inp.weight" not in gguf.shapes
        ],
    }


def _deepseek2(gguf: Metadata) -> tuple[str, Values]:
    rope_dim = gguf.int("rope.dimension_count", 2)
    # Files made since absorbed MLA describe the cached latent by key_length, and the heads by key_length_mla.
    key = gguf.find_int("attention.key_length_mla", 1) or gguf.int("attention.key_length")
    value = gguf.find_int("attention.value_length_mla", 1) or gguf.int("attention.value_length")
    if key <= rope_dim:
        raise FormatError(f"deepseek2: heads of {key} cannot hold a rotary part of {rope_dim}")
    values: Values = {
        **_experts(gguf, "n_routed_experts"),
        **_routing(gguf),
        "num_key_value_heads": gguf.int("attention.head_count"),
        "q_lora_rank": gguf.find_int("attention.q_lora_rank") or None,
        "kv_lora_rank": gguf.int("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": value,
        "attention_bias": gguf.has(r"attn_kv_a_mqa\.bias"),
    }
    has_bias = gguf.has(r"exp_probs_b(\.bias)?")
    is_v3 = _gating(gguf, SIGMOID if has_bias else SOFTMAX) == SIGMOID
    if is_v3 != has_bias:
        raise UnsupportedError("a deepseek2 file is neither DeepSeek-V2 (softmax) nor V3 (sigmoid and exp_probs_b)")
    if gguf.raw("expert_group_count") is None:
        values |= _unwritten_groups(is_v3, gguf.int("expert_count"))
    if is_v3:
        return "deepseek_v3", values
    values["topk_method"] = "greedy" if values["n_group"] == 1 else "group_limited_greedy"
    return "deepseek_v2", values


def _unwritten_groups(is_v3: bool, experts: int) -> Values:
    """Expert groups of files from before the converter wrote them, known by the number of experts."""
    known = {(True, 256): (8, 4), (False, 160): (8, 3)}.get((is_v3, experts))  # DeepSeek-V3 and R1; V2 and V2.5
    if known is None:
        return {}
    logger.warning(
        "the GGUF file does not say its expert groups; taking %d of %d, as DeepSeek published", known[1], known[0]
    )
    return {"n_group": known[0], "topk_group": known[1]}


def _olmoe(gguf: Metadata) -> tuple[str, Values]:
    values = _experts(gguf, "num_experts")
    values["intermediate_size"] = values.pop("moe_intermediate_size", None)
    return "olmoe", {
        **values,
        "norm_topk_prob": gguf.bool("expert_weights_norm", False),
        "clip_qkv": gguf.find_float("attention.clamp_kqv"),
        "attention_bias": gguf.has(r"attn_q\.bias"),
    }


def _glm4moe(gguf: Metadata) -> tuple[str, Values]:
    _expect_gating(gguf, SIGMOID)
    return "glm4_moe", {
        **_experts(gguf, "n_routed_experts"),
        **_routing(gguf),
        **_partial_rotary(gguf),
        "attention_bias": gguf.has(r"attn_q\.bias"),
        "use_qk_norm": gguf.has(r"attn_q_norm\.weight"),
    }


def _dots1(gguf: Metadata) -> tuple[str, Values]:
    _expect_gating(gguf, SIGMOID)
    return "dots1", {
        **_experts(gguf, "n_routed_experts"),
        **_routing(gguf),
        **_head_dim(gguf),
        "attention_bias": gguf.has(r"attn_q\.bias"),
        "sliding_window": None,
        "layer_types": ["full_attention"] * gguf.layers,
    }


def _gpt_oss(gguf: Metadata) -> tuple[str, Values]:
    values = _experts(gguf, "num_local_experts")
    inner = values.pop("moe_intermediate_size", None)
    rope = rope_parameters(gguf, None)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # of every gpt-oss; the format has no key for it
    return "gpt_oss", {
        **values,
        **_head_dim(gguf),
        "intermediate_size": inner,
        "sliding_window": gguf.int("attention.sliding_window"),
        "rope_parameters": rope,
    }


def _granitemoe(gguf: Metadata) -> tuple[str, Values]:
    values = _experts(gguf, "num_local_experts")
    inner = values.pop("moe_intermediate_size", None)
    values |= {
        "intermediate_size": inner,
        "attention_multiplier": gguf.float("attention.scale", 1.0),
        "embedding_multiplier": gguf.float("embedding_scale", 1.0),
        "residual_multiplier": gguf.float("residual_scale", 1.0),
        "logits_scaling": gguf.float("logit_scale", 1.0),
        "attention_bias": gguf.has(r"attn_q\.bias"),
    }
    shared = gguf.shape("ffn_up_shexp.weight")
    if shared is None:
        return "granitemoe", values
    return "granitemoeshared", {**values, "shared_intermediate_size": shared[0]}


def _ernie(gguf: Metadata) -> tuple[str, Values]:
    _expect_gating(gguf, SOFTMAX)
    return "ernie4_5_moe", {
        **_experts(gguf, "moe_num_experts", "moe_k"),
        "moe_num_shared_experts": gguf.find_int("expert_shared_count") or 0,
        "moe_layer_start_index": gguf.int("leading_dense_block_count", 0),
        "moe_layer_end_index": -1,
        "moe_layer_interval": gguf.find_int("interleave_moe_layer_step", 1) or 1,
        "use_bias": gguf.has(r"attn_q\.bias"),
    }


def _phimoe(gguf: Metadata) -> tuple[str, Values]:
    values = _experts(gguf, "num_local_experts")
    values["intermediate_size"] = values.pop("moe_intermediate_size", None)
    return "phimoe", {
        **values,
        "attention_bias": gguf.has(r"attn_q\.bias"),
        "lm_head_bias": "output.bias" in gguf.shapes,
        "sliding_window": gguf.find_int("attention.sliding_window", 1),
    }


def _minimax(gguf: Metadata) -> tuple[str, Values]:
    _expect_gating(gguf, SIGMOID)
    values = _experts(gguf, "num_local_experts")
    values["intermediate_size"] = values.pop("moe_intermediate_size", None)
    return "minimax_m2", {**values, **_partial_rotary(gguf)}


def _hunyuan(gguf: Metadata) -> tuple[str, Values]:
    values = _experts(gguf, "num_experts", "moe_topk")
    layers = gguf.layers
    inner = values.pop("moe_intermediate_size", None)
    shared = gguf.shape("ffn_up_shexp.weight")
    if shared is not None and shared[0] != inner:
        raise UnsupportedError(
            "a hunyuan-moe file whose shared expert is not as wide as the routed ones; pass --model_path"
        )
    return "hunyuan_v1_moe", {
        **values,
        **_head_dim(gguf),
        "intermediate_size": inner,
        "moe_topk": [values["moe_topk"]] * layers,
        "attention_bias": gguf.has(r"attn_q\.bias"),
    }


FAMILIES: dict[str, Callable[[Metadata], tuple[str, Values]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "deepseek2": _deepseek2,
    "olmoe": _olmoe,
    "glm4moe": _glm4moe,
    "dots1": _dots1,
    "gpt-oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "ernie4_5-moe": _ernie,
    "phimoe": _phimoe,
    "minimax-m2": _minimax,
    "hunyuan-moe": _hunyuan,
}

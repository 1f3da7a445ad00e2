"""GGUF architectures that the `gguf` package does not know yet: model type and config values of each.

What their keys mean is taken from llama.cpp's converters and from how it reads the files (conversion/, src/models/).
"""

from __future__ import annotations

import logging

from ktransformers.errors import FormatError, UnsupportedError
from ktransformers.models.gguf.fields import (
    SIGMOID,
    SOFTMAX,
    GGUFFamily,
    clamp,
    experts,
    gating,
    granite_multipliers,
    head_dim,
    indexer,
    indexer_kinds,
    latent,
    layer_norm,
    mlp_kinds,
    rotary_share,
    routing,
    routing_by_layer,
    windows,
)
from ktransformers.models.gguf.metadata import Metadata, Values
from ktransformers.models.gguf.rope import rope_parameters

__all__ = ["NEWER_FAMILIES"]

logger = logging.getLogger(__name__)

FULL, SLIDING = "full_attention", "sliding_attention"


def _two_rotations(gguf: Metadata) -> Values:
    """Layers without a window rotate as the file scales it; those with one by a base of their own, unscaled."""
    rope = rope_parameters(gguf)
    local = {"rope_type": "default", "rope_theta": gguf.find_float("rope.freq_base_swa") or rope["rope_theta"]}
    return {"rope_parameters": {FULL: rope, SLIDING: local}}


def _laguna(gguf: Metadata) -> tuple[str, Values]:
    size, heads = gguf.int("attention.key_length"), gguf.ints("attention.head_count")
    rotations = _two_rotations(gguf)["rope_parameters"]
    assert isinstance(rotations, dict)
    rotations[FULL]["partial_rotary_factor"] = rotary_share(gguf, size)
    turning = gguf.find_int("rope.dimension_count_swa", 2) or gguf.int("rope.dimension_count", 2)
    rotations[SLIDING]["partial_rotary_factor"] = rotary_share(gguf, size, turning)
    gates = [(gguf.shapes.get(f"blk.{layer}.attn_gate.weight") or (0,))[0] for layer in range(gguf.layers)]
    by_head = gates == list(heads)
    if not by_head and gates != [count * size for count in heads]:
        raise FormatError(f"the gates of a laguna file have {gates[:4]} rows: neither one a head nor one an element")
    values = {**experts(gguf, "num_experts"), **windows(gguf, 4, first_is_full=True)}
    values["sliding_window"] = values["sliding_window"] or 512  # no layer has one; the config needs a number
    return "laguna", {
        **values,
        "num_attention_heads": max(heads),
        "num_attention_heads_per_layer": list(heads),
        "num_key_value_heads": gguf.int("attention.head_count_kv"),
        "intermediate_size": gguf.int("feed_forward_length"),
        "head_dim": size,
        "shared_expert_intermediate_size": gguf.int("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": gguf.float("expert_weights_scale", 1.0),
        "mlp_layer_types": mlp_kinds(gguf),
        "gating": True if by_head else "per-element",
        "rope_parameters": rotations,
        "attention_bias": gguf.has(r"attn_q\.bias"),
    }


def _mellum(gguf: Metadata) -> tuple[str, Values]:
    return "mellum", {
        **experts(gguf, "num_experts"),
        **head_dim(gguf),
        **windows(gguf, 4),
        **_two_rotations(gguf),
        "norm_topk_prob": gguf.bool("expert_weights_norm", True),
        "mlp_layer_types": mlp_kinds(gguf),
        "attention_bias": gguf.has(r"attn_q\.bias"),
    }


def _cohere2moe(gguf: Metadata) -> tuple[str, Values]:
    """ik_llama.cpp's converter writes an epsilon of RMS norms, llama.cpp's one of norms that subtract the mean."""
    rms = gguf.find_float("attention.layer_norm_rms_epsilon") or None
    norm = {"layer_norm_eps": rms, "rms_norm_eps": rms} if rms else {**layer_norm(gguf), "rms_norm_eps": None}
    return "cohere2_moe", {
        **experts(gguf, "num_experts", width="intermediate_size"),
        **norm,
        **head_dim(gguf),
        **windows(gguf, 4, first_is_full=True),
        "prefix_dense_intermediate_size": gguf.int("feed_forward_length"),
        "mlp_layer_types": mlp_kinds(gguf),
        "num_shared_experts": gguf.find_int("expert_shared_count") or 0,
        "expert_selection_fn": "softmax" if gating(gguf, SIGMOID) == SOFTMAX else "sigmoid",
        "norm_topk_prob": gguf.bool("expert_weights_norm", False),
        "logit_scale": gguf.float("logit_scale"),
        "attention_bias": gguf.has(r"attn_q\.bias"),
    }


def _hy_v3(gguf: Metadata) -> tuple[str, Values]:
    values = {**experts(gguf, "num_experts"), **head_dim(gguf)}
    inner, shared = values.get("moe_intermediate_size"), gguf.shape("ffn_up_shexp.weight")
    if shared is None or not isinstance(inner, int) or shared[0] % inner:
        raise UnsupportedError("a hy_v3 file whose shared experts are not as wide as the routed; pass --model_path")
    return "hy_v3", {
        **values,
        "num_shared_experts": shared[0] // inner,
        "router_scaling_factor": gguf.float("expert_weights_scale", 1.0),
        "mlp_layer_types": mlp_kinds(gguf),
        "attention_bias": gguf.has(r"attn_q\.bias"),
        "mlp_bias": gguf.has(r"ffn_up\.bias"),
    }


def _minimax_m3(gguf: Metadata) -> tuple[str, Values]:
    """MLPs clamp and scale their gates by the published 7 and 1.702, as llama.cpp does."""
    shared = gguf.shape("ffn_up_shexp.weight")
    size = gguf.int("attention.key_length")
    return "minimax_m3_vl_text", {
        **experts(gguf, "num_local_experts", width="intermediate_size"),
        "head_dim": size,
        "dense_intermediate_size": gguf.int("feed_forward_length"),
        "shared_intermediate_size": 0 if shared is None else shared[0],
        "routed_scaling_factor": gguf.float("expert_weights_scale", 1.0),
        "rotary_dim": gguf.int("rope.dimension_count", 2),
        "rope_parameters": {**rope_parameters(gguf), "partial_rotary_factor": rotary_share(gguf, size)},
        "mlp_layer_types": mlp_kinds(gguf),
        "layer_types": ["minimax_m3_sparse" if one else FULL for one in gguf.by_tensor("indexer.q_proj.weight")],
        "index_n_heads": gguf.int("attention.indexer.head_count"),
        "index_head_dim": gguf.int("attention.indexer.key_length"),
        "index_topk_blocks": gguf.int("attention.indexer.top_k"),
        "index_block_size": gguf.int("attention.indexer.block_size"),
        "index_local_blocks": gguf.int("attention.indexer.local_blocks", 0),
    }


def _deepseek32(gguf: Metadata) -> tuple[str, Values]:
    return "deepseek_v32", {
        **experts(gguf, "n_routed_experts"),
        **routing(gguf),
        **latent(gguf),
        **indexer(gguf),
        "mlp_layer_types": mlp_kinds(gguf),
    }


def _linear_heads(gguf: Metadata) -> int:
    """Heads of layers with linear attention, for which there is no key."""
    return max(gguf.shape("ssm_a") or (gguf.int("attention.head_count"),))


def _bailingmoe3(gguf: Metadata) -> tuple[str, Values]:
    if not gguf.bool("kda.safe_gate", True):
        raise UnsupportedError("a bailingmoe3 file whose gates have no lower bound; pass --model_path")
    return "bailing_hybrid", {
        **experts(gguf, "num_experts"),
        **routing_by_layer(gguf),
        **latent(gguf),
        "head_dim": gguf.int("kda.head_dim"),
        "linear_num_heads": _linear_heads(gguf),
        "short_conv_kernel_size": gguf.int("ssm.conv_kernel"),
        "kda_safe_gate": True,
        "kda_lower_bound": gguf.float("kda.gate_lower_bound"),
        "layer_types": ["linear_attention" if one else FULL for one in gguf.by_tensor("ssm_a")],
        "rope_theta": gguf.float("rope.freq_base"),
    }


def _granite_swa(gguf: Metadata) -> tuple[str, Values]:
    """A base of 0 says that a layer does not rotate."""
    rope = rope_parameters(gguf)
    turns = gguf.by_layer("attention.rope_pattern") or [True] * gguf.layers
    values: Values = {
        **granite_multipliers(gguf),
        **windows(gguf, 4, first_is_full=True),
        "rope_parameters": rope,
        "layer_rope_theta": [rope["rope_theta"] if one else 0.0 for one in turns],
        "attention_bias": gguf.has(r"attn_q\.bias"),
    }
    if not gguf.find_int("expert_count"):
        return "granite_swa", {**values, "mlp_bias": gguf.has(r"ffn_down\.bias")}
    values |= experts(gguf, "num_local_experts")
    values["intermediate_size"] = values.pop("moe_intermediate_size", None) or gguf.int("feed_forward_length")
    return "granitemoe_swa", {
        **values,
        "shared_intermediate_size": gguf.find_int("expert_shared_feed_forward_length") or 0,
    }


def _mistral4(gguf: Metadata) -> tuple[str, Values]:
    """llama.cpp's converter of Hugging Face's checkpoints has no key for the growth of queries: it is as published."""
    rope = rope_parameters(gguf)
    beta = gguf.find_float("attention.temperature_scale")
    if beta is None and rope["rope_type"] == "yarn":
        logger.info("the GGUF file does not say mistral4.attention.temperature_scale; taking 0.1, as published")
        beta = 0.1
    if beta is not None:
        rope["llama_4_scaling_beta"] = beta
        rope.setdefault("original_max_position_embeddings", gguf.int("context_length"))
    return "mistral4", {**experts(gguf, "n_routed_experts"), **routing(gguf), **latent(gguf), "rope_parameters": rope}


def _step35(gguf: Metadata) -> tuple[str, Values]:
    """Layers without a window rotate half of a head, which no key says, and have fewer heads."""
    size, values = gguf.int("attention.key_length"), {**experts(gguf, "n_routed_experts"), **windows(gguf, 1)}
    kinds, kv_heads = values["layer_types"], set(gguf.ints("attention.head_count_kv"))
    assert isinstance(kinds, list)
    heads = {
        kind: {one for one, other in zip(gguf.ints("attention.head_count"), kinds, strict=True) if other == kind}
        for kind in (FULL, SLIDING)
    }
    if len(kv_heads) != 1 or len(heads[FULL]) != 1 or len(heads[SLIDING]) > 1:
        raise UnsupportedError(
            "a step35 file whose heads do not follow its windows is no known model; pass --model_path"
        )
    if "rope_freqs.weight" in gguf.factors:  # those of half a head; what follows is 1
        gguf.factors = {"rope_freqs.weight": gguf.factors["rope_freqs.weight"][: size // 4]}
    rotations = _two_rotations(gguf)["rope_parameters"]
    assert isinstance(rotations, dict)
    if rotations[FULL]["rope_type"] not in ("default", "llama3"):
        raise UnsupportedError("the factors of a step35 file's rope_freqs.weight are not those of Llama 3's rotation")
    rotations[FULL]["partial_rotary_factor"] = 0.5
    rotations[SLIDING]["partial_rotary_factor"] = 1.0
    padding = {} if "tokenizer.ggml.padding_token_id" in gguf.metadata else {"pad_token_id": 0}  # it needs some token
    return "step3p5", {
        **values,
        **padding,
        "num_attention_heads": heads[FULL].pop(),
        "num_sliding_attention_heads": heads[SLIDING].pop() if heads[SLIDING] else None,
        "num_key_value_heads": kv_heads.pop(),
        "intermediate_size": gguf.int("feed_forward_length"),
        "head_dim": size,
        "share_expert_dim": gguf.int("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": gguf.float("expert_weights_scale", 1.0),
        "mlp_layer_types": mlp_kinds(gguf),
        "swiglu_limits": gguf.floats("swiglu_clamp_exp"),
        "swiglu_limits_shared": gguf.floats("swiglu_clamp_shexp"),
        "rope_parameters": rotations,
    }


def _glm5_next(gguf: Metadata) -> tuple[str, Values]:
    """Nothing rotates, and all MLPs clamp at one value."""
    return "glm5_next_text", {
        **experts(gguf, "n_routed_experts"),
        **routing_by_layer(gguf),
        **latent(gguf),
        **indexer(gguf),
        "layer_types": ["linear_attention" if one else "indexed_attention" for one in gguf.by_tensor("ssm_a")],
        "indexer_types": indexer_kinds(gguf) or ["full"] * gguf.layers,
        "index_kpool": gguf.int("attention.indexer.kpool"),
        "index_kpool_always_select_tail": gguf.bool("attention.indexer.kpool_select_tail", True),
        "swiglu_limit": clamp(gguf, "swiglu_clamp_exp", "swiglu_clamp_shexp"),
        "linear_head_dim": gguf.int("kda.head_dim"),
        "linear_num_heads": _linear_heads(gguf),
        "linear_conv_kernel_dim": gguf.int("ssm.conv_kernel"),
        "linear_lower_bound": gguf.find_float("kda.gate_lower_bound"),
        "hc_mult": gguf.int("hyper_connection.count"),
        "hc_eps": gguf.float("hyper_connection.epsilon"),
        "hc_sinkhorn_iters": gguf.int("hyper_connection.sinkhorn_iterations"),
        "rope_parameters": None,
    }


def _hy_v4(gguf: Metadata) -> tuple[str, Values]:
    kinds = indexer_kinds(gguf)
    if kinds is None:
        raise UnsupportedError("a hy_v4 file without indexers is no known model; pass --model_path")
    return "hy_v4", {
        **experts(gguf, "n_routed_experts"),
        **routing_by_layer(gguf),
        **latent(gguf),
        **indexer(gguf),
        "indexer_types": kinds,
        "swiglu_limit": clamp(gguf, "swiglu_clamp_exp"),
        "hc_mult": gguf.int("hyper_connection.count"),
        "hc_eps": gguf.float("hyper_connection.epsilon"),
        "hc_magnitude": gguf.float("hyper_connection.magnitude"),
    }


NEWER_FAMILIES: dict[str, GGUFFamily] = {
    "bailingmoe3": GGUFFamily(_bailingmoe3, gating=SIGMOID, positive_decay=True),
    "cohere2_moe": GGUFFamily(_cohere2moe, has_layer_norm=True),
    "cohere2moe": GGUFFamily(_cohere2moe, has_layer_norm=True),
    "deepseek32": GGUFFamily(_deepseek32, gating=SIGMOID),
    "glm5-next": GGUFFamily(_glm5_next, gating=SIGMOID),
    "granite_swa": GGUFFamily(_granite_swa, permuted_qk=True),
    "hy_v3": GGUFFamily(_hy_v3, gating=SIGMOID, normalizes=True),
    "hy_v4": GGUFFamily(_hy_v4, gating=SIGMOID),
    "laguna": GGUFFamily(_laguna, gating=SIGMOID, normalizes=True, differs_by_layer=True),
    "mellum": GGUFFamily(_mellum, gating=SOFTMAX),
    "minimax-m3": GGUFFamily(_minimax_m3, gating=SIGMOID, normalizes=True, norm_plus_one=True),
    "mistral4": GGUFFamily(_mistral4, gating=SOFTMAX),
    "step35": GGUFFamily(_step35, gating=SIGMOID, normalizes=True, norm_plus_one=True, differs_by_layer=True),
}

"""Configs of families with compressed keys (DeepSeek-V4) from the metadata of their GGUF files.

Keys are those that llama.cpp's loader of `deepseek4` reads.
"""

from __future__ import annotations

from collections.abc import Mapping

from ktransformers.errors import FormatError, UnsupportedError
from ktransformers.models.gguf.fields import GGUFFamily, clamp, experts, rotary_share
from ktransformers.models.gguf.metadata import Metadata, Values
from ktransformers.models.gguf.rope import rope_parameters, rope_scaling_factor

__all__ = ["COMPRESSED_FAMILIES"]

_LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
_SQRT_SOFTPLUS = 4  # llama.cpp's expert_gating_func


def _deepseek4(gguf: Metadata) -> tuple[str, Values]:
    if (said := gguf.find_int("expert_gating_func")) not in (None, _SQRT_SOFTPLUS):
        raise UnsupportedError(f"deepseek4.expert_gating_func {said} is of no known model; pass --model_path")
    rope = rope_parameters(gguf)
    if rope_scaling_factor(gguf) != 1.0 and rope["rope_type"] != "yarn":
        raise UnsupportedError(
            "deepseek4.rope.scaling.factor without rope.scaling.type yarn, as which published models have it; pass "
            "--model_path with the model's config.json"
        )
    size, hashed = gguf.int("attention.key_length"), gguf.int("hash_layer_count", 0)
    values = experts(gguf, "n_routed_experts")
    return "deepseek_v4", {
        **values,
        "intermediate_size": values.get("moe_intermediate_size"),  # another name of it; there are no dense layers
        "n_shared_experts": gguf.int("expert_shared_count"),
        "routed_scaling_factor": gguf.float("expert_weights_scale"),
        "scoring_func": "sqrtsoftplus",
        "swiglu_limit": clamp(gguf, "swiglu_clamp_exp", "swiglu_clamp_shexp"),
        "mlp_layer_types": ["hash_moe" if layer < hashed else "moe" for layer in range(gguf.layers)],
        "head_dim": size,
        "partial_rotary_factor": rotary_share(gguf, size),
        "rope_theta": rope["rope_theta"],
        "compress_rope_theta": gguf.float("attention.compress_rope_freq_base"),
        "rope_parameters": rope,
        "layer_types": _layer_types(gguf),
        "sliding_window": gguf.int("attention.sliding_window"),
        "q_lora_rank": gguf.int("attention.q_lora_rank"),
        "o_lora_rank": gguf.int("attention.output_lora_rank"),
        "o_groups": gguf.int("attention.output_group_count"),
        "index_n_heads": gguf.int("attention.indexer.head_count"),
        "index_head_dim": gguf.int("attention.indexer.key_length"),
        "index_topk": gguf.int("attention.indexer.top_k"),
        "hc_mult": gguf.int("hyper_connection.count"),
        "hc_sinkhorn_iters": gguf.int("hyper_connection.sinkhorn_iterations"),
        "hc_eps": gguf.float("hyper_connection.epsilon"),
    }


def _layer_types(gguf: Metadata) -> list[str]:
    """Of tokens in an entry, by layer; 0 for a window alone."""
    rates = gguf.by_layer("attention.compress_ratios")
    if rates is None or not set(rates) <= _LAYER_TYPES.keys():
        raise FormatError(
            f"deepseek4.attention.compress_ratios is {rates!r:.60}; {gguf.layers} numbers out of "
            f"{', '.join(map(str, _LAYER_TYPES))} are needed"
        )
    return [_LAYER_TYPES[int(rate)] for rate in rates]


COMPRESSED_FAMILIES: Mapping[str, GGUFFamily] = {"deepseek4": GGUFFamily(_deepseek4, normalizes=True)}

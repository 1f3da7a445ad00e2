"""GGUF architectures: of each the `transformers` model type, and the config values that only its family has.

What a converter does not write because llama.cpp assumes it (a router that normalizes, groups of experts) is filled in
from the published models of the family. Each entry is tested against the config that a file was written from.
"""

from __future__ import annotations

import logging

from ktransformers.errors import UnsupportedError
from ktransformers.models.gguf.compressed import COMPRESSED_FAMILIES
from ktransformers.models.gguf.dense import DENSE_FAMILIES
from ktransformers.models.gguf.fields import (
    SIGMOID,
    SOFTMAX,
    GGUFFamily,
    experts,
    gating,
    granite_multipliers,
    groups,
    head_dim,
    indexer,
    indexer_kinds,
    latent,
    mlp_kinds,
    partial_rotary,
    rotary_share,
    routing,
    shared_width,
    windows,
)
from ktransformers.models.gguf.metadata import Metadata, Values
from ktransformers.models.gguf.newer import NEWER_FAMILIES
from ktransformers.models.gguf.recurrent import RECURRENT_FAMILIES
from ktransformers.models.gguf.rope import rope_parameters

__all__ = ["FAMILIES"]

logger = logging.getLogger(__name__)


def _llama(gguf: Metadata) -> tuple[str, Values]:
    has_bias = gguf.has(r"attn_q\.bias")
    window = gguf.find_int("attention.sliding_window", 1)  # llama.cpp's converter writes none
    if has_bias != gguf.has(r"attn_output\.bias"):
        raise UnsupportedError("a llama file with biases on some attention projections only; pass --model_path")
    if gguf.find_int("expert_count"):
        if has_bias:
            raise UnsupportedError("a mixtral file with attention biases is no known model; pass --model_path")
        mixtral = experts(gguf, "num_local_experts", width="intermediate_size")
        return "mixtral", {**mixtral, **head_dim(gguf), "sliding_window": window}
    if window and not has_bias:
        return "mistral", {**head_dim(gguf), "sliding_window": window}
    return "llama", {**head_dim(gguf), "attention_bias": has_bias, "mlp_bias": gguf.has(r"ffn_down\.bias")}


def _qwen2(gguf: Metadata) -> tuple[str, Values]:
    return "qwen2", {"use_sliding_window": False}


def _qwen3(gguf: Metadata) -> tuple[str, Values]:
    return "qwen3", {**head_dim(gguf), "use_sliding_window": False, "attention_bias": gguf.has(r"attn_q\.bias")}


def _qwen2moe(gguf: Metadata) -> tuple[str, Values]:
    # Qwen's converter does not write norm_topk_prob; every published Qwen2-MoE has it false, every Qwen3-MoE true.
    return "qwen2_moe", {
        **experts(gguf, "num_experts"),
        "shared_expert_intermediate_size": shared_width(gguf),
        "norm_topk_prob": gguf.bool("expert_weights_norm", False),
        "use_sliding_window": False,
        "qkv_bias": gguf.has(r"attn_q\.bias"),
    }


def _qwen3moe(gguf: Metadata) -> tuple[str, Values]:
    return "qwen3_moe", {
        **experts(gguf, "num_experts"),
        **head_dim(gguf),
        "norm_topk_prob": gguf.bool("expert_weights_norm", True),
        "use_sliding_window": False,
        "attention_bias": gguf.has(r"attn_q\.bias"),
        "mlp_only_layers": [layer for layer, kind in enumerate(mlp_kinds(gguf)) if kind == "dense"],
    }


def _deepseek2(gguf: Metadata) -> tuple[str, Values]:
    if not gguf.find_int("expert_count"):
        return "youtu", latent(gguf)
    values: Values = {
        **experts(gguf, "n_routed_experts"),
        **routing(gguf),
        **latent(gguf),
    }
    has_bias = gguf.has(r"exp_probs_b(\.bias)?")
    is_v3 = gating(gguf, SIGMOID if has_bias else SOFTMAX) == SIGMOID
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
    return "olmoe", {
        **experts(gguf, "num_experts", width="intermediate_size"),
        "norm_topk_prob": gguf.bool("expert_weights_norm", False),
        "clip_qkv": gguf.find_float("attention.clamp_kqv"),
        "attention_bias": gguf.has(r"attn_q\.bias"),
    }


def _glm4moe(gguf: Metadata) -> tuple[str, Values]:
    return "glm4_moe", {
        **experts(gguf, "n_routed_experts"),
        **routing(gguf),
        **partial_rotary(gguf),
        "attention_bias": gguf.has(r"attn_q\.bias"),
        "use_qk_norm": gguf.has(r"attn_q_norm\.weight"),
    }


def _bailingmoe(gguf: Metadata) -> tuple[str, Values]:
    """Ling 1.x, which computes what GraniteMoE with a shared expert does; transformers has no class of its name."""
    is_usual = gguf.bool("expert_weights_norm", False) and gguf.float("expert_weights_scale", 1.0) == 1.0
    if gguf.find_int("leading_dense_block_count") or not is_usual:
        raise UnsupportedError(
            f"a {gguf.arch} file with dense layers (leading_dense_block_count) or another router (expert_weights_norm "
            "false, or an expert_weights_scale) has no class in transformers"
        )
    model_type, values = _granitemoe(gguf)
    if model_type != "granitemoeshared":
        raise UnsupportedError(f"a {gguf.arch} file without shared experts has no class in transformers")
    size = gguf.find_int("attention.key_length", 1) or gguf.head_size
    return model_type, {**values, "head_dim": size, "attention_multiplier": gguf.float("attention.scale", size**-0.5)}


def _bailingmoe2(gguf: Metadata) -> tuple[str, Values]:
    """Ling 2.0, which computes what GLM-4.5 does; transformers has no class of its name."""
    return "glm4_moe", {
        **experts(gguf, "n_routed_experts"),
        **routing(gguf),
        **partial_rotary(gguf),
        "attention_bias": gguf.has(r"attn_qkv\.bias"),
        "use_qk_norm": gguf.has(r"attn_q_norm\.weight"),
    }


def _dots1(gguf: Metadata) -> tuple[str, Values]:
    return "dots1", {
        **experts(gguf, "n_routed_experts"),
        **routing(gguf),
        **head_dim(gguf),
        "attention_bias": gguf.has(r"attn_q\.bias"),
        "sliding_window": None,
        "layer_types": ["full_attention"] * gguf.layers,
    }


def _gpt_oss(gguf: Metadata) -> tuple[str, Values]:
    rope = rope_parameters(gguf)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # of every gpt-oss; the format has no key for it
    return "gpt_oss", {
        **experts(gguf, "num_local_experts", width="intermediate_size"),
        **head_dim(gguf),
        "sliding_window": gguf.int("attention.sliding_window"),
        "rope_parameters": rope,
    }


def _granitemoe(gguf: Metadata) -> tuple[str, Values]:
    values: Values = {
        **experts(gguf, "num_local_experts", width="intermediate_size"),
        **granite_multipliers(gguf),
        "attention_bias": gguf.has(r"attn_q\.bias"),
    }
    shared = gguf.shape("ffn_up_shexp.weight")
    if shared is None:
        return "granitemoe", values
    return "granitemoeshared", {**values, "shared_intermediate_size": shared[0]}


def _ernie(gguf: Metadata) -> tuple[str, Values]:
    return "ernie4_5_moe", {
        **experts(gguf, "moe_num_experts", "moe_k"),
        "moe_num_shared_experts": gguf.find_int("expert_shared_count") or 0,
        "moe_layer_start_index": gguf.int("leading_dense_block_count", 0),
        "moe_layer_end_index": -1,
        "moe_layer_interval": gguf.find_int("interleave_moe_layer_step", 1) or 1,
        "use_bias": gguf.has(r"attn_q\.bias"),
    }


def _phimoe(gguf: Metadata) -> tuple[str, Values]:
    if gguf.has(r"rope_factors_(long|short)\.weight"):
        raise UnsupportedError(
            "phimoe with longrope: the format has no keys for its short_mscale and long_mscale; pass --model_path with "
            "the model's config.json"
        )
    return "phimoe", {
        **experts(gguf, "num_local_experts", width="intermediate_size"),
        "attention_bias": gguf.has(r"attn_q\.bias"),
        "lm_head_bias": "output.bias" in gguf.shapes,
        "sliding_window": gguf.find_int("attention.sliding_window", 1),
    }


def _minimax(gguf: Metadata) -> tuple[str, Values]:
    return "minimax_m2", {
        **experts(gguf, "num_local_experts", width="intermediate_size"),
        **partial_rotary(gguf),
    }


def _hunyuan(gguf: Metadata) -> tuple[str, Values]:
    values = experts(gguf, "num_experts", "moe_topk", "intermediate_size")
    shared = gguf.shape("ffn_up_shexp.weight")
    if shared is not None and shared[0] != values.get("intermediate_size"):
        raise UnsupportedError(
            "a hunyuan-moe file whose shared expert is not as wide as the routed ones; pass --model_path"
        )
    return "hunyuan_v1_moe", {
        **values,
        **head_dim(gguf),
        "moe_topk": [values["moe_topk"]] * gguf.layers,
        "attention_bias": gguf.has(r"attn_q\.bias"),
    }


def _shared_of_groups(gguf: Metadata) -> Values:
    """A sigmoid router's values in families that count num_shared_experts."""
    values = routing(gguf)
    values["num_shared_experts"] = values.pop("n_shared_experts")
    return values


def _exaone_moe(gguf: Metadata) -> tuple[str, Values]:
    values = {**experts(gguf, "num_experts"), **_shared_of_groups(gguf), **head_dim(gguf), **windows(gguf, 4)}
    dense = gguf.int("leading_dense_block_count", 0)
    values["mlp_layer_types"] = ["dense" if layer < dense else "sparse" for layer in range(gguf.layers)]
    return "exaone_moe", values


def _afmoe(gguf: Metadata) -> tuple[str, Values]:
    return "afmoe", {
        **experts(gguf, "num_experts"),
        **head_dim(gguf),
        **windows(gguf, 4),
        "num_shared_experts": gguf.find_int("expert_shared_count") or 0,
        "num_dense_layers": gguf.int("leading_dense_block_count", 0),
        "route_scale": gguf.float("expert_weights_scale", 1.0),
        "attention_bias": gguf.has(r"attn_q\.bias"),
        "mup_enabled": True,  # llama.cpp always scales embeddings by the root of their width
    }


_LLAMA4_WITHOUT_NORM = 128  # experts of Maverick, which does not normalize queries and keys


def _llama4(gguf: Metadata) -> tuple[str, Values]:
    values = experts(gguf, "num_local_experts", width="intermediate_size")
    return "llama4_text", {
        **values,
        **head_dim(gguf),
        "intermediate_size_mlp": gguf.int("feed_forward_length"),
        "interleave_moe_layer_step": gguf.int("interleave_moe_layer_step"),
        "use_qk_norm": values["num_local_experts"] != _LLAMA4_WITHOUT_NORM,
        "attention_bias": gguf.has(r"attn_q\.bias"),
    }


def _glm_dsa(gguf: Metadata) -> tuple[str, Values]:
    values: Values = {
        **experts(gguf, "n_routed_experts"),
        **routing(gguf),
        **latent(gguf),
        **indexer(gguf),
    }
    if (kinds := indexer_kinds(gguf)) is not None:
        values["indexer_types"] = kinds
    return "glm_moe_dsa", values


_MIMO2_WINDOW = 128  # as published and as files have it, without the token itself, which transformers counts


def _mimo2(gguf: Metadata) -> tuple[str, Values]:
    """Layers with a window have twice the heads of keys; all rotate as much of a head, with a base of their own."""
    values = {**experts(gguf, "n_routed_experts"), **windows(gguf, 6)}
    kinds, kv_heads = values["layer_types"], gguf.ints("attention.head_count_kv")
    assert isinstance(kinds, list)
    full = min(kv_heads)
    if any(heads != full * (1 + (kind != "full_attention")) for heads, kind in zip(kv_heads, kinds, strict=True)):
        raise UnsupportedError("a mimo2 file whose heads of keys are not doubled by windows is no known model")
    if values["sliding_window"] == _MIMO2_WINDOW:
        values["sliding_window"] = _MIMO2_WINDOW + 1
    rope = rope_parameters(gguf)
    rope["partial_rotary_factor"] = rotary_share(gguf, gguf.int("attention.key_length"))
    local = {**rope, "rope_theta": gguf.float("rope.freq_base_swa", 10000.0)}
    return "mimo_v2_flash", {
        **values,
        **head_dim(gguf),
        "num_key_value_heads": full,
        "intermediate_size": gguf.int("feed_forward_length"),
        "v_head_dim": gguf.int("attention.value_length"),
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "mlp_layer_types": mlp_kinds(gguf),
        "attention_value_scale": gguf.float("attention.value_scale", 0.707),  # not in older files
        "routed_scaling_factor": gguf.float("expert_weights_scale", 1.0),
        "norm_topk_prob": gguf.bool("expert_weights_norm", True),
        **groups(gguf),
        "attention_bias": gguf.has(r"attn_q\.bias"),
    }


def _gemma4(gguf: Metadata) -> tuple[str, Values]:
    """Full layers have heads of another size, and rotate the first elements of them only."""
    values: Values = windows(gguf, 6)
    kinds, kv_heads = values["layer_types"], gguf.ints("attention.head_count_kv")
    assert isinstance(kinds, list)
    by_kind = {kind: [i for i, one in enumerate(kinds) if one == kind] for kind in dict.fromkeys(kinds)}
    several = [kind for kind, layers in by_kind.items() if len({kv_heads[i] for i in layers}) > 1]
    if several or "full_attention" not in by_kind:
        raise UnsupportedError("a gemma4 file whose heads of keys do not follow its windows is no known model")
    full = by_kind["full_attention"]
    borrows = not gguf.has(r"attn_k\.weight")  # an assistant, of which this says whether full layers' heads are counted
    shares = [f"blk.{i}.attn_v.weight" not in gguf.shapes and f"blk.{i}.attn_k.weight" in gguf.shapes for i in full]
    size = gguf.int("attention.key_length")
    factors = gguf.factors.get("rope_freqs.weight", [1.0] * (size // 2))
    theta, local = gguf.float("rope.freq_base", 1e6), gguf.float("rope.freq_base_swa", 10000.0)
    turning = sum(one == 1.0 for one in factors) / max(len(factors), 1)
    inner = gguf.ints("feed_forward_length")
    values |= {
        "head_dim": gguf.int("attention.key_length_swa"),
        "global_head_dim": size,
        "num_key_value_heads": kv_heads[next((i for i, one in enumerate(kinds) if one != "full_attention"), 0)],
        "num_global_key_value_heads": kv_heads[full[0]],
        "attention_k_eq_v": borrows or any(shares),
        "num_kv_shared_layers": gguf.find_int("attention.shared_kv_layers") or 0,
        "hidden_size_per_layer_input": gguf.find_int("embedding_length_per_layer_input") or 0,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "final_logit_softcapping": gguf.find_float("final_logit_softcapping"),
        "enable_moe_block": bool(gguf.find_int("expert_count")),
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": turning},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }
    if values["enable_moe_block"]:
        values |= experts(gguf, "num_experts", "top_k_experts")
    if (table := gguf.shapes.get("per_layer_token_embd.weight")) is not None:
        values["vocab_size_per_layer_input"] = table[0]
    return "gemma4_text", values


FAMILIES: dict[str, GGUFFamily] = {
    "llama": GGUFFamily(_llama, permuted_qk=True),
    "qwen2": GGUFFamily(_qwen2),
    "qwen3": GGUFFamily(_qwen3),
    "qwen2moe": GGUFFamily(_qwen2moe),
    "qwen3moe": GGUFFamily(_qwen3moe),
    "deepseek2": GGUFFamily(_deepseek2),
    "olmoe": GGUFFamily(_olmoe),
    "glm4moe": GGUFFamily(_glm4moe, gating=SIGMOID),
    "bailingmoe": GGUFFamily(_bailingmoe, gating=SOFTMAX, permuted_qk=True),
    "bailingmoe2": GGUFFamily(_bailingmoe2, gating=SIGMOID),
    "dots1": GGUFFamily(_dots1, gating=SIGMOID),
    "gpt-oss": GGUFFamily(_gpt_oss),
    "granitemoe": GGUFFamily(_granitemoe, permuted_qk=True),
    "ernie4_5-moe": GGUFFamily(_ernie, gating=SOFTMAX),
    "phimoe": GGUFFamily(_phimoe),
    "minimax-m2": GGUFFamily(_minimax, gating=SIGMOID),
    "hunyuan-moe": GGUFFamily(_hunyuan),
    "exaone-moe": GGUFFamily(_exaone_moe, gating=SIGMOID),
    "afmoe": GGUFFamily(_afmoe, gating=SIGMOID, normalizes=True),
    "llama4": GGUFFamily(_llama4),
    "glm-dsa": GGUFFamily(_glm_dsa, gating=SIGMOID),
    "mimo2": GGUFFamily(_mimo2, gating=SIGMOID, differs_by_layer=True),
    "gemma4": GGUFFamily(_gemma4, differs_by_layer=True),
    # The language models of those that read images: positions of text are the same on all axes.
    "qwen2vl": GGUFFamily(_qwen2),
    "qwen3vl": GGUFFamily(_qwen3),
    "qwen3vlmoe": GGUFFamily(_qwen3moe),
    **COMPRESSED_FAMILIES,
    **DENSE_FAMILIES,
    **NEWER_FAMILIES,
    **RECURRENT_FAMILIES,
}

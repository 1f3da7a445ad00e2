"""GGUF architectures without experts: model type and config values. Those with experts are in families.py."""

from __future__ import annotations

import logging

from ktransformers.errors import UnsupportedError
from ktransformers.models.gguf.fields import (
    GGUFFamily,
    granite_multipliers,
    head_dim,
    latent,
    layer_norm,
    partial_rotary,
    rotary_share,
    windows,
)
from ktransformers.models.gguf.metadata import Metadata, Values
from ktransformers.models.gguf.rope import rope_parameters

__all__ = ["DENSE_FAMILIES"]

logger = logging.getLogger(__name__)

_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


def _bias(gguf: Metadata) -> Values:
    return {"attention_bias": gguf.has(r"attn_q\.bias")}


def _gemma(gguf: Metadata) -> tuple[str, Values]:
    return "gemma", head_dim(gguf)


def _query_scale(gguf: Metadata, layers_of_27b: int) -> Values:
    """query_pre_attn_scalar: no key of the format. It is head_dim in all published models but those of 27B."""
    size = gguf.int("attention.key_length")
    if gguf.layers == layers_of_27b:
        size = gguf.head_size
    return {"query_pre_attn_scalar": size}


def _gemma2(gguf: Metadata) -> tuple[str, Values]:
    return "gemma2", {
        **head_dim(gguf),
        **windows(gguf, 2),
        **_query_scale(gguf, _GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": gguf.find_float("attn_logit_softcapping"),
        "final_logit_softcapping": gguf.find_float("final_logit_softcapping"),
    }


def _gemma3(gguf: Metadata) -> tuple[str, Values]:
    rope, local = rope_parameters(gguf), gguf.find_float("rope.freq_base_swa")
    if gguf.raw("rope.freq_base") is None:  # Ollama's converter has other names for both
        rope["rope_theta"] = gguf.float("rope.global.freq_base", 1e6)
    local = gguf.float("rope.local.freq_base", 10000.0) if local is None else local
    if _is_scaled_without_a_key(gguf):
        logger.info("the GGUF file does not say gemma3.rope.scaling.factor; taking 8, as published")
        rope |= {"rope_type": "linear", "factor": 8.0}
    return "gemma3_text", {
        **head_dim(gguf),
        **windows(gguf, 6),
        **_query_scale(gguf, _GEMMA3_27B_LAYERS),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
            "full_attention": rope,
        },
        "final_logit_softcapping": gguf.find_float("final_logit_softcapping"),
    }


def _is_scaled_without_a_key(gguf: Metadata) -> bool:
    """Ollama's converter leaves out the scaling of Gemma 3 for 128k positions, and the epsilon of its norms."""
    said = any(gguf.raw(f"rope.scaling.{key}") is not None for key in ("type", "factor"))
    is_ollamas = gguf.raw("attention.layer_norm_rms_epsilon") is None
    return is_ollamas and not said and gguf.int("context_length") >= 131072


def _partly_rotated(gguf: Metadata) -> Values:
    """rope_parameters of families whose head_dim has no key of its own."""
    share = rotary_share(gguf, gguf.head_size)
    return {"rope_parameters": {**rope_parameters(gguf), "partial_rotary_factor": share}}


def _phi2(gguf: Metadata) -> tuple[str, Values]:
    return "phi", {**layer_norm(gguf), **_partly_rotated(gguf)}


def _stablelm(gguf: Metadata) -> tuple[str, Values]:
    if gguf.has(r"attn_q_norm\.weight"):
        raise UnsupportedError("stablelm with a norm for each head: its converter joins them")
    return "stablelm", {
        **layer_norm(gguf),
        **_partly_rotated(gguf),
        "use_qkv_bias": gguf.has(r"attn_q\.bias"),
        "use_parallel_residual": gguf.bool("use_parallel_residual", True),
    }


def _nemotron(gguf: Metadata) -> tuple[str, Values]:
    bias = {**_bias(gguf), "mlp_bias": gguf.has(r"ffn_up\.bias")}
    return "nemotron", {**layer_norm(gguf, "norm_eps"), **_partly_rotated(gguf), **bias, "head_dim": gguf.head_size}


def _gptneox(gguf: Metadata) -> tuple[str, Values]:
    return "gpt_neox", {
        **layer_norm(gguf),
        **_partly_rotated(gguf),
        "attention_bias": gguf.has(r"attn_qkv\.bias"),
        "use_parallel_residual": gguf.bool("use_parallel_residual", True),
    }


def _phi3(gguf: Metadata) -> tuple[str, Values]:
    values: Values = {"sliding_window": gguf.find_int("attention.sliding_window") or None, **_partly_rotated(gguf)}
    if (original := gguf.find_int("rope.scaling.original_context_length", 1)) is not None:
        values["original_max_position_embeddings"] = original
    return "phi3", values


def _gpt2(gguf: Metadata) -> tuple[str, Values]:
    common = {"n_inner": gguf.int("feed_forward_length"), "n_positions": gguf.int("context_length")}
    return "gpt2", {**layer_norm(gguf, "layer_norm_epsilon"), **common}


def _starcoder(gguf: Metadata) -> tuple[str, Values]:
    common = {"n_inner": gguf.int("feed_forward_length"), "n_positions": gguf.int("context_length")}
    if gguf.find_int("attention.head_count_kv", 1) != 1:
        raise UnsupportedError("a starcoder file with more than one head of keys is no known model; pass --model_path")
    return "gpt_bigcode", {**layer_norm(gguf, "layer_norm_epsilon"), **common, "multi_query": True}


def _starcoder2(gguf: Metadata) -> tuple[str, Values]:
    return "starcoder2", {
        **layer_norm(gguf, "norm_epsilon"),
        "use_bias": gguf.has(r"attn_q\.bias"),
        "sliding_window": gguf.find_int("attention.sliding_window", 1),  # llama.cpp's converter writes none
    }


def _command_r(gguf: Metadata) -> tuple[str, Values]:
    return "cohere", {
        **layer_norm(gguf),
        **_bias(gguf),
        "logit_scale": gguf.float("logit_scale"),
        "use_qk_norm": gguf.has(r"attn_q_norm\.weight"),
    }


def _cohere2(gguf: Metadata) -> tuple[str, Values]:
    return "cohere2", {
        **layer_norm(gguf),
        **windows(gguf, 4),
        **_bias(gguf),
        **head_dim(gguf),
        "logit_scale": gguf.float("logit_scale"),
    }


def _olmo(gguf: Metadata) -> tuple[str, Values]:
    return "olmo", {**_bias(gguf), "clip_qkv": gguf.find_float("attention.clamp_kqv")}


def _olmo2(gguf: Metadata) -> tuple[str, Values]:
    if gguf.find_int("attention.sliding_window", 1) is None:
        return "olmo2", _bias(gguf)
    rope = rope_parameters(gguf)  # scaled in layers without window only
    local = {"rope_type": "default", "rope_theta": gguf.find_float("rope.freq_base_swa") or rope["rope_theta"]}
    both = {"sliding_attention": local, "full_attention": rope}
    return "olmo3", {**_bias(gguf), **windows(gguf, 4), "rope_parameters": both}


def _glm4(gguf: Metadata) -> tuple[str, Values]:
    if gguf.raw("rope.dimension_sections") is not None:
        raise UnsupportedError(
            "rope.dimension_sections: the language model of GLM-4V, whose rows of queries and keys are in another order"
        )
    return "glm4", {**_bias(gguf), **partial_rotary(gguf)}


def _chatglm(gguf: Metadata) -> tuple[str, Values]:
    """GLM-4 and GLM-Edge, and ChatGLM3, which computes the same."""
    return "glm", {**partial_rotary(gguf), "attention_bias": gguf.has(r"attn_(q|qkv)\.bias")}


def _exaone(gguf: Metadata) -> tuple[str, Values]:
    """EXAONE 3 and 3.5 compute what Llama does, and transformers takes them for it."""
    return "llama", {**head_dim(gguf), "attention_bias": False, "mlp_bias": False}


def _minicpm3(gguf: Metadata) -> tuple[str, Values]:
    """Scales of embeddings, of what layers add and of logits have no key: they are as published, as in llama.cpp."""
    value = gguf.find_int("attention.value_length", 1) or gguf.head_size
    return "minicpm3", {
        **latent(gguf, value),
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "mlp_bias": False,
    }


def _jais2(gguf: Metadata) -> tuple[str, Values]:
    return "jais2", {
        **layer_norm(gguf),
        **head_dim(gguf),
        **_bias(gguf),
        "mlp_bias": gguf.has(r"ffn_up\.bias"),
    }


def _exaone4(gguf: Metadata) -> tuple[str, Values]:
    return "exaone4", {**head_dim(gguf), **windows(gguf, 4)}


def _granite(gguf: Metadata) -> tuple[str, Values]:
    return "granite", {**granite_multipliers(gguf), **_bias(gguf), "mlp_bias": gguf.has(r"ffn_down\.bias")}


def _minicpm(gguf: Metadata) -> tuple[str, Values]:
    """MiniCPM is Granite with the usual scale of attention; transformers has no class of its name."""
    if gguf.find_int("expert_count"):
        raise UnsupportedError("MiniCPM-MoE has no class in transformers")
    size = gguf.find_int("attention.key_length", 1) or gguf.head_size
    return "granite", {**granite_multipliers(gguf), "attention_multiplier": gguf.float("attention.scale", size**-0.5)}


def _arcee(gguf: Metadata) -> tuple[str, Values]:
    return "arcee", {**head_dim(gguf), **_bias(gguf), "mlp_bias": gguf.has(r"ffn_down\.bias")}


def _ernie4_5(gguf: Metadata) -> tuple[str, Values]:
    return "ernie4_5", {**head_dim(gguf), "use_bias": gguf.has(r"attn_q\.bias")}


def _hunyuan_dense(gguf: Metadata) -> tuple[str, Values]:
    return "hunyuan_v1_dense", {**head_dim(gguf), **_bias(gguf)}


def _smollm3(gguf: Metadata) -> tuple[str, Values]:
    # Every fourth layer does not rotate: no key of the format, and so in all published models.
    bias = {**_bias(gguf), "mlp_bias": gguf.has(r"ffn_down\.bias")}
    return "smollm3", {**bias, "no_rope_layers": None, "no_rope_layer_interval": 4, "use_sliding_window": False}


def _seed_oss(gguf: Metadata) -> tuple[str, Values]:
    return "seed_oss", {
        **head_dim(gguf),
        **_bias(gguf),
        "attention_out_bias": gguf.has(r"attn_output\.bias"),
        "mlp_bias": gguf.has(r"ffn_down\.bias"),
    }


def _mistral3(gguf: Metadata) -> tuple[str, Values]:
    if gguf.find_int("expert_count"):
        raise UnsupportedError("mistral3 with experts has no class in transformers")
    rope = rope_parameters(gguf)
    if (beta := gguf.find_float("attention.temperature_scale")) is None:
        return "mistral", {**head_dim(gguf), "sliding_window": None}
    rope["llama_4_scaling_beta"] = beta
    return "ministral3", {**head_dim(gguf), "sliding_window": None, "rope_parameters": rope}


DENSE_FAMILIES: dict[str, GGUFFamily] = {
    "gemma": GGUFFamily(_gemma, norm_plus_one=True),
    "gemma2": GGUFFamily(_gemma2, norm_plus_one=True),
    "gemma3": GGUFFamily(_gemma3, norm_plus_one=True),
    "stablelm": GGUFFamily(_stablelm, has_layer_norm=True),
    "nemotron": GGUFFamily(_nemotron, norm_plus_one=True, has_layer_norm=True),
    "gptneox": GGUFFamily(_gptneox, qkv_by_part=True, has_layer_norm=True),
    "phi2": GGUFFamily(_phi2, has_layer_norm=True),
    "phi3": GGUFFamily(_phi3),
    "gpt2": GGUFFamily(_gpt2, is_conv1d=True, has_layer_norm=True),
    "starcoder": GGUFFamily(_starcoder, has_layer_norm=True),
    "starcoder2": GGUFFamily(_starcoder2, has_layer_norm=True),
    "command-r": GGUFFamily(_command_r, has_layer_norm=True),
    "cohere2": GGUFFamily(_cohere2, has_layer_norm=True),
    "chatglm": GGUFFamily(_chatglm),
    "exaone": GGUFFamily(_exaone),
    "minicpm3": GGUFFamily(_minicpm3),
    "olmo": GGUFFamily(_olmo, permuted_qk=True, has_layer_norm=True),
    "olmo2": GGUFFamily(_olmo2),
    "glm4": GGUFFamily(_glm4),
    "jais2": GGUFFamily(_jais2, has_layer_norm=True),
    "exaone4": GGUFFamily(_exaone4),
    "granite": GGUFFamily(_granite, permuted_qk=True),
    "minicpm": GGUFFamily(_minicpm, permuted_qk=True),
    "arcee": GGUFFamily(_arcee, permuted_qk=True),
    "ernie4_5": GGUFFamily(_ernie4_5),
    "hunyuan-dense": GGUFFamily(_hunyuan_dense),
    "smollm3": GGUFFamily(_smollm3, permuted_qk=True),
    "seed_oss": GGUFFamily(_seed_oss),
    "mistral3": GGUFFamily(_mistral3, permuted_qk=True),
}

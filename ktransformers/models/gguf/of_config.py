"""Makes the metadata of a GGUF file from a Hugging Face config: the inverse of `models/gguf/config.py`.

Keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, as llama.cpp's converter writes them. What
is written is read back and compared with the config: a model whose config says more than the format has keys for is
refused, not written without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ktransformers.errors import UnsupportedError
from ktransformers.models.gguf.config import config_from_gguf

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["WRITABLE_FAMILIES", "check_comes_back", "factor_tensors", "hf_metadata"]

Values = dict[str, Any]
_SOFTMAX, _SIGMOID = 1, 2  # gguf.ExpertGatingFuncType


def _experts(config: Any, count: int, used: int, width: int) -> Values:
    return {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": width}


def _heads(config: Any) -> Values:
    """Grouped queries, and as much of a head as rotates."""
    size = _head_dim(config)
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    return {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": int(size * share),
    }


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _windowed(config: Any) -> Values:
    window = getattr(config, "sliding_window", None)
    return _heads(config) | ({"attention.sliding_window": window} if window else {})


def _mixtral(config: Any) -> Values:
    return _windowed(config) | _experts(
        config, config.num_local_experts, config.num_experts_per_tok, config.intermediate_size
    )


def _qwen2_moe(config: Any) -> Values:
    return {
        **_heads(config),
        **_experts(config, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size),
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "expert_weights_norm": config.norm_topk_prob,
    }


def _qwen3_moe(config: Any) -> Values:
    return {
        **_heads(config),
        **_experts(config, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size),
        "expert_weights_norm": config.norm_topk_prob,
    }


def _olmoe(config: Any) -> Values:
    clip = {} if config.clip_qkv is None else {"attention.clamp_kqv": float(config.clip_qkv)}
    experts = _experts(config, config.num_experts, config.num_experts_per_tok, config.intermediate_size)
    return {**_heads(config), **experts, **clip, "expert_weights_norm": config.norm_topk_prob}


def _grouped(config: Any, gating: int) -> Values:
    """What the routers of DeepSeek's kind share."""
    return {
        **_experts(config, config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size),
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": bool(config.norm_topk_prob),
        "expert_group_count": config.n_group or 1,
        "expert_group_used_count": config.topk_group or 1,
        "expert_gating_func": gating,
    }


def _latent(config: Any) -> Values:
    """Attention over latents: the file describes the latent that is kept, and the heads by keys of their own."""
    query = {} if config.q_lora_rank is None else {"attention.q_lora_rank": config.q_lora_rank}
    return query | {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


def _deepseek_v2(config: Any) -> Values:
    return _latent(config) | _grouped(config, _SOFTMAX)


def _deepseek_v3(config: Any) -> Values:
    return _latent(config) | _grouped(config, _SIGMOID)


def _glm4_moe(config: Any) -> Values:
    return _heads(config) | _grouped(config, _SIGMOID)


def _minimax_m2(config: Any) -> Values:
    experts = _experts(config, config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)
    return {**_heads(config), **experts, "expert_gating_func": _SIGMOID}


def _gpt_oss(config: Any) -> Values:
    experts = _experts(config, config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)
    return _windowed(config) | experts


def _granitemoe(config: Any) -> Values:
    return {
        **_heads(config),
        **_experts(config, config.num_local_experts, config.num_experts_per_tok, config.intermediate_size),
        "attention.scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
    }


def _ernie4_5_moe(config: Any) -> Values:
    return {
        **_heads(config),
        **_experts(config, config.moe_num_experts, config.moe_k, config.moe_intermediate_size),
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
        "expert_shared_count": config.moe_num_shared_experts,
        "expert_shared_feed_forward_length": config.moe_num_shared_experts * config.moe_intermediate_size,
    }


def _hunyuan_v1_moe(config: Any) -> Values:
    used = config.moe_topk[0] if isinstance(config.moe_topk, list) else config.moe_topk
    experts = _experts(config, config.num_experts, used, config.intermediate_size)
    return {**_heads(config), **experts, "expert_shared_feed_forward_length": config.intermediate_size}


WRITABLE_FAMILIES: Mapping[str, tuple[str, Callable[[Any], Values]]] = {
    "llama": ("llama", _heads),
    "mistral": ("llama", _windowed),
    "mixtral": ("llama", _mixtral),
    "qwen2": ("qwen2", _heads),
    "qwen3": ("qwen3", _heads),
    "qwen2_moe": ("qwen2moe", _qwen2_moe),
    "qwen3_moe": ("qwen3moe", _qwen3_moe),
    "deepseek_v2": ("deepseek2", _deepseek_v2),
    "deepseek_v3": ("deepseek2", _deepseek_v3),
    "dots1": ("dots1", _glm4_moe),
    "ernie4_5_moe": ("ernie4_5-moe", _ernie4_5_moe),
    "glm4_moe": ("glm4moe", _glm4_moe),
    "gpt_oss": ("gpt-oss", _gpt_oss),
    "granitemoe": ("granitemoe", _granitemoe),
    "hunyuan_v1_moe": ("hunyuan-moe", _hunyuan_v1_moe),
    "minimax_m2": ("minimax-m2", _minimax_m2),
    "olmoe": ("olmoe", _olmoe),
    "phimoe": ("phimoe", _mixtral),
}
"""model_type -> architecture of the file, and what the family has beyond all others."""


def hf_metadata(config: PretrainedConfig) -> tuple[str, Values]:
    """Return the architecture, and its keys with their values; names without the architecture's prefix are for all.

    Raises UnsupportedError for a family that is not in WRITABLE_FAMILIES.
    """
    known = WRITABLE_FAMILIES.get(config.model_type)
    if known is None:
        raise UnsupportedError(
            f"safetensors of {config.model_type} cannot be written as GGUF; those of {', '.join(WRITABLE_FAMILIES)} "
            "can. A GGUF of the model can be quantized again"
        )
    arch, family = known
    values: Values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
        **_rotation(config),
        **family(config),
    }
    return arch, {f"{arch}.{key}": value for key, value in values.items()}


def _rotation(config: Any) -> Values:
    rope = config.rope_parameters
    values: Values = {"rope.freq_base": float(rope["rope_theta"])}
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        return values | {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        return values | _yarn(rope)
    if kind == "longrope":
        return values | {
            "rope.scaling.type": "longrope",  # without it llama.cpp takes the factors for tensors too many
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.attn_factor": float(ROPE_INIT_FUNCTIONS[kind](config)[1]),
        }
    if kind not in ("default", "llama3"):
        raise UnsupportedError(f"rope scaling {kind!r:.40} has no keys in GGUF")
    return values


def _yarn(rope: Mapping[str, Any]) -> Values:
    values: Values = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }
    for name, key in (("beta_fast", "beta_fast"), ("beta_slow", "beta_slow"), ("attention_factor", "attn_factor")):
        if rope.get(name) is not None:
            values[f"rope.scaling.yarn_{key}"] = float(rope[name])
    if rope.get("mscale_all_dim"):
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return values


def factor_tensors(config: PretrainedConfig) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return the divisors of rotary frequencies, in fp32: part of the config in safetensors, tensors in a GGUF file."""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "longrope":
        lengths = ("long", "short")
        return {f"rope_factors_{one}.weight": np.array(rope[f"{one}_factor"], dtype=np.float32) for one in lengths}
    return {"rope_freqs.weight": _llama3_factors(config)} if kind == "llama3" else {}


def _llama3_factors(config: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """1 for short wavelengths, `factor` for long ones, and a way between for those in the middle."""
    rope = config.rope_parameters
    size = int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0))
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float64) / size)
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (turns >= low).astype(np.float64) if high == low else np.clip((turns - low) / (high - low), 0, 1)
    factors: np.ndarray[Any, np.dtype[np.float32]] = (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
    return factors


_NOT_COMPARED = frozenset(
    {
        # what a config says of training, of how it was saved, and of what this program decides by itself
        *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"),
        *("initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "pretraining_tp"),
        *("attention_probs_dropout_prob", "hidden_dropout_prob", "router_jitter_noise", "input_jitter_noise"),
        *(
            "router_aux_loss_coef",
            "output_router_logits",
            "aux_loss_alpha",
            "seq_aux",
            "ep_size",
            "quantization_config",
        ),
        *("initial_context_length", "router_dtype", "output_hidden_states", "output_attentions", "return_dict"),
        *("problem_type", "id2label", "label2id", "chunk_size_feed_forward", "is_encoder_decoder", "expert_dropout"),
        # ends of text are the tokenizer's in a file
        *("bos_token_id", "eos_token_id", "pad_token_id", "eod_token_id", "sep_token_id", "unk_token_id"),
        # counted otherwise, or of parts that are not written
        *("num_nextn_predict_layers", "max_window_layers", "topk_method", "head_dim", "decoder_sparse_step"),
        *("mlp_only_layers", "moe_norm_min", "layer_types", "num_key_value_heads", "moe_layer_freq", "scoring_func"),
        *("mtp_transformer_layers", "num_mtp_modules", "use_mtp", "norm_min", "default_theta"),
        "model_type",  # compared below
    }
)


def check_comes_back(
    config: PretrainedConfig, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise UnsupportedError where the config that such a file describes is not this one, naming the fields."""
    from ktransformers.models.facts import ModelFacts

    factors = {name: values.tolist() for name, values in factor_tensors(config).items()}
    got = config_from_gguf(_as_read(metadata), shapes, factors)
    wanted, given = config.to_dict(), got.to_dict()
    differ = [
        name
        for name, value in wanted.items()
        if name in given and name not in _NOT_COMPARED and not _same(value, given[name])
    ]
    facts, back = ModelFacts.of(config), ModelFacts.of(got)
    compared = ("vocab_size", "hidden_size", "layers", "latent", "experts", "is_tied", "context_len")
    differ += [name for name in compared if getattr(facts, name) != getattr(back, name)]
    differ = [name for name in differ if name != "rope_parameters"]
    if not _same_rotation(config, got):
        differ.append("rope_parameters")
    if config.model_type != got.model_type and (config.model_type, got.model_type) != ("mistral", "llama"):
        differ.append("model_type")
    if differ:
        said = ", ".join(f"{name} {wanted.get(name)!r:.60}" for name in dict.fromkeys(differ))
        raise UnsupportedError(f"GGUF has no keys for what this {config.model_type} config says: {said}")


def _same_rotation(config: Any, got: Any) -> bool:
    """Whether both rotate alike, whatever their parameters are called: those of Llama 3 are inferred from factors.

    What both say is not enough: a file has no key for YaRN's `truncate`, and none for other families' frequencies.
    """
    wanted, given = config.rope_parameters, got.rope_parameters
    if not _same(wanted.get("mscale_all_dim") or 0.0, given.get("mscale_all_dim") or 0.0):
        return False  # of attention's scale, beside the rotation
    kinds = [rope.get("rope_type", "default") for rope in (wanted, given)]
    if not all(kind in ROPE_INIT_FUNCTIONS for kind in kinds):
        return kinds[0] == kinds[1] and _same(wanted, given)
    for seq_len in (1, config.max_position_embeddings):  # below the original length, and beyond it
        computed = (
            ROPE_INIT_FUNCTIONS[kind](one, seq_len=seq_len) for kind, one in zip(kinds, (config, got), strict=True)
        )
        (ours, our_scale), (theirs, their_scale) = computed
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-5, atol=0.0):
            return False
        if not _same(float(our_scale), float(their_scale)):
            return False
    return True


def _as_read(metadata: Mapping[str, Any]) -> dict[str, object]:
    """As a reader of the file gets them: numbers of fp32."""
    return {key: float(np.float32(one)) if isinstance(one, float) else one for key, one in metadata.items()}


def _same(wanted: object, got: object) -> bool:
    """Equal, numbers up to the seven digits of fp32; of mappings what both say."""
    if isinstance(wanted, Mapping) and isinstance(got, Mapping):
        return all(_same(wanted[key], got[key]) for key in wanted.keys() & got.keys())
    if isinstance(wanted, int | float) and isinstance(got, int | float):
        return math.isclose(wanted, got, rel_tol=1e-6)
    if isinstance(wanted, list) and isinstance(got, list):
        return len(wanted) == len(got) and all(_same(a, b) for a, b in zip(wanted, got, strict=True))
    return wanted == got or (not wanted and not got)

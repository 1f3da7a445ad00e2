"""Tiny random models of any causal family of the installed transformers, made from its config class alone.

Values are chosen by the names of a config's fields, so that a family nobody here has heard of can be built; a few
families need values that fit each other (`_OF_FAMILIES`). Every window, chunk and top-k is REACH or less, so that
sequences of LENGTH tokens are longer than all of them (`check_reach` holds configs to it).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.support.models.tiny_models import deepseek_v4_values, random_model

LENGTH, STEPS = 64, 16
"""Tokens of a prompt, and of the answer behind it."""
REACH = 16
"""Most positions that a layer with a window sees, that are in a chunk, and that an indexer chooses."""

CAUSAL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
COMPOSITE_TYPES = sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(CAUSAL_TYPES))
"""Families whose language model is a part of a larger one, and has no class of its own."""

_LAYERS = 4

_WIDTHS: Mapping[str, int] = {
    "hidden": 64,
    "inner": 96,
    "layers": _LAYERS,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "rank": 32,
    "experts": 8,
    "top_k": 2,
    "one": 1,
    "reach": REACH,
    "vocab": 160,
    "positions": 512,
}
_NAMES: Mapping[str, str] = {
    "hidden": """hidden_size n_embd d_model word_embed_proj_dim embedding_dim emb_dim embedding_size
        input_embedding_size output_embedding_size attention_hidden_size cross_attention_hidden_size
        text_hidden_size projection_dim""",
    "inner": """intermediate_size n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim dim_ff mlp_hidden_size ffn_hidden_size
        expert_ffn_hidden_size feed_forward_size moe_intermediate_size shared_expert_intermediate_size
        intermediate_size_mlp dense_intermediate_size shared_intermediate_size shared_experts_intermediate_size
        moe_shared_expert_intermediate_size prefix_dense_intermediate_size""",
    "layers": """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers""",
    "heads": """num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads index_n_heads
        decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads""",
    "kv_heads": "num_key_value_heads num_kv_heads linear_num_key_heads",
    "head_dim": """head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim index_head_dim dim_head attention_head_dim
        attention_head_size kv_channels query_pre_attn_scalar rotary_dim linear_head_dim linear_key_head_dim
        linear_value_head_dim hidden_size_per_layer_input""",
    "rank": "q_lora_rank kv_lora_rank",
    "experts": "num_experts n_routed_experts num_local_experts moe_num_experts",
    "top_k": "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts",
    "one": """n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace
        num_dense_layers moe_layer_start_index decoder_sparse_step max_window_layers""",
    "reach": """sliding_window attention_chunk_size attention_window_size local_attention sliding_window_size
        window_size index_topk index_block_size keep_window_size chunk_size mamba_chunk_size block_size
        local_attn_chunk_length lsh_attn_chunk_length local_attention_window_len""",
    "vocab": "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    "positions": "max_position_embeddings n_positions max_seq_len",
}
"""What families call these widths and counts."""
_WIDTH_OF = {name: width for width, names in _NAMES.items() for name in names.split()}
_SETTINGS: Mapping[str, object] = {
    "use_sliding_window": True,
    "moe_layer_end_index": _LAYERS - 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "use_cache": True,
}

_OTHER_WIDTHS: Mapping[str, Sequence[int]] = {
    "hidden": (80, 96, 112),
    "inner": (36, 72, 100, 136),
    "kv_heads": (1, 2, 4),
    "vocab": (131, 163),
    "top_k": (1, 3, 4),
}
_OTHER_SETTINGS: Mapping[str, Sequence[bool]] = dict.fromkeys(
    ("tie_word_embeddings", "attention_bias", "qkv_bias", "use_qkv_bias", "mlp_bias", "use_bias", "norm_topk_prob"),
    (True, False),
)

_NOT_OF_VISION = frozenset({"vocab_size", "max_position_embeddings", "tie_word_embeddings"})
_REACHES = re.compile(r"window|chunk_(?:size|length)$|topk$|topk_blocks|local_attention|block_size|block_stride")


class NotBuilt(Exception):
    """transformers builds no config or model of these values."""


def family_model(model_type: str, seed: int | None = None) -> PreTrainedModel:
    """A random model of `family_config(model_type, seed)`. Raises NotBuilt."""
    try:
        auto = AutoModelForCausalLM if model_type in CAUSAL_TYPES else AutoModelForImageTextToText
        return random_model(family_config(model_type, seed), 1, auto)
    except Exception as error:  # whatever the classes of any family do with values that do not fit each other
        raise NotBuilt(f"{type(error).__name__}: {error}") from error


def family_config(model_type: str, seed: int | None = None) -> PretrainedConfig:
    """A tiny config of `model_type` in which its layers are of every kind that the family has.

    seed: of a random variation: odd widths, tied embeddings, biases, no grouped heads, other experts.
    """
    widths = dict(_WIDTHS)
    chosen = None if seed is None else random.Random(f"{model_type} {seed}")
    if chosen is not None:
        widths.update({name: chosen.choice(several) for name, several in _OTHER_WIDTHS.items()})
    values = _small(CONFIG_MAPPING[model_type], widths)
    text = values.get("text_config", values)
    if chosen is not None:
        settings = {name: chosen.choice(several) for name, several in _OTHER_SETTINGS.items()}
        known = CONFIG_MAPPING[model_type]().get_text_config(decoder=True).to_dict()
        text.update({name: value for name, value in settings.items() if name in known})
    text.update(_OF_FAMILIES.get(model_type, {}))
    values.update(_OF_COMPOSITES.get(model_type, {}))
    config: PretrainedConfig = CONFIG_MAPPING[model_type](**values)
    return config


def has_experts(model_type: str) -> bool:
    """Whether the text model of a family's own config has experts. A config that cannot be made has none."""
    try:
        values = CONFIG_MAPPING[model_type]().get_text_config(decoder=True).to_dict()
    except ValueError:
        return False
    counts = [values.get(name) for name in _NAMES["experts"].split()]
    return any(isinstance(count, int) and count > 1 for count in counts)


def reaches(config: PretrainedConfig) -> Iterator[tuple[str, int]]:
    """Fields of the text model that say how far a layer looks, and how far that is."""
    for name, value in config.get_text_config(decoder=True).to_dict().items():
        if _REACHES.search(name) and type(value) is int and not name.startswith(("use_", "max_window", "num_")):
            yield name, value


def _small(cls: type[PretrainedConfig], widths: Mapping[str, int], is_text: bool = True) -> dict[str, Any]:
    """Arguments of a config class: its own defaults, smaller."""
    given = cls()
    values = _shrunk(given, widths, is_text)
    for name, part in cls.sub_configs.items():
        found = getattr(given, name, None)
        kind = type(found) if isinstance(found, PretrainedConfig) else part
        if kind.__name__ != "AutoConfig":
            values[name] = _small(kind, widths, is_text="vision" not in name and "audio" not in name)
            if isinstance(found, PretrainedConfig) and found.model_type:
                values[name]["model_type"] = found.model_type
    return values


def _shrunk(given: PretrainedConfig, widths: Mapping[str, int], is_text: bool) -> dict[str, Any]:
    cls, defaults = type(given), given.to_dict()
    settable = {name for name in {*defaults, *given.attribute_map} if _is_settable(cls, name)}
    values: dict[str, Any] = {}
    for name in sorted(settable & _WIDTH_OF.keys()):  # two of them may be one field
        width, default = widths[_WIDTH_OF[name]], defaults.get(name)
        if _WIDTH_OF[name] != "head_dim" or default != 0:  # heads without such a part
            is_list = isinstance(default, list) and 0 < len(default) < _LAYERS  # of something else than layers
            values[name] = [width] * len(default) if is_list else width
    values.update({name: value for name, value in _SETTINGS.items() if name in settable})
    if not is_text:
        return {name: value for name, value in values.items() if name not in _NOT_OF_VISION}
    if defaults.get("kv_lora_rank"):  # keys of every head come out of the latent
        values["num_key_value_heads"] = widths["heads"]
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if isinstance(defaults.get(name), (list, tuple)) and defaults[name] and name in settable:
            kinds = list(dict.fromkeys(defaults[name]))
            is_in_turn = name != "mlp_layer_types"  # dense layers come first, and once
            values[name] = [kinds[at % len(kinds) if is_in_turn else min(at, len(kinds) - 1)] for at in range(_LAYERS)]
    return values


def _is_settable(cls: type[PretrainedConfig], name: str) -> bool:
    """Whether a config takes this argument, and does not compute it from others."""
    return getattr(getattr(cls, cls.attribute_map.get(name, name), None), "fset", True) is not None


def _of_kinds(*kinds: str) -> dict[str, list[str]]:
    return {"layer_types": [kinds[at % len(kinds)] for at in range(_LAYERS)]}


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MAMBA = {"hidden_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}

_QWEN4 = {
    **_of_kinds("linear_attention", "indexed_attention"),
    "hc_lowrank": 16,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 200,
    "split_ngram_parts": 4,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}

# With few heads many scores are 0, and which of their positions are chosen is up to torch's top-k, which does not say.
_MANY_INDEX_HEADS = {"index_n_heads": 16}

_DOTS3 = {
    **_MANY_INDEX_HEADS,
    **_of_kinds("indexed_attention", "sliding_attention"),
    "index_head_dim": 32,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 64,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 24,
    "swa_v_head_dim": 20,
}
"""Layers with windows have latents and heads of their own."""

_OF_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "axk2": _MANY_INDEX_HEADS,
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass_text": {**_of_kinds("sliding_attention", "full_attention")}
    | {"rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}},
    "dbrx": {"num_key_value_heads": 2, "tie_word_embeddings": False},  # as below, and never tied
    "deepseek_ocr2": {"mlp_layer_types": ["dense"] + ["sparse"] * (_LAYERS - 1), "num_key_value_heads": 4},
    "deepseek_v32": _MANY_INDEX_HEADS,
    "deepseek_v4": deepseek_v4_values(_LAYERS),
    "dots3_note": {**_DOTS3, "hidden_size": 64},  # as its towers give
    "dots3_note_text": _DOTS3,
    "ernie4_5_vl_moe": {"hidden_size": 64, "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "gemma3n": {"num_kv_shared_layers": 2},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "glm4v_moe": {
        "hidden_size": 64,
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
    },
    "glm_moe_dsa": _MANY_INDEX_HEADS,
    "glm5_next": {"num_key_value_heads": 4, "linear_num_heads": 4, "index_kpool": 4, **_MANY_INDEX_HEADS},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**_of_kinds("linear_attention", "full_attention"), **_MAMBA},
    "hy_v4": _MANY_INDEX_HEADS,
    "hy_v4_vl": {
        **_MANY_INDEX_HEADS,
        "num_key_value_heads": 4,
        "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
    },
    "helium": {"hidden_size": 64},  # which its heads have to fill
    "internlm3": {"attention_bias": True, "mlp_bias": True},  # the same for both
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8},
    "jetmoe": {"num_key_value_heads": 2, "num_experts_per_tok": 2},  # heads are as many as both give
    "lfm2": {**_of_kinds("conv", "full_attention"), "full_attn_idxs": None},
    "lfm2_moe": {**_of_kinds("conv", "full_attention"), "num_dense_layers": 1},
    "longcat_flash": {"moe_topk": 3, "num_experts_per_tok": 3},  # with one, transformers takes a list for a pair
    "mamba2": {"hidden_size": 64, "num_heads": 8},  # of which its heads are
    "mistral4": {"head_dim": 32},  # rotated and not
    "mimo_v2_flash": {"num_key_value_heads": 2},  # twice as many in layers with windows
    "minimax_m3_vl_text": {
        **_of_kinds("full_attention", "minimax_m3_sparse"),
        "rotary_dim": 8,
        "index_block_size": 8,
        "index_topk_blocks": 2,
        "index_n_heads": 2,  # one for each head of keys
        "num_key_value_heads": 2,
    },
    "muse_spark": {"hidden_size": 64, "moe_hidden_size": 32, **_of_kinds("full_attention", "sliding_attention")},
    "phimoe": {"sliding_window": None},  # its mask has the window, its attention does not
    "qwen4_exp": _QWEN4,
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32]},
    "stablelm": {"hidden_size": 64},  # a quarter of each head is rotated, by pairs
    "unlimited_ocr": {"num_key_value_heads": 4},
    "xlstm": {"qk_dim_factor": 0.5, "num_blocks": _LAYERS},
    "zamba": {
        "hidden_size": 64,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    }
    | {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {
        "hidden_size": 64,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_d_state": 8,
        "mamba_headdim": 16,
    }
    | {"layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1, **_of_kinds("hybrid", "hybrid_sliding")},
}
"""Of the text model: what does not follow from the names of fields."""
_TOWER = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
_OF_COMPOSITES: Mapping[str, Mapping[str, Any]] = {
    "dbrx": {  # without clipping transformers computes nothing
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.05, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "dots3_note": {
        "vision_config": {**_TOWER, "adapter_in_dim": 64, "adapter_out_dim": 64, "mlp_layer_types": ["dense"]},
        "audio_config": {**_TOWER, "adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 16},
    },
    "muse_spark": {
        "vision_config": _TOWER,
        "audio_config": {"patch_sizes": [16], "hidden_sizes": [64], "depths": [1], "num_hidden_layers": 1}
        | {"out_hidden_size": 64},
    },
    "nemotron_h_omni": {"vision_config": {**_TOWER, "model_type": "radio", "video_temporal_patch_size": 2}},
}

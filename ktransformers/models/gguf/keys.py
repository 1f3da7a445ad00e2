"""Keys of a GGUF file that the reader of its family did not ask for, and what they may say.

`Metadata` notes which keys were read. Each other one is looked up here: what changes nothing is taken, what would
change the answer is refused by name. A key that neither llama.cpp nor the `gguf` package knows is left aside, with one
line in the log. A test holds the table to all keys of the package, so that a new one has to be decided upon.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from ktransformers.errors import UnsupportedError
from ktransformers.models.gguf.metadata import Metadata, repeated

__all__ = ["NEUTRAL", "check_unread", "is_key_of_other_parts"]

logger = logging.getLogger(__name__)

Neutral = Callable[[Metadata, object], bool]
"""Whether a value says what holds anyway."""


def _any(gguf: Metadata, value: object) -> bool:
    """Of keys that describe, or that only parts read which are not run."""
    return True


def _never(gguf: Metadata, value: object) -> bool:
    return False


def _said(gguf: Metadata, key: str) -> object:
    """The value of another key: of an array by layer the one number that it repeats. None: nothing, or several."""
    value = repeated(gguf.metadata.get(f"{gguf.arch}.{key}"))
    return None if isinstance(value, np.ndarray) else value


def _one_of(value: object, *wanted: object) -> bool:
    """Whether a value is one of some, which an array is not."""
    return not isinstance(value, np.ndarray) and value in wanted


def _off(gguf: Metadata, value: object) -> bool:
    """0, false, nothing, or a list of such."""
    return not np.any(np.asarray(value)) if isinstance(value, int | float | list | np.ndarray) else not value


def _is(*wanted: float) -> Neutral:
    """One of some numbers."""

    def check(gguf: Metadata, value: object) -> bool:
        return isinstance(value, int | float) and any(math.isclose(value, one, rel_tol=1e-5) for one in wanted)

    return check


_factor = _is(0.0, 1.0)


def _equals(of: Callable[[Metadata], object]) -> Neutral:
    """What `of` says, or 0."""

    def check(gguf: Metadata, value: object) -> bool:
        wanted = of(gguf)
        if isinstance(value, np.ndarray | list):
            return all(one in (0, wanted) for one in np.asarray(value).ravel().tolist())
        return _one_of(value, 0, wanted)

    return check


def _key_length(gguf: Metadata) -> object:
    return _said(gguf, "attention.key_length") or _usual_length(gguf)


def _usual_length(gguf: Metadata) -> object:
    heads, width = _said(gguf, "attention.head_count"), _said(gguf, "embedding_length")
    return width // heads if isinstance(heads, int) and isinstance(width, int) and heads > 0 else None


def _swa_length(gguf: Metadata) -> object:
    return _said(gguf, "attention.key_length_swa") or _key_length(gguf)


_UNROTATED = ("nemotron_h", "nemotron_h_moe")
"""Families that rotate nothing. Their converter writes how much of a head would be rotated all the same, and not by the
width that heads have (Nemotron 3 Nano: 84 of 128)."""


def _rotated_length(gguf: Metadata, value: object) -> bool:
    return gguf.arch in _UNROTATED or _equals(_key_length)(gguf, value)


def _has_latent(gguf: Metadata) -> bool:
    """Whether keys of their own describe the heads, and key_length the latent."""
    return gguf.metadata.get(f"{gguf.arch}.attention.key_length_mla") is not None


def _unread_key_length(gguf: Metadata, value: object) -> bool:
    return _has_latent(gguf) or _equals(_usual_length)(gguf, value)


def _value_length(gguf: Metadata, value: object) -> bool:
    return _has_latent(gguf) or _equals(_key_length)(gguf, value)


def _rows(tensor: str) -> Callable[[Metadata], object]:
    def rows(gguf: Metadata) -> object:
        shape = gguf.shapes.get(tensor)
        return None if shape is None else shape[0]

    return rows


_WITHOUT_GATING = {"llama4": 2, "nemotron_h_moe": 2, "gpt-oss": 3}
"""gguf.ExpertGatingFuncType of families that do not ask for it, where it is not softmax."""


def _gating(gguf: Metadata, value: object) -> bool:
    wanted = _WITHOUT_GATING.get(gguf.arch, 1)
    return not gguf.has(r"ffn_gate_inp\.weight") or _one_of(value, 0, wanted, *((3,) if wanted == 1 else ()))


def _weights_norm(gguf: Metadata, value: object) -> bool:
    """Whether weights of the chosen experts add up to 1: so in all families that do not ask but Llama 4's."""
    return not gguf.has(r"ffn_gate_inp\.weight") or value is (gguf.arch != "llama4")


_PARALLEL = ("command-r", "cohere2", "cohere2_moe", "cohere2moe", "phi2")


def _parallel(gguf: Metadata, value: object) -> bool:
    return value is (gguf.arch in _PARALLEL)


def _window(gguf: Metadata, value: object) -> bool:
    """None, or one that every text fits into."""
    context = _said(gguf, "context_length")
    sees_all = isinstance(value, int) and isinstance(context, int) and value >= context
    return _off(gguf, value) or sees_all


def _window_pattern(gguf: Metadata, value: object) -> bool:
    return _off(gguf, value) or _window(gguf, _said(gguf, "attention.sliding_window") or 0)


def _attention_scale(gguf: Metadata, value: object) -> bool:
    length = _key_length(gguf)
    usual = length**-0.5 if isinstance(length, int) and length > 0 else 0.0
    return _is(0.0, usual)(gguf, value)


def _local_base(gguf: Metadata, value: object) -> bool:
    """The base of layers with a window, where there are none, or that of all."""
    base = _said(gguf, "rope.freq_base") or 10000.0
    return _one_of(value, base) or _window(gguf, _said(gguf, "attention.sliding_window") or 0)


_TEXT_SECTIONS = ("qwen2vl", "qwen3vl", "qwen3vlmoe", "glm4moe")


def _sections(gguf: Metadata, value: object) -> bool:
    """Axes of positions: of text all are the same, but the fourth, which is 0."""
    sizes = np.asarray(value).ravel().tolist()
    return _off(gguf, value) or (gguf.arch in _TEXT_SECTIONS and not any(sizes[3:]))


def _scaling_kind(gguf: Metadata, value: object) -> bool:
    return _one_of(value, "none", "linear")


def _finetuned(gguf: Metadata, value: object) -> bool:
    """Says of Granite whether it rotates, of others how they were trained."""
    return gguf.arch != "granite" or value is True


def _causal(gguf: Metadata, value: object) -> bool:
    return value is True


_same_hidden = _equals(lambda gguf: _said(gguf, "embedding_length"))

NEUTRAL: Mapping[str, Neutral] = {
    # What describes, and what other parts of the program or of the file read.
    **dict.fromkeys(("context_length", "pooling_type", "classifier.output_labels", "tensor_data_layout"), _any),
    **dict.fromkeys(("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"), _any),  # each has its own
    **dict.fromkeys(("n_deepstack_layers", "deepstack_mapping"), _any),  # of images
    "vocab_size": _equals(_rows("token_embd.weight")),
    "embedding_length": _same_hidden,
    "embedding_length_out": _same_hidden,
    "block_count": _any,
    # Which parts layers have, and how wide they are: the tensors decide, and none may be missing, left over or of
    # another shape.
    **dict.fromkeys(
        (
            *("feed_forward_length", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
            *("expert_shared_count", "leading_dense_block_count", "interleave_moe_layer_step", "moe_every_n_layers"),
            *("full_attention_interval", "attention.recurrent_layers", "nextn_predict_layers"),
        ),
        _any,
    ),
    "use_parallel_residual": _parallel,
    # Routers.
    "expert_count": _is(0, 1),
    "expert_used_count": _is(0, 1),
    "expert_group_count": _is(0, 1),
    "expert_group_used_count": _is(0, 1),
    "expert_weights_scale": _factor,
    "expert_weights_norm": _weights_norm,
    "expert_gating_func": _gating,
    # Factors and caps.
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_group_scale"), _factor),
    **dict.fromkeys(("attention.output_scale", "attention.value_scale"), _factor),
    "attention.scale": _attention_scale,
    "attention.temperature_length": lambda gguf, value: _off(gguf, _said(gguf, "attention.temperature_scale") or 0),
    # Attention.
    "attention.head_count": _off,
    "attention.head_count_kv": _off,
    "attention.causal": _causal,
    "attention.key_length": _unread_key_length,
    "attention.value_length": _value_length,
    "attention.key_length_swa": _equals(_key_length),
    "attention.value_length_swa": _equals(_swa_length),
    "attention.sliding_window": _window,
    "attention.sliding_window_pattern": _window_pattern,
    "attention.rope_pattern": lambda gguf, value: bool(np.all(np.asarray(value))),
    **dict.fromkeys(("attention.group_norm_epsilon", "attention.group_norm_groups"), _any),  # no layer has such norms
    # Rotation. What rope_parameters reads is not asked for where nothing rotates, or where a family has its own.
    "rope.dimension_count": _rotated_length,
    "rope.dimension_count_swa": _equals(_swa_length),
    "rope.dimension_sections": _sections,
    "rope.freq_base": lambda gguf, value: gguf.arch not in ("gemma4",),
    "rope.freq_base_swa": _local_base,
    "rope.scaling.type": _scaling_kind,
    "rope.scaling.factor": _factor,
    "rope.scale_linear": _factor,
    "rope.scaling.attn_factor": _factor,
    "rope.scaling.finetuned": _finetuned,
    # Parts of the scaling that another kind than the file's would read.
    **dict.fromkeys(
        (
            "rope.scaling.original_context_length",
            "rope.scaling.yarn_log_multiplier",
            "rope.scaling.yarn_ext_factor",
            "rope.scaling.yarn_attn_factor",
            "rope.scaling.yarn_beta_fast",
            "rope.scaling.yarn_beta_slow",
        ),
        _any,
    ),
    # What only other families have.
    "hidden_activation": _never,
    "decoder_start_token_id": _never,
    **dict.fromkeys(
        (
            *("features_length", "expert_chunk_feed_forward_length", "experts_per_group", "expert_latent_length"),
            *("moe_latent_size", "attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"),
            *("swin_norm", "rescale_every_n_layers", "time_mix_extra_dim", "time_decay_extra_dim"),
            *("token_shift_count", "activation_sparsity_scale", "altup.active_idx", "altup.num_inputs"),
            *("embedding_length_per_layer_input", "swiglu_clamp_exp", "swiglu_clamp_shexp", "decoder_block_count"),
            *("attention.max_alibi_bias", "attention.clamp_kqv", "attention.q_lora_rank", "attention.kv_lora_rank"),
            *("attention.decay_lora_rank", "attention.iclr_lora_rank", "attention.value_residual_mix_lora_rank"),
            *("attention.gate_lora_rank", "attention.relative_buckets_count", "attention.temperature_scale"),
            *("attention.key_length_mla", "attention.value_length_mla", "attention.key_length_mla_swa"),
            *("attention.value_length_mla_swa", "attention.kv_lora_rank_swa", "attention.shared_kv_layers"),
            *("attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k"),
            *("attention.indexer.types", "attention.indexer.block_size", "attention.indexer.local_blocks"),
            *("attention.indexer.kpool", "attention.indexer.kpool_select_tail", "attention.output_group_count"),
            *("attention.output_lora_rank", "attention.compress_rope_freq_base", "attention.compress_ratios"),
            *("attn_res.block_size", "activation.situ_beta", "activation.situ_linear_beta", "hash_layer_count"),
            *("hyper_connection.count", "hyper_connection.sinkhorn_iterations", "hyper_connection.epsilon"),
            *("hyper_connection.magnitude", "hyper_connection.low_rank", "ple.layers", "ple.ngram_size"),
            *("num_loops", "skip_loop_final_norm", "hrm.layers_per_stack", "hrm.h_cycles", "hrm.l_cycles"),
            *("hrm.prefix_lm", "adapters.count", "target_layers", "target_hidden_size", "norm_before_residual"),
            *("norm_before_fc", "rope.scaling.alpha", "kda.head_dim", "kda.safe_gate", "kda.gate_lower_bound"),
            *("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count"),
            *("ssm.dt_b_c_rms", "wkv.head_size", "shortconv.l_cache", "posnet.embedding_length"),
            *("posnet.block_count", "convnext.embedding_length", "convnext.block_count"),
            *("dense_2_feat_in", "dense_2_feat_out", "dense_3_feat_in", "dense_3_feat_out"),
        ),
        _off,
    ),
}
"""By key without the architecture's prefix: what may stand there unread."""

_OTHER_PARTS = re.compile(r"(vision|audio|mm|projector)\.")
"""Keys of the parts for images and sound, which Ollama keeps in the same file."""


def is_key_of_other_parts(key: str) -> bool:
    """Whether a key without its architecture is about images or sound, which Ollama keeps in the same file."""
    return _OTHER_PARTS.match(key) is not None


def check_unread(gguf: Metadata) -> None:
    """Raise UnsupportedError for a key that was not read and that says what changes the answer."""
    unknown = []
    for key, value in gguf.unread().items():
        neutral = NEUTRAL.get(key)
        if neutral is None:
            unknown += [] if is_key_of_other_parts(key) else [key]
        elif not neutral(gguf, value):
            raise UnsupportedError(
                f"the GGUF file says {gguf.arch}.{key} = {_shown(value)}, which changes what the model computes and is "
                f"not read for {gguf.arch}; pass --model_path with the model's config.json"
            )
    if unknown:
        logger.info("keys of %s that are not known here were left aside: %s", gguf.arch, ", ".join(unknown[:8]))


def _shown(value: object) -> str:
    return f"{value.tolist()!r:.60}" if isinstance(value, np.ndarray) else f"{value!r:.60}"

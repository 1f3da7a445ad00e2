"""Writes models with recurrent layers as GGUF the way llama.cpp's converter does, derived here by hand as an oracle.

Names are spelled out; each value is computed as the converter's classes for the family do it: -exp(A_log), norms + 1,
convolutions without their dimension of size 1, projections by key head taken apart, value heads reordered.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

from ktransformers.kernels.types import QuantType
from tests.support.gguf.mamba import (
    Tensors,
    ends,
    falcon_h1,
    falcon_tensors,
    mamba,
    mamba2,
    mamba2_tensor,
    mamba_tensors,
    of_layers,
)
from tests.support.gguf.recurrent_names import (
    GDN_NAMES,
    GRANITE_NAMES,
    JAMBA_NAMES,
    KIMI_NAMES,
    LFM2_NAMES,
    NEMOTRON_NAMES,
)
from tests.support.gguf.writer import add_tensor, permute

ARCH_OF = {
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "kimi_linear": "kimi-linear",
    "nemotron_h": "nemotron_h_moe",
    "granitemoehybrid": "granitehybrid",
    "jamba": "jamba",
    "falcon_h1": "falcon-h1",
    "mamba": "mamba",
    "falcon_mamba": "mamba",
    "mamba2": "mamba2",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
}


def write_recurrent_gguf(
    model: PreTrainedModel, path: Path, qtype_of: Callable[[str], QuantType] = lambda name: QuantType.F32
) -> Path:
    """Write `model` (config and weights, no tokenizer) to `path`, matrices as `qtype_of` their names, all else F32."""
    config: Any = model.config
    arch = ARCH_OF[config.model_type]
    if arch == "nemotron_h_moe" and "moe" not in config.layers_block_type:
        arch = "nemotron_h"
    writer = gguf.GGUFWriter(path, arch)
    add_common(writer, config)
    _METADATA[arch](writer, config)
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    for name, values in _TENSORS[arch](state, config):
        small = values.ndim < 2 or "conv" in name or "ssm_a" in name or "ssm_d" in name or "norm" in name
        small = small or "ffn_gate_inp" in name
        add_tensor(writer, name, values, QuantType.F32 if small else qtype_of(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_common(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings or 2**20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads or 0)
    eps = [getattr(config, name, None) for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")]
    writer.add_layer_norm_rms_eps(next(value for value in eps if value is not None))
    writer.add_vocab_size(config.vocab_size)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)


def _kv_heads(writer: gguf.GGUFWriter, config: Any, words: list[str]) -> None:
    """Layers that do not attend have none."""
    writer.add_head_count_kv([config.num_key_value_heads if word == "full_attention" else 0 for word in words])


# -- Gated DeltaNet


def gated_delta_net(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    if "mrope_section" in config.rope_parameters:
        writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if getattr(config, "intermediate_size", None) is not None:
        writer.add_feed_forward_length(config.intermediate_size)


def _gdn_tensors(state: dict[str, np.ndarray], config: Any) -> Tensors:
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    yield "output_norm.weight", state["model.norm.weight"] + 1
    yield "output.weight", state["lm_head.weight"]
    for block, rest, values in of_layers(state):
        if ".experts." in rest:
            yield from expert_tensors(block, rest, values)
            continue
        if config.model_type != "qwen3_next" and "linear_attn." in rest:
            values = tiled(rest, values, config)
        if rest.endswith("A_log"):
            values = -np.exp(values)
        elif "conv1d" in rest:
            values = values.squeeze()
        elif rest.endswith("norm.weight") and rest != "linear_attn.norm.weight":
            values = values + 1
        if rest == "linear_attn.in_proj_qkvz.weight":
            qkv, z = _taken_apart(values, config)
            yield from ((block + "attn_qkv.weight", qkv), (block + "attn_gate.weight", z))
            continue
        if rest == "mlp.shared_expert_gate.weight":
            values = values.squeeze(0)
        yield block + GDN_NAMES[rest], values


def expert_tensors(block: str, rest: str, values: np.ndarray) -> Tensors:
    if rest.endswith("gate_up_proj"):
        half = values.shape[1] // 2
        yield from (
            (block + "ffn_gate_exps.weight", values[:, :half]),
            (block + "ffn_up_exps.weight", values[:, half:]),
        )
    else:
        yield block + ("ffn_down_exps.weight" if "down" in rest else "ffn_up_exps.weight"), values


def _taken_apart(values: np.ndarray, config: Any) -> tuple[np.ndarray, np.ndarray]:
    """[q, k, v, z] of each key head -> all q, then all k, then all v; and all z."""
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    wide = config.linear_num_value_heads // keys * config.linear_value_head_dim
    q, k, v, z = [], [], [], []
    for head in range(keys):
        rows = values[head * (2 * size + 2 * wide) :]
        q.append(rows[:size])
        k.append(rows[size : 2 * size])
        v.append(rows[2 * size : 2 * size + wide])
        z.append(rows[2 * size + wide : 2 * size + 2 * wide])
    return np.concatenate(q + k + v), np.concatenate(z)


def tiled(rest: str, values: np.ndarray, config: Any) -> np.ndarray:
    """The first value head of every key head, then the second of every key head, and so on."""
    keys, count, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    if keys == count:
        return values
    order = [key * (count // keys) + i for i in range(count // keys) for key in range(keys)]
    part = rest.split(".")[1]
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return values[order]
    rows = [head * size + i for head in order for i in range(size)]
    if part == "out_proj":
        return values[:, rows]
    if part == "in_proj_z":
        return values[rows]
    if part in ("in_proj_qkv", "conv1d"):
        first = 2 * keys * config.linear_key_head_dim
        return np.concatenate([values[:first], values[first:][rows]])
    return values


# -- Kimi Delta Attention


def _kimi_linear(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv([1 if word == "full_attention" else 0 for word in config.layer_types])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _kimi_tensors(state: dict[str, np.ndarray], config: Any) -> Tensors:
    yield from ends(state, "model.embed_tokens.weight", "model.norm.weight")
    for block, rest, values in of_layers(state):
        if ".experts." in rest:
            yield from expert_tensors(block, rest, values)
        elif rest == "self_attn.conv1d.weight":
            for part, third in zip("qkv", np.split(values, 3), strict=True):
                channels, _, width = third.shape
                yield f"{block}ssm_conv1d_{part}.weight", third.reshape(1, channels, 1, width)
        elif rest == "self_attn.forget_gate.A_log":
            yield block + "ssm_a", -np.exp(values)  # [1, 1, heads, 1]
        elif rest == "self_attn.kv_b_proj.weight":
            by_head = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            yield block + "attn_k_b.weight", by_head[:, : config.qk_nope_head_dim].transpose(0, 2, 1)
            yield block + "attn_v_b.weight", by_head[:, config.qk_nope_head_dim :]
        else:
            yield block + KIMI_NAMES[rest], values


# -- Mamba-2: Nemotron-H and Granite


def _nemotron_h(writer: gguf.GGUFWriter, config: Any) -> None:
    words = config.layers_block_type
    _kv_heads(writer, config, words)
    numbers = (config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size)
    mamba2(writer, *numbers, config.conv_kernel)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    if "moe" not in words:
        writer.add_feed_forward_length([config.intermediate_size if word == "mlp" else 0 for word in words])
        return
    writer.add_feed_forward_length([config.moe_intermediate_size if word == "moe" else 0 for word in words])
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    if config.moe_latent_size is not None:
        writer.add_uint32("nemotron_h_moe.moe_latent_size", config.moe_latent_size)


def _granite(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    numbers = (config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state)
    mamba2(writer, *numbers, config.mamba_d_conv)
    _kv_heads(writer, config, config.layer_types)
    writer.add_rope_scaling_finetuned(False)


def _permuted(rest: str, values: np.ndarray, config: Any) -> np.ndarray:
    if rest.endswith("q_proj.weight"):
        return permute(values, config.num_attention_heads)
    return permute(values, config.num_key_value_heads) if rest.endswith("k_proj.weight") else values


def _nemotron_tensors(state: dict[str, np.ndarray], config: Any) -> Tensors:
    yield from ends(state, "model.embeddings.weight", "model.norm_f.weight")
    for block, rest, values in of_layers(state):
        word = config.layers_block_type[int(block.split(".")[1])]
        if ".experts." in rest:
            yield from expert_tensors(block, rest, values)
        elif word == "linear_attention" and rest.startswith("mixer."):
            yield mamba2_tensor(block, rest.removeprefix("mixer."), values, config.n_groups)
        else:
            yield block + NEMOTRON_NAMES[rest], _permuted(rest, values, config)


def _granite_tensors(state: dict[str, np.ndarray], config: Any) -> Tensors:
    yield from ends(state, "model.embed_tokens.weight", "model.norm.weight")
    suffix = "_shexp" if config.num_local_experts else ""
    for block, rest, values in of_layers(state):
        if ".experts." in rest:
            yield from expert_tensors(block, rest, values)
        elif rest == "shared_mlp.input_linear.weight":
            gate, up = np.split(values, 2)
            yield from ((f"{block}ffn_gate{suffix}.weight", gate), (f"{block}ffn_up{suffix}.weight", up))
        elif rest == "shared_mlp.output_linear.weight":
            yield f"{block}ffn_down{suffix}.weight", values
        elif rest.startswith("mamba."):
            yield mamba2_tensor(block, rest.removeprefix("mamba."), values, config.mamba_n_groups)
        else:
            yield block + GRANITE_NAMES[rest], _permuted(rest, values, config)


# -- Jamba


def _jamba(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    _kv_heads(writer, config, config.layer_types)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_time_step_rank(config.mamba_dt_rank)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _jamba_tensors(state: dict[str, np.ndarray], config: Any) -> Tensors:
    yield from ends(state, "model.embed_tokens.weight", "model.final_layernorm.weight")
    for block, rest, values in of_layers(state):
        if ".experts." in rest:
            yield from expert_tensors(block, rest, values)
        elif rest == "mamba.A_log":
            yield block + "ssm_a", -np.exp(values)
        elif rest == "mamba.conv1d.weight":
            yield block + "ssm_conv1d.weight", values.squeeze()
        else:
            yield block + JAMBA_NAMES[rest], values


# -- LFM2


def _lfm2(writer: gguf.GGUFWriter, config: Any) -> None:
    _kv_heads(writer, config, config.layer_types)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    width = config.intermediate_size
    if getattr(config, "block_auto_adjust_ff_dim", False):
        width = int(config.block_ffn_dim_multiplier * int(2 * width / 3))
        width = -(-width // config.block_multiple_of) * config.block_multiple_of
    writer.add_feed_forward_length(width)
    if config.model_type == "lfm2_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _lfm2_tensors(state: dict[str, np.ndarray], config: Any) -> Tensors:
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    yield "token_embd_norm.weight", state["model.embedding_norm.weight"]
    for block, rest, values in of_layers(state):
        if ".experts." in rest:
            yield from expert_tensors(block, rest, values)
        elif rest == "conv.conv.weight":
            yield block + "shortconv.conv.weight", values.squeeze(1)
        else:
            yield block + LFM2_NAMES[rest], values


_METADATA: dict[str, Callable[[gguf.GGUFWriter, Any], None]] = {
    "qwen3next": gated_delta_net,
    "qwen35": gated_delta_net,
    "qwen35moe": gated_delta_net,
    "kimi-linear": _kimi_linear,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "granitehybrid": _granite,
    "jamba": _jamba,
    "falcon-h1": falcon_h1,
    "mamba": mamba,
    "mamba2": mamba,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
}
_TENSORS: dict[str, Callable[[dict[str, np.ndarray], Any], Tensors]] = {
    "qwen3next": _gdn_tensors,
    "qwen35": _gdn_tensors,
    "qwen35moe": _gdn_tensors,
    "kimi-linear": _kimi_tensors,
    "nemotron_h": _nemotron_tensors,
    "nemotron_h_moe": _nemotron_tensors,
    "granitehybrid": _granite_tensors,
    "jamba": _jamba_tensors,
    "falcon-h1": falcon_tensors,
    "mamba": mamba_tensors,
    "mamba2": mamba_tensors,
    "lfm2": _lfm2_tensors,
    "lfm2moe": _lfm2_tensors,
}

"""Writes Falcon-H1, Mamba and Mamba-2 as GGUF the way llama.cpp's converter does, see recurrent.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np

from tests.support.gguf.recurrent_names import FALCON_NAMES, JAMBA_NAMES, MIXER_NAMES

Tensors = Iterator[tuple[str, np.ndarray]]


def of_layers(state: dict[str, np.ndarray]) -> Iterator[tuple[str, str, np.ndarray]]:
    """("blk.3.", the rest of the name, values) of each parameter of a layer."""
    for name, values in state.items():
        if ".layers." in name:
            _, _, layer, rest = name.split(".", 3)
            yield f"blk.{layer}.", rest, values


def ends(state: dict[str, np.ndarray], embedding: str, norm: str) -> Tensors:
    """What comes before the layers, and behind them. embedding, norm: what they are called in the model."""
    yield "token_embd.weight", state[embedding]
    yield "output_norm.weight", state[norm]
    yield "output.weight", state["lm_head.weight"]


def mamba2(writer: gguf.GGUFWriter, heads: int, head_dim: int, groups: int, state: int, width: int) -> None:
    writer.add_ssm_conv_kernel(width)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * head_dim)
    writer.add_ssm_time_step_rank(heads)


def mamba2_tensor(block: str, part: str, values: np.ndarray, groups: int) -> tuple[str, np.ndarray]:
    if part == "A_log":
        return block + "ssm_a", -np.exp(values).reshape(-1, 1)
    if part == "D":
        return block + "ssm_d", values.reshape(-1, 1)
    if part == "norm.weight":
        return block + "ssm_norm.weight", values.reshape(groups, -1)
    if part == "conv1d.weight":
        return block + "ssm_conv1d.weight", values.squeeze()
    return block + MIXER_NAMES[part], values


def falcon_h1(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    numbers = (config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state)
    mamba2(writer, *numbers, config.mamba_d_conv)


def _falcon_factor(rest: str, config: Any) -> Any:
    """What the converter multiplies a parameter of a layer by."""
    gate, down = config.mlp_multipliers
    into = config.attention_in_multiplier
    if rest == "mamba.in_proj.weight":
        keys = config.mamba_n_groups * config.mamba_d_state
        sizes = (config.mamba_d_ssm, config.mamba_d_ssm, keys, keys, config.mamba_n_heads)
        return config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, sizes).astype(np.float32)[:, None]
    return {
        "feed_forward.gate_proj.weight": gate,
        "feed_forward.down_proj.weight": down,
        "self_attn.q_proj.weight": into,
        "self_attn.k_proj.weight": into * config.key_multiplier,
        "self_attn.v_proj.weight": into,
        "self_attn.o_proj.weight": config.attention_out_multiplier,
        "mamba.out_proj.weight": config.ssm_out_multiplier,
    }.get(rest, 1.0)


def falcon_tensors(state: dict[str, np.ndarray], config: Any) -> Tensors:
    yield "token_embd.weight", state["model.embed_tokens.weight"] * config.embedding_multiplier
    yield "output_norm.weight", state["model.final_layernorm.weight"]
    yield "output.weight", state["lm_head.weight"] * config.lm_head_multiplier
    for block, rest, values in of_layers(state):
        values = (values * _falcon_factor(rest, config)).astype(np.float32)
        if rest.startswith("mamba."):
            yield mamba2_tensor(block, rest.removeprefix("mamba."), values, config.mamba_n_groups)
        else:
            yield block + FALCON_NAMES[rest], values


def mamba(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_feed_forward_length(0)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.expand * config.hidden_size)
    writer.add_ssm_state_size(config.state_size)
    if config.model_type == "mamba2":
        writer.add_ssm_time_step_rank(config.num_heads)
        writer.add_ssm_group_count(config.n_groups)
    else:
        writer.add_ssm_time_step_rank(config.time_step_rank)
        writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def mamba_tensors(state: dict[str, np.ndarray], config: Any) -> Tensors:
    yield from ends(state, "backbone.embeddings.weight", "backbone.norm_f.weight")
    for block, rest, values in of_layers(state):
        if rest == "norm.weight":
            yield block + "attn_norm.weight", values
        elif config.model_type == "mamba2":
            yield mamba2_tensor(block, rest.removeprefix("mixer."), values, config.n_groups)
        elif rest == "mixer.A_log":
            yield block + "ssm_a", -np.exp(values)
        elif rest == "mixer.conv1d.weight":
            yield block + "ssm_conv1d.weight", values.squeeze(1)
        else:
            yield block + JAMBA_NAMES[rest.replace("mixer.", "mamba.")], values

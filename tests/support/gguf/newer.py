"""Writes models of architectures that the `gguf` package does not know as llama.cpp's converter does: an oracle.

Keys, names and changes are spelled out here from what its conversion/*.py of November 2026 writes (ik_llama.cpp's for
"cohere2_moe"); nothing is asked of the program under test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

from ktransformers.kernels.types import QuantType
from tests.support.gguf.newer_metadata import METADATA
from tests.support.gguf.writer import add_tensor, permute

_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.hc_head.hc_fn": "output_hc_fn.weight",
    "model.hc_head.hc_base": "output_hc_base.weight",
    "model.hc_head.hc_scale": "output_hc_scale.weight",
}
_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.dense": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.g_proj": "attn_gate",
    "self_attn.gate_proj": "attn_gate",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.q_norm": "indexer.q_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.indexer.q_proj": "indexer.q_proj",
    "self_attn.indexer.k_proj": "indexer.k_proj",
    "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight",
    "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate.weight",
    "self_attn.forget_gate.f_proj": "ssm_f_a",
    "self_attn.forget_gate.f_a_proj": "ssm_f_a",
    "self_attn.forget_gate.f_b_proj": "ssm_f_b",
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b",
    "self_attn.o_norm": "ssm_norm",
    **{f"{of}_hc.{part}": f"hc_{of}_{part}.weight" for of in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b",  # of hy_v3, without a suffix
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "shared_mlp.input_linear": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_OF_ARCHITECTURES = {"chatglm": {"mlp.gate_up_proj": "ffn_up"}}
"""Names that an architecture has otherwise; in minimax-m3 these are split."""

Tensors = Iterator[tuple[str, np.ndarray]]


def write_newer(
    model: PreTrainedModel,
    path: Path,
    arch: str,
    *,
    fused_qkv: bool = False,
    qtype: QuantType = QuantType.F32,
    halves: tuple[str, ...] = (),
) -> Path:
    """Write `model` (config and weights, no tokenizer) to `path` as `arch`. fused_qkv: as --fuse-qkv joins them.

    qtype: of experts. halves: parts of names of tensors that are F16.
    """
    config: Any = model.config
    writer = gguf.GGUFWriter(path, arch)
    for key, value in METADATA[arch](config).items():
        _add(writer, key if key.startswith("tokenizer.") else f"{arch}.{key}", value)
    tensors = dict(_tensors(model, arch))
    if fused_qkv:
        for layer in range(config.num_hidden_layers):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts)
    if arch == "step35":
        tensors["rope_freqs.weight"] = _step35_factors(config)
    for name, values in tensors.items():
        of_name = QuantType.F16 if any(part in name for part in halves) else QuantType.F32
        add_tensor(writer, name, np.atleast_1d(values), qtype if "_exps" in name else of_name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    add: Callable[[str, Any], None] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }[type(value)]
    add(key, value)


def _tensors(model: PreTrainedModel, arch: str) -> Tensors:
    config: Any = model.config
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    for name, values in state.items():
        if arch in ("minimax-m3", "step35") and name.endswith("norm.weight"):
            values = values + 1
        if name in _WHOLE:
            yield _WHOLE[name], values
            continue
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        assert found is not None, name
        yield from _of_layer(f"blk.{found[1]}.", found[2], values, config, arch)


def _of_layer(block: str, rest: str, values: np.ndarray, config: Any, arch: str) -> Tensors:
    if ".experts." in rest:
        if rest.endswith("down_proj"):
            yield block + "ffn_down_exps.weight", values
        elif arch == "granite_swa":  # as in the module
            yield block + "ffn_gate_up_exps.weight", values
        else:
            gate, up = np.split(values, 2, axis=1)
            yield from ((block + "ffn_gate_exps.weight", gate), (block + "ffn_up_exps.weight", up))
    elif rest == "self_attn.kv_b_proj.weight" and arch != "minicpm3":
        by_head = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        yield block + "attn_k_b.weight", by_head[:, : config.qk_nope_head_dim].transpose(0, 2, 1)
        yield block + "attn_v_b.weight", by_head[:, config.qk_nope_head_dim :]
    elif rest == "self_attn.conv1d.weight":
        for part, third in zip("qkv", np.split(values, 3), strict=True):
            channels, _, width = third.shape
            yield f"{block}ssm_conv1d_{part}.weight", third.reshape(1, channels, 1, width)
    elif rest == "self_attn.forget_gate.A_log":  # not negative in Ling 3
        yield block + "ssm_a", np.exp(values).reshape(-1, 1) if arch == "bailingmoe3" else -np.exp(values).flatten()
    elif "gate_up_proj" in rest and arch == "minimax-m3":
        kind = "_shexp" if "shared_experts" in rest else ""
        gate, up = np.split(values, 2)
        yield from ((f"{block}ffn_gate{kind}.weight", gate), (f"{block}ffn_up{kind}.weight", up))
    else:
        if arch == "granite_swa" and re.search(r"\.[qk]_proj", rest):
            heads = config.num_attention_heads if ".q_proj" in rest else config.num_key_value_heads
            values = permute(values, heads)
        yield block + _renamed(rest, values, config, arch), values


def _renamed(rest: str, values: np.ndarray, config: Any, arch: str) -> str:
    names = {**_NAMES, **_OF_ARCHITECTURES.get(arch, {})}
    if arch == "bailingmoe3" and rest == "self_attn.g_proj.weight" and len(values) != config.num_attention_heads:
        return "ssm_g_a.weight"
    if rest in names:
        return names[rest]
    stem, _, suffix = rest.rpartition(".")
    return f"{names[stem]}.{suffix}"


def _step35_factors(config: Any) -> np.ndarray:
    """Of Llama 3, for the half of a head that rotates; 1 up to the whole of it."""
    rope = config.rope_parameters["full_attention"]
    turning, context = config.head_dim // 2, rope["original_max_position_embeddings"]
    factors = np.ones(config.head_dim // 2, dtype=np.float32)
    for i in range(turning // 2):
        length = 2 * np.pi * rope["rope_theta"] ** (2 * i / turning)
        smooth = (context / length - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        factors[i] = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return factors

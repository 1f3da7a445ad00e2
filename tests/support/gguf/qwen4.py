"""Writes Qwen4 models as GGUF the way llama.cpp's converter does, derived here by hand as an
oracle: names spelled out, norms + 1, -exp(A_log), value heads reordered, the indexer's projection cut in two, the parts
of the table of n-grams in one tensor, and its numbers among the metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

from ktransformers.kernels.types import QuantType
from tests.support.gguf.mamba import Tensors, of_layers
from tests.support.gguf.recurrent import add_common, expert_tensors, gated_delta_net, tiled
from tests.support.gguf.recurrent_names import GDN_NAMES
from tests.support.gguf.writer import add_tensor

_ARCH = "qwen4exp"
_HYPER = ("hc_norm", "norm"), ("input_mix_weight_down", "down"), ("input_mix_weight_up", "up")
_PLE = ("key_proj", "value_proj", "norm_key", "norm_query", "norm_conv", "conv1d")
_NAMES = {
    **GDN_NAMES,
    "self_attn.indexer.q_layernorm.weight": "indexer.q_norm.weight",
    "self_attn.indexer.k_layernorm.weight": "indexer.k_norm.weight",
    **{f"ple.{name}.weight": f"ple_{name.removesuffix('_proj')}.weight" for name in _PLE},
    **{
        f"{side}_hyper_connection.{theirs}.weight": f"hc_{ours}_{part}.weight"
        for side, ours in (("attn", "attn"), ("mlp", "ffn"))
        for theirs, part in (*_HYPER, ("block_inject_weight", "inject"))
    },
}


def write_qwen4_gguf(
    model: PreTrainedModel,
    path: Path,
    qtype: QuantType = QuantType.F32,
    table_qtype: QuantType = QuantType.F32,
    prediction: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write `model` (config and weights, no tokenizer) to `path`: experts as `qtype`, the table of n-grams as
    `table_qtype`, all else F32. prediction: tensors of a block for multi-token prediction behind the model's own.
    """
    config: Any = model.config
    writer = gguf.GGUFWriter(path, _ARCH)
    add_common(writer, config)
    gated_delta_net(writer, config)
    writer.add_uint32(f"{_ARCH}.hyper_connection.count", config.hc_count)
    writer.add_uint32(f"{_ARCH}.hyper_connection.low_rank", config.hc_lowrank)
    writer.add_indexer_head_count(config.indexer_n_heads)
    writer.add_indexer_key_length(config.indexer_head_dim)
    writer.add_indexer_top_k(config.indexer_budget)
    ratio = config.indexer_compress_ratio
    kinds = [*config.layer_types, *([""] if prediction else [])]
    _add_counts(writer, "attention.compress_ratios", [ratio * (kind == "indexed_attention") for kind in kinds])
    if prediction:
        writer.add_nextn_predict_layers(1)
        writer.kv_data[0][f"{_ARCH}.block_count"].value += 1
    if config.ple_layer_ids:
        layer = config.ple_layer_ids[0] - 1
        _add_ngrams(writer, config, model.get_submodule(f"model.layers.{layer}.ple.ple_embedding"), table_qtype)
    for name, values in (*layer_tensors(model), *(prediction or {}).items()):
        add_tensor(writer, name, values, qtype if "_exps" in name else QuantType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def layer_tensors(model: PreTrainedModel) -> Tensors:
    """(name in the file, values) of all of a model's tensors but the table of n-grams."""
    stored = {name: tensor for name, tensor in model.state_dict().items() if ".ple_embedding." not in name}
    return _tensors({name: tensor.float().numpy() for name, tensor in stored.items()}, model.config)


def _add_counts(writer: gguf.GGUFWriter, key: str, values: list[int], kind: Any = gguf.GGUFValueType.UINT32) -> None:
    writer.add_key_value(f"{_ARCH}.{key}", values, gguf.GGUFValueType.ARRAY, kind)


def _add_ngrams(writer: gguf.GGUFWriter, config: Any, grams: Any, qtype: QuantType) -> None:
    _add_counts(writer, "ple.layers", [config.ple_layer_ids[0] - 1])
    eos = config.eos_token_id
    for key, value in (
        ("ngram_size", config.ngram_size),
        ("heads_per_ngram", config.heads_per_ngram),
        ("conv_kernel", config.ple_conv_kernel_size),
        ("eos_token_id", eos[0] if isinstance(eos, list) else eos),
        ("image_token_id", 9),
    ):
        writer.add_uint32(f"{_ARCH}.ple.{key}", value)
    table = grams.ngram_embedding.weight.detach().float().numpy()
    writer.add_uint32(f"{_ARCH}.embedding_length_per_layer_input", table.shape[1])
    for key, values in (
        ("layer_multipliers", grams.layer_multipliers),
        ("head_offsets", grams.ngram_heads_offsets),
        ("head_vocab_sizes", grams.ngram_heads_vocab_sizes),
    ):
        _add_counts(writer, f"ple.{key}", values.tolist(), gguf.GGUFValueType.UINT64)
    add_tensor(writer, "per_layer_token_embd.weight", table, qtype)


def _tensors(state: dict[str, np.ndarray], config: Any) -> Tensors:
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    if "lm_head.weight" in state and not config.tie_word_embeddings:
        yield "output.weight", state["lm_head.weight"]
    for theirs, ours in _HYPER:
        values = state[f"model.hyper_connection_mixer.{theirs}.weight"]
        yield f"output_hc_{ours}.weight", values + (theirs == "hc_norm")
    for block, rest, values in of_layers(state):
        if ".experts." in rest:
            yield from expert_tensors(block, rest, values)
        elif rest == "self_attn.indexer.index_qk_proj.weight":
            first = config.indexer_n_heads * config.indexer_head_dim
            yield block + "indexer.q_proj.weight", values[:first]
            yield block + "indexer.k_proj.weight", values[first:]
        else:
            yield block + _NAMES[rest], _converted(rest, values, config)


def _converted(rest: str, values: np.ndarray, config: Any) -> np.ndarray:
    if rest.startswith("linear_attn."):
        values = tiled(rest, values, config)
    if rest.endswith("A_log"):
        return -np.exp(values)
    if "conv1d" in rest or rest == "mlp.shared_expert_gate.weight":
        return values.squeeze()
    is_norm = rest.endswith("norm.weight") or rest.startswith("ple.norm_")
    return values + 1 if is_norm and rest != "linear_attn.norm.weight" else values

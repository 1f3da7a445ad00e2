"""Writes DeepSeek-V4 as GGUF the way llama.cpp's converter does: names of published tensors to names of its own,
experts merged, tables of tokens as int32, and the keys that its loader reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
from transformers import PreTrainedModel

from ktransformers.kernels.types import QuantType
from tests.support.gguf.keys import add_keys
from tests.support.gguf.writer import add_tensor
from tests.support.models.fp8_models import published_name

__all__ = ["DEEPSEEK4_RATES", "DEEPSEEK4_YARN", "layer_tensors", "write_deepseek4_gguf"]

DEEPSEEK4_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
DEEPSEEK4_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_STORED = {  # of the converter, by published names
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "hc_head_base": "output_hc_base.weight",
    "hc_head_fn": "output_hc_fn.weight",
    "hc_head_scale": "output_hc_scale.weight",
    **{f"hc_{at}_{part}": f"hc_{at}_{part}.weight" for at in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "attn.attn_sink": "attn_sinks.weight",
    "attn.wq_a.weight": "attn_q_a.weight",
    "attn.wq_b.weight": "attn_q_b.weight",
    "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.wkv.weight": "attn_kv.weight",
    "attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "attn.wo_a.weight": "attn_output_a.weight",
    "attn.wo_b.weight": "attn_output_b.weight",
    "attn.compressor.ape": "attn_compressor_ape.weight",
    "attn.compressor.wkv.weight": "attn_compressor_kv.weight",
    "attn.compressor.wgate.weight": "attn_compressor_gate.weight",
    "attn.compressor.norm.weight": "attn_compressor_norm.weight",
    "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "attn.indexer.compressor.wkv.weight": "indexer_compressor_kv.weight",
    "attn.indexer.compressor.wgate.weight": "indexer_compressor_gate.weight",
    "attn.indexer.compressor.norm.weight": "indexer_compressor_norm.weight",
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn.shared_experts.w1.weight": "ffn_gate_shexp.weight",
    "ffn.shared_experts.w3.weight": "ffn_up_shexp.weight",
    "ffn.shared_experts.w2.weight": "ffn_down_shexp.weight",
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
}
_SMALL = re.compile(r"hc_|_ape\.|ffn_gate_inp\.")


def write_deepseek4_gguf(
    model: PreTrainedModel,
    path: Path,
    experts: QuantType = QuantType.F32,
    dense: QuantType = QuantType.F32,
    prediction: Mapping[str, np.ndarray] | None = None,
    **changed: object,
) -> Path:
    """prediction: tensors of a block for multi-token prediction behind the model's own. changed: metadata by the name
    after the architecture, with _ for a dot; None leaves one out."""
    writer = gguf.GGUFWriter(path, "deepseek4")
    metadata = _keys_of(model)
    if prediction:
        metadata["block_count"] = model.config.num_hidden_layers + 1
    for name, value in changed.items():
        metadata[name.replace("__", ".")] = value
    add_keys(writer, {f"deepseek4.{key}": value for key, value in metadata.items() if value is not None})
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for name, values in (*layer_tensors(model), *(prediction or {}).items()):
        if name.endswith("tid2eid.weight"):
            writer.add_tensor(name, values.astype(np.int32))
        else:
            is_small = values.ndim < 2 or _SMALL.search(name) is not None
            add_tensor(writer, name, values, experts if "_exps." in name else QuantType.F32 if is_small else dense)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def layer_tensors(model: PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    """(name in the file, values) of all of a model's tensors."""
    for name, tensor in model.state_dict().items():
        theirs = published_name(name)
        layer = re.match(r"layers\.(\d+)\.", theirs)
        block, rest = ("", theirs) if layer is None else (f"blk.{layer[1]}.", theirs[layer.end() :])
        values = tensor.numpy()
        if ".experts." not in name:
            yield block + _STORED[rest], values
            continue
        parts = {"down": values} if "down" in name else dict(zip(("gate", "up"), np.split(values, 2, 1), strict=True))
        for part, one in parts.items():
            yield f"{block}ffn_{part}_exps.weight", one


def _keys_of(model: PreTrainedModel) -> dict[str, object]:
    config = model.config
    ratios = {"sliding_attention": 0, **DEEPSEEK4_RATES}
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "vocab_size": config.vocab_size,
        "nextn_predict_layers": 1,  # which the converter writes, and no block for it
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.output_lora_rank": config.o_lora_rank,
        "attention.output_group_count": config.o_groups,
        "attention.compress_ratios": [*(ratios[kind] for kind in config.layer_types), 0],
        "attention.compress_rope_freq_base": 160000.0,
        "attention.sliding_window": config.sliding_window,
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "hash_layer_count": sum(kind == "hash_moe" for kind in config.mlp_layer_types),
        "swiglu_clamp_exp": [10.0] * config.num_hidden_layers,
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters,
        "hyper_connection.epsilon": config.hc_eps,
    }

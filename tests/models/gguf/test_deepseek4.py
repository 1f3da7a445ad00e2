"""DeepSeek-V4 from a GGUF file as llama.cpp's converter writes it: names of published tensors to names of its own,
experts merged, tables of tokens as int32, and the keys that its loader reads.
"""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import config_of_model
from ktransformers.errors import FormatError, KTransformersError, UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.models.facts import ModelFacts
from ktransformers.models.gguf.config import config_from_gguf
from ktransformers.weights.gguf.file import open_gguf
from ktransformers.weights.gguf.source import GGUFSource
from tests.models.gguf.test_gguf_architectures import check_hostile
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.writer import add_tensor
from tests.support.models.agreement import INT8_TOLERANCE, TOLERANCE, dequantized, logits_of, prompt
from tests.support.models.fp8_models import published_name
from tests.support.models.tiny_models import tiny_model

LENGTH = 300  # two entries of 128 tokens, more of 4 than the indexer chooses
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
STORED = {  # of the converter, by published names
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


def model_of(hidden: int) -> PreTrainedModel:
    return tiny_model(
        "deepseek_v4",
        seed=5,
        layers=3,
        hidden=hidden,
        compress_rates=dict(RATES),
        layer_types=list(KINDS),
        rope_parameters=dict(YARN),
    )


def write(
    model: PreTrainedModel,
    path: Path,
    experts: QuantType = QuantType.F32,
    dense: QuantType = QuantType.F32,
    **changed: object,
) -> Path:
    """changed: metadata by the name after the architecture, with _ for a dot; None leaves one out."""
    writer = gguf.GGUFWriter(path, "deepseek4")
    metadata = keys_of(model)
    for name, value in changed.items():
        metadata[name.replace("__", ".")] = value
    for key, value in metadata.items():
        if value is not None:
            add_key(writer, f"deepseek4.{key}", value)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for name, tensor in model.state_dict().items():
        theirs = published_name(name)
        layer = re.match(r"layers\.(\d+)\.", theirs)
        block, rest = ("", theirs) if layer is None else (f"blk.{layer[1]}.", theirs[layer.end() :])
        values = tensor.numpy()
        if ".experts." in name:
            parts = (
                {"down": values} if "down" in name else dict(zip(("gate", "up"), np.split(values, 2, 1), strict=True))
            )
            for part, one in parts.items():
                add_tensor(writer, f"{block}ffn_{part}_exps.weight", one, experts)
        elif rest.endswith("tid2eid"):
            writer.add_tensor(block + STORED[rest], values.astype(np.int32))
        else:
            is_small = values.ndim < 2 or rest.startswith("hc_") or rest.endswith(("ape", "ffn.gate.weight"))
            add_tensor(writer, block + STORED[rest], values, QuantType.F32 if is_small else dense)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def keys_of(model: PreTrainedModel) -> dict[str, object]:
    config = model.config
    ratios = {"sliding_attention": 0, **RATES}
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


def add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, str(value))


def forward(path: Path, length: int) -> torch.Tensor:
    engine = static_engine(EngineConfig(gguf_path=path, cache_lens=length, cpu_infer=1))
    try:
        return engine.runner.forward(prompt(engine.runner.vocab_size, length), 0, range(length))
    finally:
        engine.close()


def test_f32_agrees_with_transformers(tmp_path: Path) -> None:
    model = model_of(64)
    want = logits_of(model, prompt(model.config.vocab_size, LENGTH))
    got = forward(write(model, tmp_path / "model.gguf"), LENGTH)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


def test_mxfp4_experts_beside_q8_0(tmp_path: Path) -> None:
    """As the published FP4 is converted; the median row, since a router that nearly ties may take another expert."""
    model = model_of(256)
    got = forward(write(model, tmp_path / "model.gguf", QuantType.MXFP4, QuantType.Q8_0), LENGTH)
    twin = dequantized(model, QuantType.MXFP4, QuantType.Q8_0)
    small = {name: one for name, one in model.named_parameters() if "_hc." in name or "hc_head" in name}
    small |= {name: one for name, one in model.named_parameters() if name.endswith("position_bias")}
    with torch.no_grad():
        for name, one in twin.named_parameters():
            if name in small:
                one.copy_(small[name])
    want = logits_of(twin, prompt(model.config.vocab_size, LENGTH))
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.median() <= INT8_TOLERANCE


def test_the_config_comes_back(tmp_path: Path) -> None:
    model = model_of(64)
    opened = open_gguf(write(model, tmp_path / "model.gguf"))
    config = config_of_model(opened)
    assert config is not None
    wanted = model.config.to_dict()
    for name in ("architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"):
        wanted.pop(name, None)
    got = config.to_dict()
    assert {name: got[name] for name in wanted} == wanted
    assert ModelFacts.of(config).num_layers == 3


@pytest.mark.parametrize(
    ("changed", "error", "what"),
    [
        ({"expert_gating_func": 2}, UnsupportedError, r"expert_gating_func 2"),
        ({"expert_weights_norm": False}, UnsupportedError, r"does not normalize"),
        ({"rope__scaling__type": None}, UnsupportedError, r"without rope\.scaling\.type yarn"),
        ({"attention__compress_ratios": [0, 4, 2]}, FormatError, r"compress_ratios is \[0, 4, 2\]"),
        ({"attention__compress_ratios": [0, 4]}, FormatError, r"3 counts are needed"),
        ({"swiglu_clamp_shexp": 7.0}, UnsupportedError, r"swiglu_clamp_shexp of a deepseek4 file say \[7\.0, 10\.0\]"),
        ({"swiglu_clamp_exp": [10.0, 10.0]}, FormatError, r"3 numbers are needed"),
        ({"swiglu_clamp_exp": float("nan")}, FormatError, r"a finite number is needed"),
        ({"swiglu_clamp_exp": 0.0}, UnsupportedError, r"say \[0\.0\]"),
        ({"hyper_connection__count": None}, FormatError, r"lacks deepseek4\.hyper_connection\.count"),
    ],
)
def test_what_no_known_model_says(
    changed: dict[str, object], error: type[KTransformersError], what: str, tmp_path: Path
) -> None:
    opened = open_gguf(write(model_of(64), tmp_path / "model.gguf", **changed))
    with pytest.raises(error, match=what):
        config_from_gguf(opened.metadata, {name: one.shape for name, one in opened.tensors.items()})


def test_no_value_of_a_key_is_taken_amiss(tmp_path: Path) -> None:
    check_hostile(open_gguf(write(model_of(64), tmp_path / "model.gguf")))


def test_experts_of_each_token_are_whole_numbers(tmp_path: Path) -> None:
    model = model_of(64)
    opened = open_gguf(write(model, tmp_path / "model.gguf"))
    source = GGUFSource(opened, ModelFacts.of(model.config))
    name = "model.layers.0.mlp.gate.tid2eid"
    wanted = model.state_dict()[name].float()
    assert torch.equal(source.dense(name), wanted)
    info, raw = source.find(name), source.tensor(name)
    assert info is not None
    assert (info.resident_type, info.shape, info.nbytes) == (QuantType.F32, tuple(wanted.shape), raw.nbytes)
    assert torch.equal(raw.data.view(torch.float32).view(raw.shape), wanted)

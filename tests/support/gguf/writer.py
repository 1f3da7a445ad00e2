"""Writes a Hugging Face model as GGUF the way llama.cpp's converter does, derived here by hand as the tests' oracle.

What the converter does beyond renaming: rows of q and k permuted for the llama and granite families, kv_b split in two
and k_b transposed for MLA, experts merged per projection, fused shared experts split, 1 added to gemma's norms,
dimensions of size 1 dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from transformers import PreTrainedModel

from ktransformers.kernels.types import QuantType, block_size
from tests.support.models.low_bits import encode

ARCH_OF = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "olmoe": "olmoe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granitemoe": "granitemoe",
    "ernie4_5_moe": "ernie4_5-moe",
    "phimoe": "phimoe",
    "dots1": "dots1",
    "minimax_m2": "minimax-m2",
    "hunyuan_v1_moe": "hunyuan-moe",
    "arcee": "arcee",
    "ernie4_5": "ernie4_5",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm4": "glm4",
    "granite": "granite",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "olmo2": "olmo2",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "gemma": "gemma",
    "phi": "phi2",
    "phi3": "phi3",
    "gpt_bigcode": "starcoder",
    "starcoder2": "starcoder2",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "olmo": "olmo",
    "olmo3": "olmo2",
    "jais2": "jais2",
    "exaone4": "exaone4",
    "ministral3": "mistral3",
    "exaone_moe": "exaone-moe",
    "afmoe": "afmoe",
    "llama4_text": "llama4",
    "glm_moe_dsa": "glm-dsa",
    "stablelm": "stablelm",
    "nemotron": "nemotron",
    "gpt_neox": "gptneox",
    "gpt2": "gpt2",
    "mimo_v2_flash": "mimo2",
    "gemma4_text": "gemma4",
}
PERMUTED_ARCHS = ("llama", "arcee", "granite", "granitemoe", "smollm3", "olmo", "mistral3", "minicpm", "bailingmoe")
FUSED_QKV_ARCHS = ("bailingmoe2",)
NORM_PLUS_ONE_ARCHS = ("gemma", "gemma2", "gemma3", "nemotron")


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    experts_qtype: QuantType = QuantType.F32,
    dense_qtype: QuantType = QuantType.F32,
    *,
    experts: str = "merged",
    kv_b: str = "split",
    shard_max_tensors: int = 0,
    pooling_type: gguf.PoolingType | None = None,
    arch: str | None = None,
    prediction_blocks: int = 0,
    sections: Sequence[int] = (),
    vocabulary: Mapping[str, str | int | bool | list[str] | list[int]] | None = None,
) -> Path:
    """Write `model` (config and weights) to `path` and return the path of the file to open.

    Matrices get the types asked for where their rows allow it, else Q8_0 or F16; routers, norms and biases stay F32.
    experts: "merged" (one tensor per projection), "single" (one per expert), "gate_up" (gate and up in one tensor).
    kv_b: "split" (attn_k_b, attn_v_b) or "whole" (attn_kv_b, as old files have it). arch: where several have the same
    model type. prediction_blocks: for multi-token prediction, behind the model's own. sections: of M-RoPE.
    vocabulary: the metadata of its tokenizer; None: it has none.
    """
    config = model.config
    arch = arch or ARCH_OF[config.model_type]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=shard_max_tensors)
    add_metadata(writer, model)
    if sections:
        writer.add_rope_dimension_sections([*sections, 0])
    if pooling_type is not None:
        writer.add_pooling_type(pooling_type)
    for key, value in (vocabulary or {}).items():
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, values in gguf_tensors(model, experts=experts, kv_b=kv_b, arch=arch):
        is_expert = "_exps" in name or name.split(".")[-2].isdigit()
        qtype = experts_qtype if is_expert else dense_qtype
        if values.ndim < 2 or "ffn_gate_inp" in name or name.endswith("bias"):
            qtype = QuantType.F32
        add_tensor(writer, name, values, qtype)
    if prediction_blocks:
        _add_prediction(writer, config, prediction_blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if shard_max_tensors:
        return sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]
    return path


def _add_prediction(writer: gguf.GGUFWriter, config: object, count: int) -> None:
    """Some of what such blocks hold; lists by layer count them, too."""
    writer.add_nextn_predict_layers(count)
    for values in writer.kv_data:
        block_count, kv_heads, slides = (f"{writer.arch}.{key}" for key in _COUNTED)
        if block_count in values:
            values[block_count].value += count
        for key in (kv_heads, slides):
            if key in values and isinstance(values[key].value, list):
                values[key].value.extend(values[key].value[-1:] * count)
    for block in range(config.num_hidden_layers, config.num_hidden_layers + count):
        for name in ("nextn.eh_proj", "nextn.enorm", "attn_norm"):
            writer.add_tensor(f"blk.{block}.{name}.weight", np.ones(config.hidden_size, dtype=np.float32))


_COUNTED = ("block_count", "attention.head_count_kv", "attention.sliding_window_pattern")


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, qtype: QuantType) -> None:
    """Add `values` as `qtype`, or as Q8_0 or F16 where the rows are no multiple of the type's block."""
    if values.shape[-1] % block_size(qtype):
        qtype = QuantType.Q8_0 if values.shape[-1] % 32 == 0 else QuantType.F16
    rows = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, values.shape[-1])
    data = encode(rows, qtype)
    # As no bytes: of these the writer would ask its own table of types for the shape.
    writer.add_tensor(name, data.view(np.int8), raw_shape=values.shape, raw_dtype=qtype)


def gguf_tensors(
    model: PreTrainedModel, *, experts: str = "merged", kv_b: str = "split", arch: str | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """(name in the file, fp32 values) of every tensor."""
    config = model.config
    arch = arch or ARCH_OF[config.model_type]
    arch_id = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    name_map = gguf.get_tensor_name_map(arch_id, config.num_hidden_layers)
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for name, tensor in state.items():
        block = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        values = tensor.float().numpy()
        if ".experts." in name:
            yield from _expert_tensors(block, name.rsplit(".", 1)[1], values, config.model_type, experts)
            continue
        if name.endswith("kv_b_proj.weight") and kv_b == "split":
            yield from _split_kv_b(block, values, config)
            continue
        if arch in FUSED_QKV_ARCHS and "_proj." in name and ".self_attn." in name and ".o_proj." not in name:
            if ".q_proj." in name:
                parts = [state[name.replace(".q_proj.", f".{part}_proj.")].float().numpy() for part in "qkv"]
                yield block + "attn_qkv." + name.rsplit(".", 1)[1], np.concatenate(parts)
            continue
        if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            values = values.T
        if ".query_key_value." in name:  # [heads, 3, size] -> [3, heads, size]
            by_head = values.reshape(config.num_attention_heads, 3, -1, *values.shape[1:])
            values = by_head.swapaxes(0, 1).reshape(values.shape)
        if arch in PERMUTED_ARCHS and ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if arch in PERMUTED_ARCHS and ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        if name.endswith("shared_mlp.input_linear.weight"):
            gate, up = np.split(values, 2)
            yield from ((block + "ffn_gate_shexp.weight", gate), (block + "ffn_up_shexp.weight", up))
            continue
        if arch in NORM_PLUS_ONE_ARCHS and name.endswith("norm.weight"):
            values = values + 1
        yield _renamed(name, block, name_map), np.atleast_1d(values.squeeze())


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of a head is row i of its first half, row 2i + 1 row i of its second half."""
    out = np.empty_like(values)
    size = len(values) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = values[head * size + i]
            out[head * size + 2 * i + 1] = values[head * size + size // 2 + i]
    return out


def _renamed(name: str, block: str, name_map: gguf.TensorNameMap) -> str:
    if name.endswith("e_score_correction_bias"):
        return block + "exp_probs_b.bias"
    if name.endswith("mlp.expert_bias"):
        return block + "exp_probs_b.bias"
    if name.endswith("router.scale"):
        return block + "ffn_gate_inp.scale"
    if name.endswith("router.per_expert_scale"):
        return block + "ffn_down_exps.scale"
    if name.endswith("layer_scalar"):
        return block + "layer_output_scale.weight"
    if name.endswith(("router.weight", "mlp.gate.weight", "mlp.gate.wg.weight")):
        return block + "ffn_gate_inp.weight"
    if name.endswith("self_attn.sinks"):
        return block + "attn_sinks.weight"
    found = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def _expert_tensors(
    block: str, kind: str, values: np.ndarray, model_type: str, experts: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Split the module's fused gate_up_proj, and put gpt_oss's [E, in, out] matrices the other way round."""
    suffix = "bias" if kind.endswith("_bias") else "weight"
    if model_type in ("gpt_oss", "llama4_text") and suffix == "weight":
        values = values.transpose(0, 2, 1)
    if kind.startswith("down"):
        parts = {"down": values}
    elif experts == "gate_up":
        parts = {"gate_up": values}
    elif model_type == "gpt_oss":
        parts = {"gate": values[:, 0::2], "up": values[:, 1::2]}
    else:
        half = values.shape[1] // 2
        parts = {"gate": values[:, :half], "up": values[:, half:]}
    for part, part_values in parts.items():
        if experts == "single":
            for index, matrix in enumerate(part_values):
                yield f"{block}ffn_{part}.{index}.{suffix}", matrix
        else:
            yield f"{block}ffn_{part}_exps.{suffix}", part_values


def _split_kv_b(block: str, values: np.ndarray, config: object) -> Iterator[tuple[str, np.ndarray]]:
    heads, nope, v_dim = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    by_head = values.reshape(heads, nope + v_dim, -1)
    yield block + "attn_k_b.weight", by_head[:, :nope].transpose(0, 2, 1)
    yield block + "attn_v_b.weight", by_head[:, nope:]


def add_metadata(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    """The hyperparameters that the converter writes for the model's family."""
    config = model.config
    kind = config.model_type
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    layer = config if kind != "gemma4_text" else config.per_layer_config[0]  # whose layers differ
    head_dim = getattr(layer, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if kind != "gemma4_text":
        writer.add_feed_forward_length(_feed_forward_length(config))
    writer.add_head_count(config.num_attention_heads)
    if getattr(config, "rms_norm_eps", None) is not None:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
        writer.add_layer_norm_eps(next((getattr(config, n) for n in names if hasattr(config, n)), 1e-5))
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if local is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if kind in ("deepseek_v2", "deepseek_v3", "glm_moe_dsa"):
        _add_mla(writer, config)
    elif kind == "gemma4_text":
        _add_gemma4(writer, config)
    elif kind == "mimo_v2_flash":
        slides = [one == "sliding_attention" for one in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads * (2 if one else 1) for one in slides])
        writer.add_sliding_window_pattern(slides)
        writer.add_key_length(head_dim)
        writer.add_value_length(config.v_head_dim)
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    else:
        writer.add_head_count_kv(1 if kind == "gpt_bigcode" else _kv_heads(config))
        if getattr(config, "head_dim", None) is not None:
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    _add_rope_scaling(writer, config, rope)
    _add_windows(writer, config)
    _add_scales(writer, config)
    _add_experts(writer, config)


def _kv_heads(config: object) -> int:
    has_own = config.model_type not in ("gpt_neox", "gpt2")
    return config.num_key_value_heads if has_own else config.num_attention_heads


def _feed_forward_length(config: object) -> int:
    names = ("intermediate_size_mlp", "intermediate_size", "n_inner")
    return next(getattr(config, name) for name in names if getattr(config, name, None))


def _add_rope_scaling(writer: gguf.GGUFWriter, config: object, rope: dict[str, object]) -> None:
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            share = 1.0 if writer.arch == "mistral3" else 0.1
            writer.add_rope_scaling_yarn_log_mul(share * rope["mscale_all_dim"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        scale = config.max_position_embeddings / rope["original_max_position_embeddings"]
        attention = math.sqrt(1 + math.log(scale) / math.log(rope["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(attention)
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def _add_windows(writer: gguf.GGUFWriter, config: object) -> None:
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    elif config.model_type == "phi3":
        writer.add_sliding_window(0)
    if config.model_type in ("olmo3", "exaone4", "exaone_moe"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _add_scales(writer: gguf.GGUFWriter, config: object) -> None:
    kind = config.model_type
    if kind in ("granite", "granitemoe", "granitemoeshared") and writer.arch != "bailingmoe":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind in ("stablelm", "gpt_neox"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if kind in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if kind in ("gemma2", "gemma3_text", "gemma4_text") and config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "olmo" and config.clip_qkv is not None:
        writer.add_clamp_kqv(config.clip_qkv)


def _add_mla(writer: gguf.GGUFWriter, config: object) -> None:
    writer.add_head_count_kv(1)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)


def _add_gemma4(writer: gguf.GGUFWriter, config: object) -> None:
    layers = list(config.per_layer_config)
    slides = [one == "sliding_attention" for one in config.layer_types]
    full, local = layers[slides.index(False)].head_dim, layers[slides.index(True)].head_dim
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(local)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    factor = 2 if config.use_double_wide_mlp else 1
    widths = [config.intermediate_size * (1 if i < first_shared else factor) for i in range(config.num_hidden_layers)]
    writer.add_feed_forward_length(widths)
    turning = int(full * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    factors = np.array([1.0] * turning + [1e30] * (full // 2 - turning), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def _add_experts(writer: gguf.GGUFWriter, config: object) -> None:
    kind = config.model_type
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    count = next((getattr(config, c) for c in counts if getattr(config, c, None)), None)
    if count is None:
        return
    writer.add_expert_count(count)
    used = next(
        getattr(config, n) for n in ("moe_topk", "moe_k", "top_k_experts", "num_experts_per_tok") if n in vars(config)
    )
    writer.add_expert_used_count(used[0] if isinstance(used, list) else used)
    width = getattr(config, "moe_intermediate_size", None)
    if isinstance(width, int):
        writer.add_expert_feed_forward_length(width)
    elif kind in ("gpt_oss", "minimax_m2", "hunyuan_v1_moe", "llama4_text"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if kind == "hunyuan_v1_moe":
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    if kind in ("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "glm_moe_dsa"):
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        if config.norm_topk_prob:
            writer.add_expert_weights_norm(True)
    if kind in ("deepseek_v3", "glm4_moe", "glm_moe_dsa"):
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if kind in ("deepseek_v3", "glm4_moe", "dots1", "minimax_m2", "glm_moe_dsa"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "deepseek_v2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    if kind == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.moe_intermediate_size)
    if kind == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if kind == "mimo_v2_flash":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_float32("mimo2.attention.value_scale", config.attention_value_scale)
    if kind == "glm_moe_dsa":
        writer.add_indexer_head_count(config.index_n_heads)
        writer.add_indexer_key_length(config.index_head_dim)
        writer.add_indexer_top_k(config.index_topk)
    if kind == "exaone_moe":
        _add_sigmoid_router(writer, config, config.mlp_layer_types.count("dense"), config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if writer.arch == "bailingmoe":
        writer.add_leading_dense_block_count(0)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(1.0)
    if kind == "afmoe":
        _add_sigmoid_router(writer, config, config.num_dense_layers, config.route_scale)
        writer.add_expert_weights_norm(True)


def _add_sigmoid_router(writer: gguf.GGUFWriter, config: object, num_dense: int, scale: float) -> None:
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(num_dense)
    writer.add_expert_shared_count(config.num_shared_experts)
    writer.add_expert_weights_scale(scale)

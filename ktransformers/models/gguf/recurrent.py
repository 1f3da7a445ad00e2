"""GGUF architectures with recurrent layers: of each the `transformers` model type, and the config values of its family.

Which layer is of which kind is asked of the tensors: metadata say it in a different way in every family, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from ktransformers.errors import FormatError, UnsupportedError
from ktransformers.models.gguf.fields import SIGMOID, GGUFFamily, granite_multipliers, groups, latent, shared_width
from ktransformers.models.gguf.fields import experts as expert_values
from ktransformers.models.gguf.metadata import Metadata, Values
from ktransformers.models.gguf.rope import rope_parameters
from ktransformers.models.ngram_hash import hash_multipliers, primes_from

__all__ = ["RECURRENT_FAMILIES"]

LINEAR, FULL = "linear_attention", "full_attention"


def _kinds(gguf: Metadata, kinds: Mapping[str, str]) -> list[str]:
    """By layer, the kind of the first of these tensors that it has."""
    found = []
    for layer in range(gguf.layers):
        kind = next((kinds[name] for name in kinds if f"blk.{layer}.{name}" in gguf.shapes), None)
        if kind is None:
            raise FormatError(f"layer {layer} of the {gguf.arch} file has none of {', '.join(kinds)}; is it complete?")
        found.append(kind)
    return found


def _parts(gguf: Metadata, whole: str, count: str) -> int:
    """The size of each of `count` parts of `whole`."""
    total, parts = gguf.int(whole), gguf.int(count)
    if total % parts:
        raise FormatError(f"{gguf.arch}.{whole} is {total}, no multiple of {gguf.arch}.{count} ({parts})")
    return total // parts


def _gated_delta_net(gguf: Metadata) -> Values:
    head_dim = gguf.int("attention.key_length")
    rope = rope_parameters(gguf)
    rope["partial_rotary_factor"] = gguf.int("rope.dimension_count", 2) / head_dim
    return {
        "head_dim": head_dim,
        "layer_types": _kinds(gguf, {"ssm_a": LINEAR, "attn_q.weight": FULL}),
        "linear_conv_kernel_dim": gguf.int("ssm.conv_kernel"),
        "linear_key_head_dim": gguf.int("ssm.state_size"),
        "linear_num_key_heads": gguf.int("ssm.group_count"),
        "linear_num_value_heads": gguf.int("ssm.time_step_rank"),
        "linear_value_head_dim": _parts(gguf, "ssm.inner_size", "ssm.time_step_rank"),
        "attention_bias": gguf.has(r"attn_q\.bias"),
        "rope_parameters": rope,
    }


def _qwen3next(gguf: Metadata) -> tuple[str, Values]:
    return "qwen3_next", {
        **_gated_delta_net(gguf),
        **expert_values(gguf, "num_experts"),
        "shared_expert_intermediate_size": shared_width(gguf),
        "norm_topk_prob": gguf.bool("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen35(gguf: Metadata) -> tuple[str, Values]:
    values = _gated_delta_net(gguf)
    sections = gguf.list("rope.dimension_sections")[:3]
    rope = values["rope_parameters"]
    assert isinstance(rope, dict)
    rope |= {"mrope_section": sections or [11, 11, 10], "mrope_interleaved": True}
    return "qwen3_5_text", values


def _qwen35moe(gguf: Metadata) -> tuple[str, Values]:
    return "qwen3_5_moe_text", {
        **_qwen35(gguf)[1],
        **expert_values(gguf, "num_experts"),
        "shared_expert_intermediate_size": shared_width(gguf),
    }


def _qwen4exp(gguf: Metadata) -> tuple[str, Values]:
    """Qwen3.8-Flash-Next, as llama.cpp's converter writes it. What the gates of outputs are, all files leave unsaid."""
    _, values = _qwen35(gguf)
    ratios = set(gguf.list("attention.compress_ratios")) - {0}
    if len(ratios) != 1:
        raise UnsupportedError(
            f"a {gguf.arch} file whose attention.compress_ratios are {sorted(ratios)}: one is needed for all layers "
            "that attend"
        )
    return "qwen4_exp_text", {
        **values,
        **expert_values(gguf, "num_experts"),
        "layer_types": _kinds(gguf, {"ssm_a": LINEAR, "attn_q.weight": "indexed_attention"}),
        "shared_expert_intermediate_size": shared_width(gguf),
        "norm_topk_prob": gguf.bool("expert_weights_norm", True),
        "output_gate_type": "sigmoid",
        "hc_count": gguf.int("hyper_connection.count"),
        "hc_lowrank": gguf.int("hyper_connection.low_rank"),
        "indexer_n_heads": gguf.int("attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": gguf.int("attention.indexer.key_length"),
        "indexer_budget": gguf.int("attention.indexer.top_k"),
        "indexer_compress_ratio": ratios.pop(),
        **_ngrams(gguf),
    }


_SEED = 1234  # of every published model; files hold what follows from it


def _ngrams(gguf: Metadata) -> Values:
    """Embeddings of n-grams: the file says the numbers of their hashes, the config what these follow from."""
    layers = gguf.list("ple.layers")
    if not layers:
        return {"ple_layer_ids": None}
    table = gguf.shapes.get("per_layer_token_embd.weight")
    if len(layers) != 1 or table is None or len(table) != 2:
        raise UnsupportedError(
            f"a {gguf.arch} file with embeddings of n-grams in {len(layers)} layers, or without a "
            "matrix per_layer_token_embd.weight: one table for one layer is what llama.cpp's converter writes"
        )
    size, per_ngram = gguf.int("ple.ngram_size", 2), gguf.int("ple.heads_per_ngram")
    heads = (size - 1) * per_ngram
    sizes, offsets = gguf.list("ple.head_vocab_sizes"), gguf.list("ple.head_offsets")
    factors = gguf.list("ple.layer_multipliers")
    vocab, eos = gguf.shapes["token_embd.weight"][0], gguf.int("ple.eos_token_id")
    if (
        len(sizes) != heads
        or not all(0 < one <= table[0] for one in sizes)
        or sum(sizes) > table[0]
        or any(one != prime for one, prime in zip(sizes, primes_from(sizes[0]), strict=False))
        or [*offsets, sum(sizes)] != list(accumulate(sizes, initial=0))
        or factors != hash_multipliers(vocab, size, 0, _SEED)
    ):
        raise UnsupportedError(
            f"a {gguf.arch} file whose numbers of n-grams (ple.head_vocab_sizes, ple.head_offsets, "
            "ple.layer_multipliers) do not follow from the seed of published models; pass --model_path"
        )
    gguf.raw("embedding_length_per_layer_input")  # the table's width
    gguf.raw("ple.image_token_id")  # of the part that reads images
    token = gguf.metadata.get("tokenizer.ggml.eos_token_id")
    return {
        "ple_layer_ids": [layers[0] + 1],
        "ple_embed_dim": heads * table[1],
        "ple_conv_kernel_size": gguf.int("ple.conv_kernel"),
        "ngram_size": size,
        "heads_per_ngram": per_ngram,
        "ngram_vocab_size_base": sizes[0],
        "make_ngram_vocab_size_divisible_by": table[0],
        "split_ngram_parts": 1,
        "seed": _SEED,
        "eos_token_id": eos if token in (None, eos) else [eos, token],
    }


def _kimi_linear(gguf: Metadata) -> tuple[str, Values]:
    heads = gguf.int("attention.head_count")
    delta, size = gguf.shape("ssm_a"), gguf.int("kda.head_dim")
    return "kimi_linear", {
        **expert_values(gguf, "num_local_experts"),
        "layer_types": _kinds(gguf, {"ssm_a": LINEAR, "attn_kv_a_mqa.weight": FULL}),
        "mlp_layer_types": _kinds(gguf, {"ffn_gate_inp.weight": "sparse", "ffn_up.weight": "dense"}),
        **latent(gguf),
        "linear_head_dim": size,
        "linear_num_heads": max(delta or (heads,)),
        "linear_conv_kernel_dim": gguf.int("ssm.conv_kernel"),
        "n_shared_experts": gguf.find_int("expert_shared_count") or 0,
        "routed_scaling_factor": gguf.float("expert_weights_scale", 1.0),
        "norm_topk_prob": gguf.bool("expert_weights_norm", True),
        **groups(gguf),
    }


def _mamba2(gguf: Metadata, names: Mapping[str, str]) -> Values:
    """names: what the family calls heads, groups, state, head, convolution, expansion, and both biases."""
    inner, hidden = gguf.int("ssm.inner_size"), gguf.int("embedding_length")
    return {
        names["heads"]: gguf.int("ssm.time_step_rank"),
        names["groups"]: gguf.int("ssm.group_count"),
        names["state"]: gguf.int("ssm.state_size"),
        names["head"]: _parts(gguf, "ssm.inner_size", "ssm.time_step_rank"),
        names["convolution"]: gguf.int("ssm.conv_kernel"),
        names["expansion"]: max(inner // hidden, 1),
        names["convolution_bias"]: gguf.has(r"ssm_conv1d\.bias"),
        names["bias"]: gguf.has(r"ssm_in\.bias"),
    }


_GRANITE = {
    "heads": "mamba_n_heads",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "head": "mamba_d_head",
    "convolution": "mamba_d_conv",
    "expansion": "mamba_expand",
    "convolution_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
}
_MAMBA2 = {
    "heads": "num_heads",
    "groups": "n_groups",
    "state": "state_size",
    "head": "head_dim",
    "convolution": "conv_kernel",
    "expansion": "expand",
    "convolution_bias": "use_conv_bias",
    "bias": "use_bias",
}
_NEMOTRON = {
    **_MAMBA2,
    "heads": "mamba_num_heads",
    "state": "ssm_state_size",
    "head": "mamba_head_dim",
    "bias": "mamba_proj_bias",
}


def _falcon_h1(gguf: Metadata) -> tuple[str, Values]:
    """The converter multiplies weights by all of the family's multipliers, which are 1 in what it leaves."""
    if "output.weight" not in gguf.shapes:
        raise UnsupportedError(
            "a falcon-h1 file without output.weight: its embeddings are scaled otherwise than its head; pass "
            "--model_path with the model's config.json and safetensors"
        )
    mixer = _mamba2(gguf, _GRANITE)
    mixer.pop("mamba_expand")  # mamba_d_ssm says the width
    return "falcon_h1", {
        **mixer,
        "mamba_d_ssm": gguf.int("ssm.inner_size"),
        "mamba_rms_norm": gguf.has(r"ssm_norm\.weight"),
        "mamba_norm_before_gate": False,
        "head_dim": gguf.int("attention.key_length"),
        "attention_bias": gguf.has(r"attn_q\.bias"),
        "mlp_bias": gguf.has(r"ffn_up\.bias"),
        "projectors_bias": gguf.has(r"ssm_out\.bias"),
    }


def _states_only(gguf: Metadata) -> Values:
    return {"layer_norm_epsilon": gguf.float("attention.layer_norm_rms_epsilon"), "rope_parameters": None}


def _mamba2_alone(gguf: Metadata) -> tuple[str, Values]:
    return "mamba2", {**_states_only(gguf), **_mamba2(gguf, _MAMBA2)}


def _mamba(gguf: Metadata) -> tuple[str, Values]:
    return "falcon_mamba" if gguf.bool("ssm.dt_b_c_rms", False) else "mamba", {
        **_states_only(gguf),
        "state_size": gguf.int("ssm.state_size"),
        "conv_kernel": gguf.int("ssm.conv_kernel"),
        "expand": _parts(gguf, "ssm.inner_size", "embedding_length"),
        "intermediate_size": gguf.int("ssm.inner_size"),
        "time_step_rank": gguf.int("ssm.time_step_rank"),
        "use_conv_bias": gguf.has(r"ssm_conv1d\.bias"),
        "use_bias": gguf.has(r"ssm_in\.bias"),
    }


def _granitehybrid(gguf: Metadata) -> tuple[str, Values]:
    experts: Values = {"num_local_experts": 0, "num_experts_per_tok": 0}
    if gguf.find_int("expert_count"):
        experts = expert_values(gguf, "num_local_experts", width="intermediate_size")
    dense = gguf.shape("ffn_up.weight")
    return "granitemoehybrid", {
        **_mamba2(gguf, _GRANITE),
        **experts,
        "layer_types": _kinds(gguf, {"ssm_a": LINEAR, "attn_q.weight": FULL}),
        "shared_intermediate_size": shared_width(gguf) or (0 if dense is None else dense[0]),
        "position_embedding_type": "rope" if gguf.bool("rope.scaling.finetuned", True) else None,  # as llama.cpp
        **granite_multipliers(gguf),
        "attention_bias": gguf.has(r"attn_q\.bias"),
    }


def _nemotron_h(gguf: Metadata) -> tuple[str, Values]:
    kinds = {"ssm_a": LINEAR, "attn_q.weight": FULL, "ffn_gate_inp.weight": "moe", "ffn_up.weight": "mlp"}
    values: Values = {
        **_mamba2(gguf, _NEMOTRON),
        "layers_block_type": _kinds(gguf, kinds),
        "head_dim": gguf.int("attention.key_length"),
        "layer_norm_epsilon": gguf.float(
            "attention.layer_norm_rms_epsilon", gguf.find_float("attention.layer_norm_epsilon")
        ),
        "attention_bias": gguf.has(r"attn_q\.bias"),
        "mlp_bias": gguf.has(r"ffn_up\.bias"),
    }
    if gguf.find_int("expert_count"):
        values |= {
            **expert_values(gguf, "n_routed_experts"),
            "n_shared_experts": gguf.int("expert_shared_count", 0),
            "moe_shared_expert_intermediate_size": shared_width(gguf),
            "routed_scaling_factor": gguf.float("expert_weights_scale", 1.0),
            "norm_topk_prob": gguf.bool("expert_weights_norm", True),
            **groups(gguf),
            "moe_latent_size": gguf.find_int("moe_latent_size") or None,
        }
    return "nemotron_h", values


def _every(gguf: Metadata, what: str, layers: list[int]) -> tuple[int, int]:
    """(period, offset) of the layers that have something. Raises UnsupportedError for layers without a period."""
    if not layers:
        return gguf.layers + 1, gguf.layers
    period = layers[1] - layers[0] if len(layers) > 1 else gguf.layers
    if layers != list(range(layers[0], gguf.layers, period)) or layers[0] >= period:
        raise UnsupportedError(f"a {gguf.arch} file with {what} in layers {layers[:5]}; pass --model_path")
    return period, layers[0]


def _jamba(gguf: Metadata) -> tuple[str, Values]:
    kinds = _kinds(gguf, {"ssm_a": LINEAR, "attn_q.weight": FULL})
    attention = _every(gguf, "attention", [i for i, kind in enumerate(kinds) if kind == FULL])
    routed = [i for i in range(gguf.layers) if f"blk.{i}.ffn_gate_inp.weight" in gguf.shapes]
    experts: Values = {"num_experts": 1, "num_experts_per_tok": 1}
    if gguf.find_int("expert_count"):
        experts = expert_values(gguf, "num_experts")
        experts.pop("moe_intermediate_size", None)  # as wide as dense layers
    period, offset = _every(gguf, "experts", routed)
    return "jamba", {
        **experts,
        "attn_layer_period": attention[0],
        "attn_layer_offset": attention[1],
        "expert_layer_period": period,
        "expert_layer_offset": offset,
        "mamba_d_state": gguf.int("ssm.state_size"),
        "mamba_d_conv": gguf.int("ssm.conv_kernel"),
        "mamba_expand": _parts(gguf, "ssm.inner_size", "embedding_length"),
        "mamba_dt_rank": gguf.int("ssm.time_step_rank"),
        "mamba_conv_bias": gguf.has(r"ssm_conv1d\.bias"),
        "mamba_proj_bias": gguf.has(r"ssm_in\.bias"),
    }


def _lfm2(gguf: Metadata) -> tuple[str, Values]:
    return "lfm2", {
        "layer_types": _kinds(gguf, {"shortconv.conv.weight": "conv", "attn_q.weight": FULL}),
        "conv_L_cache": gguf.int("shortconv.l_cache"),
        "conv_bias": gguf.has(r"shortconv\.conv\.bias"),
        "norm_eps": gguf.float("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,  # the file says the width that came of it
    }


def _lfm2moe(gguf: Metadata) -> tuple[str, Values]:
    return "lfm2_moe", {
        **{name: value for name, value in _lfm2(gguf)[1].items() if not name.startswith("block_")},
        **expert_values(gguf, "num_experts"),
        "num_dense_layers": gguf.int("leading_dense_block_count", 0),
        "norm_topk_prob": gguf.bool("expert_weights_norm", True),
        "routed_scaling_factor": gguf.float("expert_weights_scale", 1.0),
        "use_expert_bias": gguf.has(r"exp_probs_b(\.bias)?"),
    }


RECURRENT_FAMILIES: dict[str, GGUFFamily] = {
    "falcon-h1": GGUFFamily(_falcon_h1),
    "granitehybrid": GGUFFamily(_granitehybrid, permuted_qk=True),
    "jamba": GGUFFamily(_jamba),
    "kimi-linear": GGUFFamily(_kimi_linear, gating=SIGMOID),
    "lfm2": GGUFFamily(_lfm2),
    "lfm2moe": GGUFFamily(_lfm2moe, gating=SIGMOID),
    "mamba": GGUFFamily(_mamba, is_attention_free=True),
    "mamba2": GGUFFamily(_mamba2_alone, is_attention_free=True),
    "nemotron_h": GGUFFamily(_nemotron_h, permuted_qk=True),
    "nemotron_h_moe": GGUFFamily(_nemotron_h, permuted_qk=True),
    "qwen35": GGUFFamily(_qwen35, norm_plus_one=True, tiled_values=True),
    "qwen35moe": GGUFFamily(_qwen35moe, norm_plus_one=True, tiled_values=True),
    "qwen4exp": GGUFFamily(_qwen4exp, norm_plus_one=True, tiled_values=True),
    "qwen3next": GGUFFamily(_qwen3next, norm_plus_one=True),
}

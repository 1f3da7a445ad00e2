"""Config values that GGUF architectures share: heads, windows, experts and their router. Knows no family by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ktransformers.errors import FormatError, UnsupportedError
from ktransformers.models.gguf.metadata import Metadata, Values
from ktransformers.models.gguf.rope import rope_parameters

__all__ = [
    "SIGMOID",
    "SOFTMAX",
    "GGUFFamily",
    "check_router",
    "clamp",
    "experts",
    "gating",
    "granite_multipliers",
    "groups",
    "head_dim",
    "indexer",
    "indexer_kinds",
    "latent",
    "layer_norm",
    "leading_dense",
    "mlp_kinds",
    "partial_rotary",
    "rotary_share",
    "routing",
    "routing_by_layer",
    "shared_width",
    "windows",
]

SOFTMAX, SIGMOID = 1, 2  # gguf.ExpertGatingFuncType


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """How files of one architecture differ from what all have in common.

    config: returns the model type of transformers, and the config values beyond those of all models.

    Of the metadata:
    has_layer_norm: norms subtract the mean, or may; `config` names their epsilon itself.
    differs_by_layer: heads or widths differ from layer to layer; `config` reads them itself.
    is_attention_free: files say 0 heads, and a context length that stands for any.
    gating: how the router makes weights of scores, where the family knows one way: SOFTMAX or SIGMOID.
    normalizes: the router normalizes weights, and the family's class has no switch for that.

    Changes that the converter makes to tensors beyond renaming:
    permuted_qk: q_proj and k_proj rows (and biases) are reordered for interleaved rotary embedding.
    norm_plus_one: norms are stored as 1 + weight, those of recurrent layers with a gate excepted.
    tiled_values: heads of values are in another order, see weights/gguf/recurrent_forms.py.
    is_conv1d: matrices of modules of class Conv1D are turned to [out, in].
    qkv_by_part: queries, keys and values of one matrix stand one after the other, not head by head.
    positive_decay: decays are stored as exp(A_log), not as -exp(A_log).
    """

    config: Callable[[Metadata], tuple[str, Values]]
    has_layer_norm: bool = False
    differs_by_layer: bool = False
    is_attention_free: bool = False
    gating: int | None = None
    normalizes: bool = False
    permuted_qk: bool = False
    norm_plus_one: bool = False
    tiled_values: bool = False
    is_conv1d: bool = False
    qkv_by_part: bool = False
    positive_decay: bool = False


def head_dim(gguf: Metadata) -> Values:
    """Return head_dim, where the file says it."""
    value = gguf.find_int("attention.key_length", 1) or gguf.find_int("rope.dimension_count", 2)
    return {} if value is None else {"head_dim": value}


def rotary_share(gguf: Metadata, head_size: int, turning: int | None = None) -> float:
    """Return the share of a head's elements that rotates; transformers multiplies it by their number and rounds
    down. turning: how many rotate, where it is not what the file says of all layers.
    """
    turning = turning or gguf.int("rope.dimension_count", 2)
    share = turning / head_size
    return share if int(share * head_size) == turning else math.nextafter(share, math.inf)


def partial_rotary(gguf: Metadata) -> Values:
    """Return rope_parameters with the share of head_dim that rotates; only for families that rotate a part."""
    size = gguf.find_int("attention.key_length", 1) or gguf.head_size
    share = rotary_share(gguf, size)
    return {"head_dim": size, "rope_parameters": {**rope_parameters(gguf), "partial_rotary_factor": share}}


def experts(
    gguf: Metadata, count: str, used: str = "num_experts_per_tok", width: str = "moe_intermediate_size"
) -> Values:
    """Return the number of experts as `count`, how many a token takes as `used`, and how wide they are as `width`."""
    num_experts, chosen = gguf.int("expert_count"), gguf.int("expert_used_count")
    router = gguf.shape("ffn_gate_inp.weight")
    if router is not None and router[0] != num_experts:
        raise FormatError(f"{gguf.arch}.expert_count is {num_experts}, but ffn_gate_inp.weight has {router[0]} rows")
    if chosen > num_experts:
        raise FormatError(f"{gguf.arch}.expert_used_count is {chosen}, but there are {num_experts} experts")
    values: Values = {count: num_experts, used: chosen}
    gate = gguf.shape("ffn_gate_exps.weight") or gguf.shape("ffn_up_exps.weight")
    if gate is not None and len(gate) < 2:
        raise FormatError(f"the experts' tensors are no matrices: their shape is {gate}")
    inner = gguf.find_int("expert_feed_forward_length", 1)
    if inner is None and gate is not None:
        inner = gate[-2]
    return values if inner is None else {**values, width: inner}


def shared_width(gguf: Metadata) -> int | None:
    """Return how wide shared experts are, all together; None without."""
    shape = gguf.shape("ffn_up_shexp.weight")
    return gguf.find_int("expert_shared_feed_forward_length", 1) or (None if shape is None else shape[0])


def gating(gguf: Metadata, default: int) -> int:
    """Return what makes weights of a router's scores: SOFTMAX or SIGMOID."""
    value = gguf.find_int("expert_gating_func") or default
    if value not in (SOFTMAX, SIGMOID):
        raise UnsupportedError(f"{gguf.arch}.expert_gating_func {value} is not supported (softmax and sigmoid are)")
    return value


def check_router(gguf: Metadata, family: GGUFFamily) -> None:
    """Raise UnsupportedError for a router that does not do what the family's class has no switch for."""
    if family.gating is not None and gating(gguf, family.gating) != family.gating:
        raise UnsupportedError(f"{gguf.arch} with this expert_gating_func is no known model; pass --model_path")
    if family.normalizes and not gguf.bool("expert_weights_norm", True):
        raise UnsupportedError(
            f"a {gguf.arch} file whose router does not normalize is no known model; pass --model_path"
        )


def clamp(gguf: Metadata, *keys: str) -> float:
    """Return the number at which MLPs clamp, the same in all layers. Raises UnsupportedError unless `keys`, those that
    the file has, say one number above 0.
    """
    found = {limit for key in keys for limit in gguf.floats(key) or ()}
    if len(found) != 1 or min(found) <= 0:
        raise UnsupportedError(
            f"{' and '.join(keys)} of a {gguf.arch} file say {sorted(found)!r:.60}: MLPs that do not clamp at one "
            "value are of no known model; pass --model_path"
        )
    return found.pop()


def routing(gguf: Metadata) -> Values:
    """Return the router's values that DeepSeek-like families share."""
    return {
        "n_shared_experts": gguf.int("expert_shared_count"),
        "first_k_dense_replace": leading_dense(gguf),
        "routed_scaling_factor": gguf.float("expert_weights_scale", 1.0),
        "norm_topk_prob": gguf.bool("expert_weights_norm", False),
        **groups(gguf),
    }


def routing_by_layer(gguf: Metadata) -> Values:
    """Return `routing` for families that say of each layer whether it has experts."""
    return {
        **{name: value for name, value in routing(gguf).items() if name != "first_k_dense_replace"},
        "mlp_layer_types": mlp_kinds(gguf),
    }


def groups(gguf: Metadata) -> Values:
    """Return into how many groups experts are divided, and in how many of them those of a token are looked for.

    Raises FormatError where a file says the one and not the other, or more groups than there are.
    """
    count, used = gguf.find_int("expert_group_count"), gguf.find_int("expert_group_used_count")
    if (count or 1) > 1 and not used:
        raise FormatError(_HALF.format(arch=gguf.arch, said="expert_group_count", missing="expert_group_used_count"))
    if (used or 1) > 1 and not count:
        raise FormatError(_HALF.format(arch=gguf.arch, said="expert_group_used_count", missing="expert_group_count"))
    if (used or 1) > (count or 1):
        raise FormatError(f"{gguf.arch}.expert_group_used_count is {used}, but there are {count} groups of experts")
    return {"n_group": count or 1, "topk_group": used or 1}


_HALF = (
    "the GGUF file says {arch}.{said} and lacks {arch}.{missing}: which experts a token takes is unknown; pass "
    "--model_path with the model's config.json"
)


def latent(gguf: Metadata, value: int | None = None) -> Values:
    """Return the sizes of DeepSeek's attention over latents. value: elements of a value, where no key says them."""
    rope_dim = gguf.int("rope.dimension_count", 0)  # 0: nothing rotates
    # Files made since absorbed MLA describe the cached latent by key_length, and the heads by key_length_mla.
    key = gguf.find_int("attention.key_length_mla", 1) or gguf.int("attention.key_length")
    value = value or gguf.find_int("attention.value_length_mla", 1) or gguf.int("attention.value_length")
    if key <= rope_dim:
        raise FormatError(f"{gguf.arch}: heads of {key} cannot hold a rotary part of {rope_dim}")
    return {
        "num_key_value_heads": gguf.int("attention.head_count"),
        "q_lora_rank": gguf.find_int("attention.q_lora_rank") or None,
        "kv_lora_rank": gguf.int("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": value,
        "attention_bias": gguf.has(r"attn_kv_a_mqa\.bias"),
    }


def indexer(gguf: Metadata) -> Values:
    """Return the sizes of DeepSeek's indexer, which chooses the positions that a token sees."""
    return {
        "index_n_heads": gguf.int("attention.indexer.head_count"),
        "index_head_dim": gguf.int("attention.indexer.key_length"),
        "index_topk": gguf.int("attention.indexer.top_k"),
    }


def indexer_kinds(gguf: Metadata) -> list[str] | None:
    """Return, by layer, whether it has an indexer ("full") or takes the choice of one before it ("shared"); None when
    the file does not say.
    """
    full = gguf.by_layer("attention.indexer.types")
    return None if full is None else ["full" if one else "shared" for one in full]


def mlp_kinds(gguf: Metadata) -> list[str]:
    """Return, by layer, whether it has experts ("sparse") or not ("dense"): the tensors say it."""
    return ["sparse" if one else "dense" for one in gguf.by_tensor("ffn_gate_inp.weight")]


def leading_dense(gguf: Metadata) -> int:
    """Return how many layers without experts stand in front of those that have them, as the tensors say."""
    kinds = mlp_kinds(gguf)
    count = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if "dense" in kinds[count:]:
        raise UnsupportedError(f"a {gguf.arch} file with a dense layer behind layers with experts is no known model")
    return count


def layer_norm(gguf: Metadata, name: str = "layer_norm_eps") -> Values:
    """Return the epsilon of norms that subtract the mean, under the family's name for it."""
    return {name: gguf.float("attention.layer_norm_epsilon")}


def granite_multipliers(gguf: Metadata) -> Values:
    """Return the factors of embeddings, attention, residuals and logits."""
    return {
        "attention_multiplier": gguf.float("attention.scale", 1.0),
        "embedding_multiplier": gguf.float("embedding_scale", 1.0),
        "residual_multiplier": gguf.float("residual_scale", 1.0),
        "logits_scaling": gguf.float("logit_scale", 1.0),
    }


def windows(gguf: Metadata, period: int, *, first_is_full: bool = False) -> Values:
    """Return sliding_window and layer_types: as the file says by layer, else the last of every `period` layers sees
    all positions, or the first.
    """
    window = gguf.find_int("attention.sliding_window", 1)
    said = gguf.by_layer("attention.sliding_window_pattern")
    if window is None:
        slides = [False] * gguf.layers
    elif said is not None:
        slides = [bool(one) for one in said]
    else:
        period = gguf.find_int("attention.sliding_window_pattern", 1) or period
        slides = [(layer + (not first_is_full)) % period != 0 for layer in range(gguf.layers)]
    kinds = ["sliding_attention" if one else "full_attention" for one in slides]
    return {"sliding_window": window, "layer_types": kinds}

"""Layers for multi-token prediction (MTP) by family: what differs, and the config of one as of a model of its own.

The usual one is made as DeepSeek-V3 has it (see engine/model/mtp.py), with full attention. What the table says besides
is taken from the reference implementations in vLLM, SGLang, FastDeploy and llama.cpp.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ktransformers.errors import ConfigError
from ktransformers.models.composite import text_config_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["MtpFamily", "mtp_config", "mtp_family", "mtp_layer_types"]

_FULL, _SLIDING, _INDEXED = "full_attention", "sliding_attention", "indexed_attention"


@dataclass(frozen=True, slots=True)
class MtpFamily:
    """How the layers for multi-token prediction of a family differ from the usual one.

    layer_type: of their attention, where neither `mtp_layer_types` nor `mtp_layers_block_type` of the config says it;
    full in a model with layers of full attention and none of that type. experts_type: of a feed-forward block of
    experts, in `mlp_layer_types`. norm: the name of the last norm in the family's class. takes_normed: whether the
    hidden states that go into them are those behind the last norm, or those in front of it. has_head: whether each has
    a head of its own. renamed: modules of the decoder layer that published files call otherwise, {theirs: ours}; ours
    are those of the family's class, and what all families' layers have besides (mtp_names.py). streams, mixer: hidden
    states are streams side by side, as many as this field of the config says, each of which is projected apart from the
    embedding; this module of the class brings them together, in front of the last norm or in its place, and hidden
    states are those in front of it. why_not: why they are not run; None: they are.
    """

    layer_type: str = _FULL
    experts_type: str = "sparse"
    norm: str = "norm"
    takes_normed: bool = True
    has_head: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    streams: str | None = None
    mixer: str | None = None
    why_not: str | None = None

    @property
    def hidden_states_at(self) -> tuple[str, bool]:
        """The module at which the target's hidden states are taken, and whether behind it or in front of it."""
        return (self.norm, self.takes_normed) if self.mixer is None else (self.mixer, False)


_USUAL = MtpFamily()
_FAMILIES: Mapping[str, MtpFamily] = {
    "deepseek_v32": MtpFamily(layer_type=_INDEXED),
    "deepseek_v4": MtpFamily(
        layer_type=_SLIDING,
        experts_type="moe",
        renamed={
            "e_proj": "fc_embedding",
            "h_proj": "fc_hidden",
            "norm": "final_layernorm",
            **{f"hc_head_{part}": f"hc_head.hc_{part}" for part in ("fn", "base", "scale")},
        },
        streams="hc_mult",
        mixer="hc_head",
    ),
    "deepseek_v41": MtpFamily(why_not="they draft a block of tokens at once (DSpark)"),
    "exaone4": MtpFamily(layer_type=_SLIDING),
    "exaone_moe": MtpFamily(layer_type=_SLIDING),
    "glm_moe_dsa": MtpFamily(layer_type=_INDEXED),
    "longcat_flash": MtpFamily(why_not="it has one attention and no experts, unlike the model's own layers"),
    "mellum": MtpFamily(layer_type=_SLIDING),
    "mimo_v2_flash": MtpFamily(layer_type=_SLIDING, renamed={"pre_mlp_layernorm": "post_attention_layernorm"}),
    "nemotron_h": MtpFamily(norm="norm_f"),
    "qwen4_exp_text": MtpFamily(layer_type=_INDEXED, streams="hc_count", mixer="hyper_connection_mixer"),
    "step3p5": MtpFamily(takes_normed=False, has_head=True),
}


def mtp_family(model_type: str) -> MtpFamily:
    """Return what is particular to the layers for multi-token prediction of `model_type`, of a text model."""
    return _FAMILIES.get(model_type, _USUAL)


def mtp_layer_types(config: PretrainedConfig, index: int = 0) -> list[str]:
    """Return the types of the decoder layers that layer `index` for multi-token prediction is made of: one, but in
    families whose decoder layers hold attention or a feed-forward block. Raises ConfigError."""
    text = text_config_of(config)
    if blocks := _names(text, "mtp_layers_block_type"):
        return blocks
    if told := _names(text, "mtp_layer_types"):
        return [told[min(index, len(told) - 1)]]
    usual, types = mtp_family(str(text.model_type)).layer_type, getattr(text, "layer_types", None) or (_FULL,)
    return [_FULL if usual not in types and _FULL in types else usual]


def _names(config: PretrainedConfig, field_name: str) -> list[str]:
    value: object = getattr(config, field_name, None) or []
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"the model's config says {field_name} {value!r:.60}; a list of names is needed")
    return [str(one) for one in value]


def mtp_config(config: PretrainedConfig, *, has_experts: bool, index: int = 0) -> PretrainedConfig:
    """Return the config of a model that is layer `index` for multi-token prediction of the model of `config`, with a
    feed-forward block of experts or without."""
    made, types = copy.deepcopy(text_config_of(config)), mtp_layer_types(config, index)
    wanted = {
        "layer_types": types,
        "mlp_layer_types": [mtp_family(str(made.model_type)).experts_type if has_experts else "dense"],
        "indexer_types": ["full"],
        "first_k_dense_replace": 0 if has_experts else 1,
        "mlp_only_layers": [] if has_experts else [0],
        "decoder_sparse_step": 1,
        "moe_layer_start_index": 0 if has_experts else 1,
        "moe_layer_end_index": 0,
        "moe_layer_interval": 1,
        "num_nextn_predict_layers": 0,
        "ple_layer_ids": [],
    }
    for name, value in wanted.items():
        if getattr(made, name, None) is not None:
            setattr(made, name, value)
    for name in ("swiglu_limits", "swiglu_limits_shared"):  # of the model's own layers
        if getattr(made, name, None) is not None:
            setattr(made, name, None)
    if (heads := getattr(made, "num_sliding_attention_heads", None)) is not None:
        made.per_layer_config = {0: {"num_attention_heads": heads}} if types == [_SLIDING] else {}
    made.num_hidden_layers = len(types)
    made.tie_word_embeddings = False  # its head is a placeholder, or one of its own
    return made

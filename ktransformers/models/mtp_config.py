"""The config of a model's layer for multi-token prediction (MTP), as of a model of one layer."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from ktransformers.models.composite import text_config_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["mtp_config"]


def mtp_config(config: PretrainedConfig, *, has_experts: bool) -> PretrainedConfig:
    """Return the config of a model of one layer, which is as the family's layers for multi-token prediction are: with
    full attention, unless the config says otherwise."""
    made = copy.deepcopy(text_config_of(config))
    own: dict[str, list[str] | None] = {
        name: getattr(made, f"mtp_{name}", None) for name in ("layer_types", "mlp_layer_types")
    }
    wanted = {
        "layer_types": list(own["layer_types"] or ["full_attention"])[:1],
        "mlp_layer_types": list(own["mlp_layer_types"] or ["sparse" if has_experts else "dense"])[:1],
        "first_k_dense_replace": 0 if has_experts else 1,
        "mlp_only_layers": [] if has_experts else [0],
        "decoder_sparse_step": 1,
        "num_nextn_predict_layers": 0,
    }
    for name, value in wanted.items():
        if getattr(made, name, None) is not None:
            setattr(made, name, value)
    made.num_hidden_layers = 1
    made.tie_word_embeddings = False  # its head is a placeholder
    return made

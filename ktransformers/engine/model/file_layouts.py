"""Recurrent layers arranged as a GGUF file holds them, so that no block of its numbers has to be taken apart.

What a file decides is noted in the config, from which skeleton and twin are built alike:

    Qwen3-Next   a module's one projection is two tensors of two types: the module is that of Qwen3.5, which has two
    Qwen3.5      blocks of 256 columns hold two heads of values in the file's order: inputs are brought into it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ktransformers.kernels.types import block_size
from ktransformers.models.facts import ModelFacts
from ktransformers.operators.linear.tiled import TiledInput

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from ktransformers.weights.gguf.file import GGUFModel

__all__ = ["arrange", "note_layout"]

_NOTE = "kt_file_layout"


def note_layout(hf_config: PretrainedConfig, facts: ModelFacts, gguf: GGUFModel) -> None:
    """Note in `hf_config` how the file holds layers, where modules have to differ for it."""
    delta = facts.delta
    if delta is None:
        return
    is_split = "blk.0.attn_qkv.weight" in gguf.tensors and gguf.architecture == "qwen3next"
    tiled = []
    if gguf.architecture in ("qwen35", "qwen35moe") and delta.key_heads != delta.value_heads:
        for layer in range(facts.num_layers):
            stored = gguf.tensors.get(f"blk.{layer}.ssm_out.weight")
            if stored is not None and delta.value_dim % block_size(stored.qtype):
                tiled.append(layer)
    setattr(hf_config, _NOTE, {"is_split": is_split, "tiled": tiled})


def arrange(model: PreTrainedModel, hf_config: PretrainedConfig) -> None:
    """Arrange `model`, just built on meta, as `note_layout` noted."""
    note: Mapping[str, Any] = getattr(hf_config, _NOTE, None) or {}
    for parent in list(model.modules()):
        mixer: Any = parent._modules.get("linear_attn")
        if mixer is None:
            continue
        if note.get("is_split") and hasattr(mixer, "in_proj_qkvz"):
            from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

            parent.linear_attn = Qwen3_5MoeGatedDeltaNet(hf_config, mixer.layer_idx)
        if mixer.layer_idx in note.get("tiled", ()):
            mixer.out_proj = TiledInput(mixer.out_proj, mixer.num_k_heads, mixer.head_v_dim)

"""Writes the tower of a tiny composite as Ollama's converter does: in the model's own file, beside the language model.

Names are made as that converter makes them: of the names in the checkpoint, by replacing words in them from left to
right, the first of the list that fits (its `Replacements`). What it writes besides is derived by hand here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch
from transformers import PreTrainedModel

from tests.support.gguf.keys import add_keys

__all__ = ["ARCH_OF", "write_ollama"]

ARCH_OF = {
    "gemma3": "gemma3",
    "qwen2_5_vl": "qwen25vl",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
    "llama4": "llama4",
    "mistral3": "mistral3",
}
_QWEN = {"visual": "v", "blocks": "blk", "attn.proj": "attn_out", "norm1": "ln1", "norm2": "ln2"}
_MLP = {"mlp.down_proj": "ffn_down", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
_LLAMA = {
    "model.layers": "blk", "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_WORDS: Mapping[str, Mapping[str, str]] = {
    "gemma3": {
        "vision_tower.vision_model.embeddings": "v", "vision_tower.vision_model": "v", "encoder.layers": "blk",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_output", "input_projection_weight": "input_projection.weight",
        "multi_modal_projector": "mm",
    },
    "qwen2_5_vl": {**_MLP, **_QWEN},
    "qwen3_vl": {
        "model.visual": "v", "patch_embed.proj": "patch_embd", "pos_embed": "position_embd", "attn.qkv": "attn_qkv",
        "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down", "deepstack_merger_list": "deepstack", **_QWEN,
    },
    "llama4": {
        **_LLAMA, "vision_model": "v", "multi_modal_projector": "mm", "patch_embedding.linear": "patch_embedding",
    },
    "mistral3": {
        "transformer.layers": "blk", "vision_tower": "v", "ln_pre": "encoder_norm", "attention.q_proj": "attn_q",
        "attention.k_proj": "attn_k", "attention.v_proj": "attn_v", "attention.o_proj": "attn_output",
        "attention_norm": "attn_norm", "feed_forward.gate_proj": "ffn_gate", "feed_forward.down_proj": "ffn_down",
        "feed_forward.up_proj": "ffn_up", "multi_modal_projector": "mm",
    },
}  # fmt: skip


def write_ollama(path: Path, model: PreTrainedModel, name: str, folder: Path, text: Path | None = None) -> Path:
    """Write the tower of `model`, which is saved in `folder`, behind the tensors of the GGUF `text`; None: behind
    none. name: of its family."""
    arch = ARCH_OF[name]
    writer = gguf.GGUFWriter(path, arch)
    values = {f"{arch}.{key}": value for key, value in _values(model, name).items()}
    if text is not None:
        reader = gguf.GGUFReader(text)
        for field in reader.fields.values():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                key = field.name.replace("qwen2vl.", "qwen25vl.")
                values.pop(key, None)
                kinds = field.types
                writer.add_key_value(key, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    add_keys(writer, values)
    for theirs, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        for ours, part in _tensors(theirs, tensor, name):
            writer.add_tensor(ours, part.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _values(model: PreTrainedModel, name: str) -> dict[str, Any]:
    config, vision = model.config, model.config.vision_config
    found: dict[str, Any] = {
        "embedding_length": config.text_config.hidden_size,
        "vision.embedding_length": vision.hidden_size,
        "vision.patch_size": vision.patch_size,
        "vision.num_channels": 3,
        "vision.block_count": vision.depth if hasattr(vision, "depth") else vision.num_hidden_layers,
        "vision.attention.head_count": vision.num_heads if hasattr(vision, "num_heads") else vision.num_attention_heads,
    }
    if hasattr(vision, "image_size"):
        found |= {"vision.image_size": vision.image_size, "vision.feed_forward_length": vision.intermediate_size}
    if name == "gemma3":
        found |= {"mm.tokens_per_image": config.mm_tokens_per_image, "vision.attention.layer_norm_epsilon": 1e-6}
    if name == "llama4":
        found |= {"vision.layer_norm_epsilon": float(vision.norm_eps), "vision.rope.freq_base": 10000.0}
        found["vision.pixel_shuffle_ratio"] = float(vision.pixel_shuffle_ratio)
    if name == "mistral3":
        found |= {"vision.attention.key_length": vision.head_dim, "spatial_merge_size": config.spatial_merge_size}
        found["mm.projector_bias"] = bool(config.multimodal_projector_bias)
    if name.startswith("qwen"):
        found["vision.spatial_merge_size"] = vision.spatial_merge_size
        found["vision.attention.layer_norm_epsilon"] = 1e-6
    if name == "qwen2_5_vl":
        found |= {"vision.window_size": vision.window_size, "vision.temporal_patch_size": 2}
        found["vision.fullatt_block_indexes"] = list(vision.fullatt_block_indexes)
    if name.startswith("qwen3"):
        found["vision.deepstack_visual_indexes"] = list(vision.deepstack_visual_indexes)
        found |= {"vision.shortest_edge": 65536, "vision.longest_edge": 1 << 24, "vision.image_mean": [0.5] * 3}
    return found


def _tensors(name: str, values: torch.Tensor, family: str) -> Iterator[tuple[str, torch.Tensor]]:
    name = _published(name)
    made = _replaced(name, _WORDS["qwen3_vl" if family.startswith("qwen3") else family])
    if not made.startswith(("v.", "mm.")):
        return
    is_patch = values.dim() == 5
    if family == "qwen2_5_vl" and is_patch:
        for frame in (0, 1):
            yield made.replace("patch_embed.proj", f"patch_embd_{frame}"), values[:, :, frame]
    elif is_patch:
        yield made, values.flatten(0, 1)
    elif "attn.qkv" in made or "attn_qkv" in made:
        for letter, part in zip("qkv", values.chunk(3), strict=True):
            yield made.replace("attn.qkv", f"attn_{letter}").replace("attn_qkv", f"attn_{letter}"), part
    else:
        yield made, values + 1 if made.endswith("soft_emb_norm.weight") else values


def _published(name: str) -> str:
    """A name as the published checkpoint has it, of one that transformers saves."""
    for old, new in (
        ("vision_tower.embeddings", "vision_tower.vision_model.embeddings"),
        ("vision_tower.encoder", "vision_tower.vision_model.encoder"),
        ("vision_tower.post_layernorm", "vision_tower.vision_model.post_layernorm"),
    ):
        name = name.replace(old, new)
    return name


def _replaced(name: str, words: Mapping[str, str]) -> str:
    made, at = "", 0
    while at < len(name):
        found = next((word for word in words if name.startswith(word, at)), None)
        made += name[at] if found is None else words[found]
        at += 1 if found is None else len(found)
    return made

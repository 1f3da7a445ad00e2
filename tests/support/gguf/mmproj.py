"""Writes the tower of a tiny composite as llama.cpp's converter does: its projector file, as the tests' oracle.

Names are those of the `gguf` package for the names that transformers saves; what the converter does to tensors is
derived by hand here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import safetensors.torch
import torch
from transformers import PreTrainedModel

from tests.support.gguf.keys import add_keys

PROJECTOR_OF = {
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_vl_moe": "qwen3vl_merger",
    "qwen3_5_moe": "qwen3vl_merger",
    "gemma3": "gemma3",
    "llama4": "llama4",
    "mistral3": "pixtral",
    "internvl": "internvl",
    "kimi_k25": "kimik25",
    "glm4v_moe": "glm4v",
    "glm5_next": "glm5v",
    "idefics3": "idefics3",
    "gemma4": "gemma4v",
    "minimax_m3_vl": "minimax_m3",
    "lfm2_vl": "lfm2",
}
_NAMES = (  # of transformers 5, and as the converter knows them
    (r"^model\.(visual|mm_projector)\.", r"\1."),
    (r"^vision_tower\.(embeddings\.p|encoder\.layers|post_layernorm)", r"vision_tower.vision_model.\1"),
    (
        r"^vision_tower\.vision_model\.(embeddings\.patch_embeddings|embeddings\.position_embeddings)",
        r"model.vision_tower.\1",
    ),
    (r"^vision_tower\.(encoder\.layer\.|embeddings\.cls_token)", r"model.vision_tower.\1"),
    (r"^vision_tower\.encoder\.patch_embed", "vision_tower.patch_embed"),
    (r"^mm_projector\.proj\.0", "mm_projector.proj.linear_1"),
    (r"^mm_projector\.proj\.2", "mm_projector.proj.linear_2"),
)
_NAMES_OF = {
    "gemma4": (
        (r"^model\.vision_tower\.encoder\.", "vision_model.model."),
        (r"\.linear\.", "."),
        (r"position_embedding_table$", r"\g<0>.weight"),
    ),
    "lfm2_vl": (
        (r"^model\.(multi_modal_projector)", r"\1"),
        (r"^model\.vision_tower\.", "vision_tower.vision_model."),
    ),
    "minimax_m3_vl": ((r"^patch_merge_mlp\.linear_([12])", r"mm.merger.fc\1"),),
}
_EPS = ("layer_norm_eps", "norm_eps", "rms_norm_eps")
_LISTED = {"internvl": {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}}


def write_mmproj(path: Path, model: PreTrainedModel, name: str, folder: Path) -> None:
    """Write the tower of `model`, which is saved in `folder`, to `path` in F32. name: of its family."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    add_keys(writer, _metadata(model, name))
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 64)
    for theirs, values in stored.items():
        if ".vision_tower.head." in f".{theirs}":  # of SigLIP in transformers 5.17, which no composite runs
            continue
        for ours, tensor in _tensors(theirs, values, model, name, names):
            writer.add_tensor(ours, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(model: PreTrainedModel, name: str) -> dict[str, Any]:
    config, vision = model.config, model.config.vision_config
    is_silu = name in ("qwen2_5_vl", "glm4v_moe", "glm5_next")
    found: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.vision.projector_type" if name == "gemma4" else "clip.projector_type": PROJECTOR_OF[name],
        "clip.use_gelu": not is_silu,
        "clip.use_silu": is_silu,
    }
    patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    size = getattr(vision, "image_size", 560)
    depth = vision.depth if hasattr(vision, "depth") else vision.num_hidden_layers
    eps = next((getattr(vision, key) for key in _EPS if hasattr(vision, key)), 1e-6)
    values: dict[str, Any] = {
        "image_size": size if isinstance(size, int) else size[0],
        "patch_size": patch,
        "embedding_length": vision.embed_dim if name == "qwen2_vl" else vision.hidden_size,
        "feed_forward_length": vision.hidden_size if name == "qwen2_vl" else vision.intermediate_size,
        "projection_dim": config.text_config.hidden_size,
        "block_count": depth,
        "attention.head_count": vision.num_heads if hasattr(vision, "num_heads") else vision.num_attention_heads,
        "attention.layer_norm_epsilon": float(eps),
        "image_mean": [0.5, 0.25, 0.125],
        "image_std": [0.5, 0.25, 0.75],
    }
    if name == "kimi_k25":
        values |= {"projector.scale_factor": 2, "attention.layer_norm_epsilon": config.projection_layer_norm_eps}
    if name == "gemma3":
        values["projector.scale_factor"] = values["image_size"] // patch // int(config.mm_tokens_per_image**0.5)
    if name in ("llama4", "internvl", "idefics3", "lfm2_vl"):
        values["projector.scale_factor"] = 2
    if name in ("mistral3", "glm5_next", "minimax_m3_vl") or name.startswith("qwen3"):
        values["spatial_merge_size"] = 2
    if name == "qwen2_5_vl":
        values["n_wa_pattern"] = vision.fullatt_block_indexes[0] + 1
    if name.startswith("qwen3_vl"):
        values["is_deepstack_layers"] = [index in vision.deepstack_visual_indexes for index in range(depth)]
    if name == "idefics3":
        values["preproc_image_size"] = 2 * values["image_size"]
    if name == "glm5_next":
        values |= {"swiglu_clamp": vision.swiglu_limit, "image_min_pixels": 16 * 784, "image_max_pixels": 64 * 784}
    return found | {f"clip.vision.{key}": value for key, value in values.items()}


def _tensors(
    name: str, values: torch.Tensor, model: PreTrainedModel, family: str, names: gguf.TensorNameMap
) -> Iterator[tuple[str, torch.Tensor]]:
    vision = model.config.vision_config
    for pattern, now in _NAMES_OF.get(family, _NAMES):
        name = re.sub(pattern, now, name)
    if re.search(r"language_model|text_model|^model\.(layers|embed_tokens|norm)|^lm_head", name):
        return
    module = name.removeprefix("multi_modal_projector.").rpartition(".")[0]
    if module in _LISTED.get(family, {}):
        name = f"{_LISTED[family][module]}.{name.rpartition('.')[2]}"
    heads = vision.num_heads if hasattr(vision, "num_heads") else vision.num_attention_heads
    if (deep := re.match(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)\.(\w+)", name)) is not None:
        index = vision.deepstack_visual_indexes[int(deep[1])]
        yield f"v.deepstack.{index}.{deep[2]}.{deep[3]}", values
    elif values.dim() == 5:
        yield "v.patch_embd.weight", values[:, :, 0]
        yield "v.patch_embd.weight.1", values[:, :, 1]
    elif name.startswith("visual.merger.") and family.startswith("qwen3"):
        module, kind = name.split(".")[2:]
        yield {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}[module] + f".{kind}", values
    elif ".attn.qkv." in name and family in ("qwen2_vl", "qwen2_5_vl"):
        for letter, part in zip("qkv", values.chunk(3), strict=True):
            yield _named(names, name.replace("qkv", letter)), part
    elif "wqkv" in name:
        q, k, v = values.chunk(3)
        yield _named(names, name), torch.cat([_by_axis(q, heads), _by_axis(k, heads), v])
    elif family == "mistral3" and re.search(r"\.[qk]_proj\.", name):
        halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        yield _named(names, name), halves.transpose(1, 2).reshape(values.shape)
    elif family == "minimax_m3_vl" and re.search(r"\.[qk]_proj\.", name):  # one axis behind the other, not interleaved
        axis = len(values) // heads // 2 * 2 // 3 // 2  # a half of the rows that turn with one of three axes
        per_head = values.reshape(heads, -1, *values.shape[1:])
        turning = per_head[:, : 6 * axis].unflatten(1, (2, 3, axis)).transpose(1, 2).flatten(1, 3)
        yield _named(names, name), torch.cat([turning, per_head[:, 6 * axis :]], 1).reshape(values.shape)
    elif name.startswith("mm.merger."):
        yield name, values
    elif family in ("gemma4", "lfm2_vl") and re.search(r"patch_embedd(er\.input_proj|ing)\.weight", name):
        side = int((values.shape[1] // 3) ** 0.5)
        yield "v.patch_embd.weight", values.unflatten(1, (side, side, 3)).permute(0, 3, 1, 2)  # channels first
    elif "multi_modal_projector.linear_1" in name and family == "llama4":
        yield "mm.model.fc.weight", values
    else:
        values = values + 1 if "soft_emb_norm" in name else values
        yield _named(names, re.sub(r"_weight$", ".weight", name)), values


def _by_axis(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head: pairs of one axis of the rotation behind those of the other, which were in turn."""
    turns = rows.reshape(heads, -1, 2, 2, *rows.shape[1:])
    return turns.transpose(1, 2).reshape(rows.shape)


def _named(names: gguf.TensorNameMap, name: str) -> str:
    if any(part in name for part in ("lambda_", "position_embeddings", "positional_embedding_vlm")):
        name += ".weight"
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found

"""Tiny models with a layer for multi-token prediction, in the names of published checkpoints, and transformers' own
module of that layer as the oracle."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.support.gguf.newer import write_newer
from tests.support.gguf.recurrent import write_recurrent_gguf
from tests.support.gguf.writer import write_gguf
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import random_model, tiny_model, write_safetensors

__all__ = [
    "GGUF_MTP_TYPES",
    "MTP_TYPES",
    "TinyMtp",
    "stored_mtp",
    "tiny_mtp",
    "write_mtp",
    "write_mtp_gguf",
    "write_prediction_gguf",
]

GGUF_MTP_TYPES = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe_text")
MTP_TYPES = (*GGUF_MTP_TYPES, "qwen3_moe")
"""The last one without names for it in a GGUF."""

_OF_TOP = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}


@dataclass
class TinyMtp:
    """main: the model. mtp: transformers' module of its layer. layer: that decoder layer and its norm, as the only ones
    of a model. All are in fp32."""

    main: PreTrainedModel
    mtp: Any
    layer: PreTrainedModel

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> list[torch.Tensor]:
        """Logits [V] of the next tokens but one, ..., each behind the likeliest one before: of a sequence whose last
        token the main model has sampled and not computed."""
        base: Any = self.main.model
        hidden = base(torch.tensor([token_ids[:-1]])).last_hidden_state
        known, found = list(token_ids[1:]), list[torch.Tensor]()
        for _ in range(count):
            ids = torch.tensor([known])
            positions = torch.arange(len(known))[None]
            behind = self.mtp.forward_layer(0, hidden, positions, None, input_ids=ids)
            found.append(self.main.lm_head(behind[0, -1]))
            known.append(int(found[-1].argmax()))
            hidden = torch.cat([hidden, behind[:, -1:]], dim=1)
        return found


def _one_layer(config: PretrainedConfig, *, is_dense: bool) -> PretrainedConfig:
    made: Any = copy.deepcopy(config)
    made.num_hidden_layers, made.num_mtp_layers = 1, 1
    if getattr(made, "layer_types", None) is not None:
        made.layer_types = made.mtp_layer_types = ["full_attention"]
    if hasattr(made, "first_k_dense_replace"):
        made.first_k_dense_replace = 0
    if is_dense:
        made.mlp_only_layers = [0]
    return made  # type: ignore[no-any-return]


def tiny_mtp(model_type: str, seed: int = 0, *, is_dense: bool = False, **values: object) -> TinyMtp:
    """A tiny model of one of MTP_TYPES with such a layer. is_dense: of Qwen's, that this has no experts. values: of its
    config, of those without recurrent layers."""
    is_recurrent = model_type in ("qwen3_next", "qwen3_5_moe_text")
    main = recurrent_model(model_type) if is_recurrent else tiny_model(model_type, seed, **values)
    layer = random_model(_one_layer(main.config, is_dense=is_dense), seed + 1)
    mtp: Any = MtpModel(layer, 1).float().eval()
    mtp.tie_with_main_model(main)
    block: Any = mtp.layers[0]
    block.mtp_block.load_state_dict(layer.model.layers[0].state_dict())
    block.post_norm.load_state_dict(layer.model.norm.state_dict())
    generator = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        for norm in (block.enorm, block.hnorm):
            norm.weight.copy_(1 + 0.1 * torch.randn(norm.weight.shape, generator=generator))
        size = block.eh_proj.weight.shape
        block.eh_proj.weight.copy_(torch.randn(size, generator=generator) * size[1] ** -0.5)
    return TinyMtp(main, mtp, layer)


def stored_mtp(main: PreTrainedModel, stored: Mapping[str, torch.Tensor]) -> TinyMtp:
    """A model, and its layer without experts from tensors in the names of Qwen's checkpoints."""
    layer = random_model(_one_layer(main.config, is_dense=True), 0)
    mtp: Any = MtpModel(layer, 1).float().eval()
    mtp.tie_with_main_model(main)
    block: Any = mtp.layers[0]
    prefixes = {"mtp.layers.0.": "mtp_block.", "mtp.norm.": "post_norm."}
    prefixes |= {f"mtp.{theirs}.": f"{ours}." for theirs, ours in _OF_TOP.items()}
    renamed = {
        ours + name.removeprefix(theirs): tensor
        for name, tensor in stored.items()
        for theirs, ours in prefixes.items()
        if name.startswith(theirs)
    }
    block.load_state_dict(renamed)
    return TinyMtp(main, mtp, layer)


def write_mtp(tiny: TinyMtp, folder: Path) -> Path:
    """Write both as one checkpoint, in the family's names."""
    write_safetensors(tiny.main, folder)
    config_file = folder / "config.json"
    values = json.loads(config_file.read_text())
    values["num_nextn_predict_layers"] = 1
    config_file.write_text(json.dumps(values))
    write_safetensors(tiny.layer, folder / "layer")
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    count, block = tiny.main.config.num_hidden_layers, tiny.mtp.layers[0]
    is_apart = tiny.main.config.model_type.startswith("qwen3_")
    for name, tensor in safetensors.torch.load_file(folder / "layer" / "model.safetensors").items():
        if name.startswith("model.layers.0."):
            inner = name.removeprefix("model.layers.0.")
            stored[f"mtp.layers.0.{inner}" if is_apart else f"model.layers.{count}.{inner}"] = tensor
        elif name.startswith("model.norm."):
            stored["mtp.norm.weight" if is_apart else f"model.layers.{count}.shared_head.norm.weight"] = tensor
    for theirs, ours in _OF_TOP.items():
        weight = getattr(block, ours).weight.detach().clone()
        stored[f"mtp.{theirs}.weight" if is_apart else f"model.layers.{count}.{ours}.weight"] = weight
    if not is_apart:  # copies of the model's own
        stored[f"model.layers.{count}.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        stored[f"model.layers.{count}.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    safetensors.torch.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_mtp_gguf(tiny: TinyMtp, path: Path) -> Path:
    """Write both as one GGUF, as llama.cpp's converter does: the layer is a block behind the model's own."""
    return write_prediction_gguf(tiny.main, [(tiny.layer, tiny.mtp.layers[0])], path)


NEWER_ARCHS = {"bailing_hybrid": "bailingmoe3", "deepseek_v32": "deepseek32", "hy_v3": "hy_v3"}
"""Model types whose files the `gguf` package has no names for."""


def write_prediction_gguf(
    main: PreTrainedModel,
    layers: Sequence[tuple[PreTrainedModel, Any]],
    path: Path,
    norm: str = "nextn.shared_head_norm",
) -> Path:
    """Write a model as one GGUF with its layers for multi-token prediction, each a model with what has the parts that
    make its input. norm: what the file calls their last norms. Two decoder layers of one are one block."""
    kind = main.config.model_type
    write: Callable[[PreTrainedModel, Path], Path] = write_gguf
    if kind.startswith("qwen3_") or kind == "nemotron_h":
        write = write_recurrent_gguf
    elif kind in NEWER_ARCHS:
        write = partial(write_newer, arch=NEWER_ARCHS[kind])
    model, *others = (
        gguf.GGUFReader(write(one, path.with_suffix(f".{i}.gguf")))
        for i, one in enumerate((main, *(layer for layer, _ in layers)))
    )
    arch, count = model.fields["general.architecture"].contents(), main.config.num_hidden_layers
    writer = gguf.GGUFWriter(path, arch)
    for field in model.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value: Any = field.contents()
        if field.name == f"{arch}.block_count":
            value = count + len(layers)
        elif isinstance(value, list) and len(value) == count:  # by layer
            told = [one.fields[field.name].contents() if field.name in one.fields else value[-1] for one in others]
            value = [*value, *(max(one) if isinstance(one, list) else one for one in told)]
        writer.add_key_value(field.name, value, field.types[0], field.types[1] if len(field.types) > 1 else None)
    writer.add_nextn_predict_layers(len(layers))
    for tensor in model.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for number, (one, (_, parts)) in enumerate(zip(others, layers, strict=True), count):
        for tensor in one.tensors:
            name = tensor.name.replace("blk.1.attn_norm.", f"blk.{number}.post_attention_norm.")
            name = re.sub(r"^blk\.[01]\.", f"blk.{number}.", name).replace("output_norm.", f"blk.{number}.{norm}.")
            if name.startswith("blk."):
                writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        for part in ("eh_proj", "enorm", "hnorm"):
            values = getattr(parts, part).weight.detach().numpy().copy()
            is_plus_one = kind.startswith("qwen3_") and "norm" in part
            writer.add_tensor(f"blk.{number}.nextn.{part}.weight", values + 1 if is_plus_one else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

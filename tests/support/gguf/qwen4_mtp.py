"""A tiny Qwen4 with its layer for multi-token prediction, in the names of the published checkpoint and of llama.cpp's
converter. The oracle is written here, of torch and of a model of transformers that is one such layer, after vLLM's
implementation: streams go in, and the embedding is added to each of them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.support.gguf.qwen4 import layer_tensors, write_qwen4_gguf
from tests.support.gguf.stream_mtp import StreamLayer, StreamMtp
from tests.support.models.pooled_models import pooled_model
from tests.support.models.tiny_models import write_safetensors

__all__ = ["tiny_qwen4_mtp", "write_qwen4_mtp", "write_qwen4_mtp_gguf"]


class _Layer(StreamLayer):
    """Norms, projections and a decoder layer with its mixer."""

    mixer = "hyper_connection_mixer"

    def __init__(self, model: PreTrainedModel, generator: torch.Generator):
        super().__init__()
        config: Any = model.config
        self.model, self.streams, size = model, config.hc_count, config.hidden_size
        norm = type(model.model.layers[0].self_attn.q_norm)
        self.enorm, self.hnorm = norm(size, eps=config.rms_norm_eps), norm(size * self.streams, eps=config.rms_norm_eps)
        self.fc_embedding, self.fc_hidden = (nn.Linear(size, size, bias=False) for _ in range(2))
        with torch.no_grad():
            for each in (self.enorm, self.hnorm):
                each.weight.copy_((torch.randn(each.weight.shape, generator=generator) * 102).round() / 1024)
            for each in (self.fc_embedding, self.fc_hidden):
                each.weight.copy_(torch.randn(each.weight.shape, generator=generator) * size**-0.5)

    def joined(self, embeddings: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """[1, T, H] and [1, T, N H] -> [1, T, N H]."""
        by_stream = self.hnorm(streams).view(*streams.shape[:-1], self.streams, -1)
        made: torch.Tensor = self.fc_hidden(by_stream) + self.fc_embedding(self.enorm(embeddings))[:, :, None]
        return made.flatten(2)


def tiny_qwen4_mtp(**values: object) -> StreamMtp:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    main = pooled_model(
        "qwen4_exp_text", ple_layer_ids=[3], rope_parameters={**rope, "mrope_interleaved": True}, **values
    )
    one = {"num_hidden_layers": 1, "layer_types": ["indexed_attention"], "ple_layer_ids": None}
    layer = pooled_model("qwen4_exp_text", seed=11, rope_parameters=copy.deepcopy(rope), **{**values, **one})
    return StreamMtp(main, _Layer(layer, torch.Generator().manual_seed(5)).eval())


_TOP = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "fc_embedding": "fc_embedding",
    "fc_hidden": "fc_hidden",
}


def write_qwen4_mtp(tiny: StreamMtp, folder: Path) -> Path:
    """Write both as one checkpoint."""
    write_safetensors(tiny.main, folder)
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    write_safetensors(tiny.layer.model, folder / "layer")
    for name, tensor in safetensors.torch.load_file(folder / "layer" / "model.safetensors").items():
        rest = name.removeprefix("model.")
        if rest.startswith(("layers.", "hyper_connection_mixer.")):
            stored[f"mtp.{rest}"] = tensor
    for ours, theirs in _TOP.items():
        stored[f"mtp.{theirs}.weight"] = getattr(tiny.layer, ours).weight.detach().clone()
    safetensors.torch.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_qwen4_mtp_gguf(tiny: StreamMtp, path: Path) -> Path:
    """Write both as one GGUF, as llama.cpp's converter does: a block behind the model's own."""
    behind, layer = f"blk.{tiny.main.config.num_hidden_layers}.", tiny.layer
    found: dict[str, np.ndarray] = {}
    for name, values in layer_tensors(layer.model):
        if name.startswith("blk.0."):
            found[behind + name.removeprefix("blk.0.")] = values
        elif name.startswith("output_hc_"):
            found[f"{behind}nextn.hc_head_{name.removeprefix('output_hc_')}"] = values
    for part in ("enorm", "hnorm"):
        found[f"{behind}nextn.{part}.weight"] = getattr(layer, part).weight.detach().numpy() + 1
    halves = [part.weight.detach().numpy() for part in (layer.fc_embedding, layer.fc_hidden)]
    found[f"{behind}nextn.eh_proj.weight"] = np.concatenate(halves, axis=1)
    return write_qwen4_gguf(tiny.main, path, prediction=found)

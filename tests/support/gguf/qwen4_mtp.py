"""A tiny Qwen4 with its layer for multi-token prediction, in the names of the published checkpoint and of llama.cpp's
converter. The oracle is written here, of torch and of a model of transformers that is one such layer, after vLLM's
implementation: streams go in, and the embedding is added to each of them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.support.gguf.qwen4 import layer_tensors, write_qwen4_gguf
from tests.support.models.pooled_models import pooled_model
from tests.support.models.tiny_models import write_safetensors

__all__ = ["Qwen4Mtp", "tiny_qwen4_mtp", "write_qwen4_mtp", "write_qwen4_mtp_gguf"]


class _Layer(nn.Module):
    """Norms, projections and a decoder layer with its mixer."""

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

    def forward(self, embeddings: torch.Tensor, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, T, H] and [1, T, N H] -> hidden states behind the mixer, and streams in front of it."""
        by_stream = self.hnorm(streams).view(*streams.shape[:-1], self.streams, -1)
        joined = self.fc_hidden(by_stream) + self.fc_embedding(self.enorm(embeddings))[:, :, None]
        base: Any = self.model.model
        seen: list[torch.Tensor] = []
        hooks = [
            base.layers[0].register_forward_pre_hook(lambda module, args: (joined.flatten(2), *args[1:])),
            base.hyper_connection_mixer.register_forward_pre_hook(lambda module, args: seen.append(args[0])),
        ]
        normed = base(inputs_embeds=embeddings).last_hidden_state
        for hook in hooks:
            hook.remove()
        return normed, seen[0]


@dataclass
class Qwen4Mtp:
    """main: the model. layer: for multi-token prediction. Both are in fp32."""

    main: PreTrainedModel
    layer: _Layer

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> list[torch.Tensor]:
        """Logits [V] of the next tokens but one, ..., each behind the likeliest one before: of a sequence whose last
        token the main model has sampled and not computed."""
        base: Any = self.main.model
        states: list[torch.Tensor] = []
        hook = base.hyper_connection_mixer.register_forward_pre_hook(lambda module, args: states.append(args[0]))
        base(torch.tensor([token_ids[:-1]]))
        hook.remove()
        hidden, known, found = states[0], list(token_ids[1:]), list[torch.Tensor]()
        for _ in range(count):
            normed, behind = self.layer(base.embed_tokens(torch.tensor([known])), hidden)
            found.append(self.main.lm_head(normed[0, -1]))
            known.append(int(found[-1].argmax()))
            hidden = torch.cat([hidden, behind[:, -1:]], dim=1)
        return found


def tiny_qwen4_mtp(**values: object) -> Qwen4Mtp:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    main = pooled_model(
        "qwen4_exp_text", ple_layer_ids=[3], rope_parameters={**rope, "mrope_interleaved": True}, **values
    )
    one = {"num_hidden_layers": 1, "layer_types": ["indexed_attention"], "ple_layer_ids": None}
    layer = pooled_model("qwen4_exp_text", seed=11, rope_parameters=copy.deepcopy(rope), **{**values, **one})
    return Qwen4Mtp(main, _Layer(layer, torch.Generator().manual_seed(5)).eval())


_TOP = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "fc_embedding": "fc_embedding",
    "fc_hidden": "fc_hidden",
}


def write_qwen4_mtp(tiny: Qwen4Mtp, folder: Path) -> Path:
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


def write_qwen4_mtp_gguf(tiny: Qwen4Mtp, path: Path) -> Path:
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

"""A tiny DeepSeek-V4 with its layer for multi-token prediction, in the names of the published checkpoint and of GGUF
files that hold it. The oracle is written here, of torch and of a model of transformers that is one such layer, after
DeepSeek's own inference code: all streams go in and come out, and the embedding is added to each of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.support.gguf.deepseek4 import DEEPSEEK4_RATES, DEEPSEEK4_YARN, layer_tensors, write_deepseek4_gguf
from tests.support.gguf.stream_mtp import StreamLayer, StreamMtp
from tests.support.models.fp8_models import BLOCK, published_matrix, published_tensors, save_published
from tests.support.models.tiny_models import tiny_model, write_safetensors

__all__ = ["tiny_deepseek4_mtp", "write_deepseek4_mtp", "write_deepseek4_mtp_gguf"]

_KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


class _Layer(StreamLayer):
    """Norms, projections, and a model that is a decoder layer, what brings streams together, and a norm."""

    mixer = "hc_head"

    def __init__(self, model: PreTrainedModel, generator: torch.Generator):
        super().__init__()
        size = model.config.hidden_size
        self.model = model
        self.enorm, self.hnorm = (nn.RMSNorm(size, eps=model.config.rms_norm_eps) for _ in range(2))
        self.e_proj, self.h_proj = (nn.Linear(size, size, bias=False) for _ in range(2))
        with torch.no_grad():
            for each in (self.enorm, self.hnorm):
                each.weight.copy_(1 + 0.1 * torch.randn(size, generator=generator))
            for each in (self.e_proj, self.h_proj):
                each.weight.copy_(torch.randn(each.weight.shape, generator=generator) * size**-0.5)

    def joined(self, embeddings: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """[1, T, H] and [1, T, N, H] -> [1, T, N, H]."""
        made: torch.Tensor = self.h_proj(self.hnorm(streams)) + self.e_proj(self.enorm(embeddings))[:, :, None]
        return made


def tiny_deepseek4_mtp(hidden: int = 64, kinds: list[str] | None = None) -> StreamMtp:
    """kinds: of the model's own layers; as many."""
    kinds = kinds or _KINDS
    values: dict[str, Any] = {"hidden": hidden, "compress_rates": dict(DEEPSEEK4_RATES), "q_lora_rank": 32}
    main = tiny_model(
        "deepseek_v4", 5, layers=len(kinds), layer_types=kinds, rope_parameters=dict(DEEPSEEK4_YARN), **values
    )
    one = {"layers": 1, "layer_types": _KINDS[:1], "mlp_layer_types": ["moe"]}
    layer = tiny_model("deepseek_v4", 11, rope_parameters=dict(DEEPSEEK4_YARN), **values, **one)
    return StreamMtp(main, _Layer(layer, torch.Generator().manual_seed(5)).eval())


def write_deepseek4_mtp(tiny: StreamMtp, folder: Path, block: tuple[int, int] | None = None) -> Path:
    """Write both as one checkpoint. block: of scales, in FP8 and FP4, whose numbers both get; None: in fp32."""
    write_safetensors(tiny.main, folder)
    stored = published_tensors(tiny.main, block)
    for name, tensor in published_tensors(tiny.layer.model, block).items():
        if name not in ("embed.weight", "head.weight"):
            stored[f"mtp.0.{name.removeprefix('layers.0.')}"] = tensor
    for part in ("enorm", "hnorm", "e_proj", "h_proj"):
        name, weight = f"mtp.0.{part}.weight", getattr(tiny.layer, part).weight
        is_fp8 = block is not None and part.endswith("proj")
        stored |= published_matrix(name, weight, block or BLOCK) if is_fp8 else {name: weight.detach().clone()}
    if block is None:
        safetensors.torch.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    else:
        save_published(stored, folder, block)
    return folder


def write_deepseek4_mtp_gguf(tiny: StreamMtp, path: Path, *, is_joined: bool) -> Path:
    """Write both as one GGUF: a block behind the model's own. is_joined: both projections in one tensor."""
    behind, layer = f"blk.{tiny.main.config.num_hidden_layers}.", tiny.layer
    found: dict[str, np.ndarray] = {}
    for name, values in layer_tensors(layer.model):
        if name.startswith("blk.0."):
            found[behind + name.removeprefix("blk.0.")] = values
        elif name.startswith("output_hc_"):
            found[f"{behind}nextn.hc_head_{name.removeprefix('output_hc_')}"] = values
        elif name == "output_norm.weight":
            found[f"{behind}nextn.shared_head_norm.weight"] = values
    parts = {part: getattr(layer, part).weight.detach().numpy() for part in ("enorm", "hnorm", "e_proj", "h_proj")}
    if is_joined:
        parts["eh_proj"] = np.concatenate([parts.pop("e_proj"), parts.pop("h_proj")], axis=1)
    found |= {f"{behind}nextn.{part}.weight": values for part, values in parts.items()}
    return write_deepseek4_gguf(tiny.main, path, prediction=found)

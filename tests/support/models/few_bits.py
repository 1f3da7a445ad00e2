"""Checkpoints whose safetensors hold few bits, and the same numbers in F32."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from tests.support.models.tiny_models import tiny_model, write_safetensors

State = dict[str, torch.Tensor]
Make = Callable[[str, torch.Tensor], tuple[State, torch.Tensor]]
"""What is stored of a parameter, and the parameter that it stands for."""


def int4(name: str, weight: torch.Tensor) -> tuple[State, torch.Tensor]:
    """As Kimi-K2.5: groups of 32 columns, symmetric, bf16 scales."""
    groups = weight.view(weight.shape[0], -1, 32)
    scales = (groups.abs().amax(2) / 7).bfloat16()
    codes = (groups / scales.float()[:, :, None]).round().clamp(-8, 7)
    parts = {"weight_packed": pack_to_int32(codes.view(weight.shape).to(torch.int8), 4), "weight_scale": scales}
    parts["weight_shape"] = torch.tensor(weight.shape)
    stored = {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    return stored, (codes * scales.float()[:, :, None]).view(weight.shape)


def fp8_by_row(name: str, weight: torch.Tensor) -> tuple[State, torch.Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale": scales}, codes.float() * scales.float()


def write_both(
    model_type: str, few: Path, wide: Path, config: Mapping[str, object], parts: Mapping[str, Make], layers: int = 2
) -> int:
    """Writes both; returns the size of the vocabulary. parts: by the end of a name, what makes it of few bits."""
    model = tiny_model(model_type, seed=1, hidden=256, layers=layers)
    for folder in (few, wide):
        write_safetensors(model, folder)
    in_few, in_wide = State(), State()
    for name, tensor in safetensors.torch.load_file(few / "model.safetensors").items():
        make = next((make for end, make in parts.items() if name.endswith(end)), None)
        in_few[name], in_wide[name] = tensor, tensor
        if make is not None:
            del in_few[name]
            stored, in_wide[name] = make(name, tensor)
            in_few |= stored
    safetensors.torch.save_file(in_few, few / "model.safetensors")
    safetensors.torch.save_file(in_wide, wide / "model.safetensors")
    said = json.loads((few / "config.json").read_text()) | {"quantization_config": config}
    (few / "config.json").write_text(json.dumps(said))
    return int(model.config.vocab_size)

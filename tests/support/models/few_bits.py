"""Checkpoints whose safetensors hold few bits, and the same numbers in F32."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

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


def nvfp4(name: str, weight: torch.Tensor) -> tuple[State, torch.Tensor]:
    """As compressed-tensors: random codes of four bits under an e4m3 scale for 16 columns and one number."""
    rows, cols = weight.shape
    generator = torch.Generator().manual_seed(len(name))
    codes = torch.randint(0, 16, (rows, cols), generator=generator).byte()
    scales = (torch.rand(rows, cols // 16, generator=generator) * 400).to(torch.float8_e4m3fn)
    number = torch.tensor(0.5**12)  # of which the inverse is exact
    parts = {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scales}
    parts["weight_global_scale"] = (1 / number).view(1)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes.long() & 7] * torch.where(codes >= 8, -1.0, 1.0)
    stored = {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    return stored, values * (scales.float() * number).repeat_interleave(16, 1)


def mxfp4(name: str, weight: torch.Tensor) -> tuple[State, torch.Tensor]:
    """As gpt-oss: random codes in place of the parameter [E, cols, rows]."""
    experts, cols, rows = weight.shape
    generator = torch.Generator().manual_seed(len(name))
    blocks = torch.randint(0, 256, (experts, rows, cols // 32, 16), generator=generator).byte()
    scales = torch.randint(118, 122, (experts, rows, cols // 32), generator=generator).byte()
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, values


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

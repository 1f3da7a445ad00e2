"""A checkpoint as DeepSeek-V3 is published, FP8 with block scales, and the same numbers in BF16."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch

from tests.support.models.tiny_models import tiny_model, write_safetensors

BLOCK = 128


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and the weight that they stand for."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty([-(-size // BLOCK) for size in weight.shape])
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = 2.0 ** torch.ceil(torch.log2(weight[block].abs().max() / 448))
            codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    return codes, scales, codes.float() * wide


def write_both(model_type: str, fp8: Path, bf16: Path, hidden: int = 256, layers: int = 2) -> tuple[int, int]:
    """Writes the two checkpoints; returns the number of FP8 matrices and the model's vocabulary."""
    model = tiny_model(model_type, seed=1, hidden=hidden, layers=layers)
    for folder in (fp8, bf16):
        write_safetensors(model, folder)
    stored, in_fp8, in_bf16 = safetensors.torch.load_file(fp8 / "model.safetensors"), {}, {}
    for name, tensor in stored.items():
        in_fp8[name] = in_bf16[name] = tensor
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            in_fp8[name], in_fp8[f"{name}_scale_inv"], values = to_fp8(tensor)
            in_bf16[name] = values.bfloat16()
            assert torch.equal(in_bf16[name].float(), values)
    safetensors.torch.save_file(in_fp8, fp8 / "model.safetensors")
    safetensors.torch.save_file(in_bf16, bf16 / "model.safetensors")
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (fp8 / "config.json").write_text(json.dumps(config))
    return len(in_fp8) - len(stored), int(model.config.vocab_size)

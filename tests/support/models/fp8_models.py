"""Checkpoints as DeepSeek publishes them: FP8 with block scales, experts of V4 in FP4; and the same numbers in BF16.

Numbers are encoded and decoded in numpy, by the formats' definitions: OCP's FP4 (e2m1) under a power of two for 32
columns, FP8 (e4m3) under one for a block of rows and columns. V3 has scales as fp32, V4 as exponents (ue8m0).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from transformers import PreTrainedModel

from tests.support.models.tiny_models import tiny_model, write_safetensors

BLOCK = (128, 128)

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
_NAMES = (  # of transformers, and as published
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.compressor\.indexer\.(q_b_proj|scorer)", r".attn.indexer.\1"),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.scorer\.", "."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.position_bias$", ".ape"),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.attn\.(.*)gate_proj\.", r".attn.\1wgate."),
    (r"\.attn\.(.*)kv_proj\.", r".attn.\1wkv."),
    (r"\.(q_[ab]|o_[ab])_proj\.", lambda found: f".w{found[1]}."),
    (r"\.w([qo])_([ab])\.", r".w\1_\2."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
)
_IN_FP8 = re.compile(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|w[123])\.weight$")
_IN_FLOATS = re.compile(r"\.compressor\.|\.indexer\.weights_proj\.")


def published_name(name: str) -> str:
    """The name that DeepSeek's files have for a tensor of transformers' model."""
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _power_of_two(largest: np.ndarray, most: float) -> np.ndarray:
    return np.exp2(np.ceil(np.log2(np.maximum(largest, 1e-30) / most))).astype(np.float32)


def to_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, cols / 2], the first column in the low nibble, scales [rows, cols / 32], and what they stand for."""
    groups = weight.numpy().reshape(len(weight), -1, 32)
    scales = _power_of_two(np.abs(groups).max(-1), 6.0)
    codes = np.abs(groups[..., None] / scales[..., None, None] - _E2M1).argmin(-1).reshape(len(weight), -1)
    values = _E2M1[codes].reshape(groups.shape) * scales[..., None]
    pairs = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8).view(np.int8)
    return torch.from_numpy(pairs), _e8m0(scales), torch.from_numpy(values.reshape(weight.shape))


def to_fp8(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, fp32 scales for each block of rows and columns, the last ones cut, and the weight that they stand for."""
    rows, cols = weight.shape
    grid = tuple(-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    scales = np.empty(grid, dtype=np.float32)
    codes, values = np.empty((rows, cols), dtype=np.uint8), np.empty((rows, cols), dtype=np.float32)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            one = weight[at]
            scales[i, j] = _power_of_two(np.asarray(one.abs().max()), 448.0)
            stored = (one / float(scales[i, j])).to(torch.float8_e4m3fn)
            codes[at] = stored.view(torch.uint8).numpy()
            values[at] = stored.float().numpy() * scales[i, j]
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales), torch.from_numpy(values)


def _e8m0(scales: np.ndarray) -> torch.Tensor:
    exponents = (np.log2(scales) + 127).astype(np.uint8)
    return torch.from_numpy(exponents).view(torch.float8_e8m0fnu)


def write_published(model: PreTrainedModel, folder: Path, block: tuple[int, int]) -> None:
    """Write `model` as published, and give it the numbers that its files then have."""
    write_safetensors(model, folder)
    stored = published_tensors(model, block)
    stored["mtp.0.norm.weight"] = torch.ones(8)  # drafts, no part of the answer
    save_published(stored, folder, block)


def published_tensors(model: PreTrainedModel, block: tuple[int, int] | None) -> dict[str, torch.Tensor]:
    """The tensors of `model` by their published names, which gets the numbers that they stand for. block: of scales;
    None: in fp32."""
    stored: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                _add_experts(stored, published_name(name), tensor, in_fp4=block is not None)
                continue
            theirs = published_name(name)
            if block is not None and _IN_FP8.search(theirs) and not _IN_FLOATS.search(theirs):
                stored |= published_matrix(theirs, tensor, block)
            else:
                stored[theirs] = tensor.clone()
    return stored


def published_matrix(name: str, weight: torch.Tensor, block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """A matrix in FP8 and its scales, by their names. It gets the numbers that these stand for."""
    codes, scales, values = to_fp8(weight.detach(), block)
    with torch.no_grad():
        weight.copy_(values)
    return {name: codes, name.replace(".weight", ".scale"): _e8m0(scales.numpy())}


def save_published(stored: dict[str, torch.Tensor], folder: Path, block: tuple[int, int]) -> None:
    """Save published tensors beside a config, which is to say how they are stored."""
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"expert_dtype": "fp4"}
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": list(block),
    }
    (folder / "config.json").write_text(json.dumps(config))


def _add_experts(stored: dict[str, torch.Tensor], name: str, fused: torch.Tensor, *, in_fp4: bool) -> None:
    prefix = name.rpartition(".")[0]
    for number, matrix in enumerate(fused):
        parts = {"w2": matrix} if name.endswith("down_proj") else dict(zip(("w1", "w3"), matrix.chunk(2), strict=True))
        for part, weight in parts.items():
            if not in_fp4:
                stored[f"{prefix}.{number}.{part}.weight"] = weight.clone()
                continue
            codes, scales, values = to_fp4(weight)
            weight.copy_(values)
            stored[f"{prefix}.{number}.{part}.weight"], stored[f"{prefix}.{number}.{part}.scale"] = codes, scales


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
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    (fp8 / "config.json").write_text(json.dumps(config))
    return len(in_fp8) - len(stored), int(model.config.vocab_size)

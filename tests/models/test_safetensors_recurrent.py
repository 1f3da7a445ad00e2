"""Safetensors of families with recurrent layers, in all layouts: experts fused and one by one, BF16 and FP8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import PreTrainedModel

from ktransformers.engine.model.skeleton import build_skeleton, load_hf_config
from ktransformers.errors import UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.models.facts import ModelFacts
from ktransformers.models.registry import routed_experts
from ktransformers.operators.experts.routed import read_layout
from ktransformers.weights.safetensors.file import open_safetensors
from ktransformers.weights.safetensors.source import SafetensorsSource
from tests.support.checks.source_checks import fill
from tests.support.models.fp8_models import to_fp8
from tests.support.models.recurrent_shapes import RECURRENT, recurrent_config
from tests.support.models.tiny_models import random_model

Tensors = dict[str, torch.Tensor]


def opened(folder: Path) -> tuple[PreTrainedModel, SafetensorsSource]:
    """Modules with no numbers yet, on the CPU, and the source."""
    config = load_hf_config(folder)
    model = build_skeleton(config).to_empty(device="cpu")
    return model, SafetensorsSource(open_safetensors(folder), ModelFacts.of(config))


def rewritten(model: PreTrainedModel, folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    stored = {name: tensor.contiguous() for name, tensor in change(safetensors.torch.load_file(path)).items()}
    safetensors.torch.save_file(stored, path)


def check(folder: Path, wanted: PreTrainedModel) -> None:
    model, source = opened(folder)
    read = fill(model, source)
    assert [one for one in source.stored_names() if one not in read and not source.ignorable(one)] == []
    originals = wanted.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, originals[name]), name


def as_bf16(stored: Tensors) -> Tensors:
    return {name: tensor.bfloat16() for name, tensor in stored.items()}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_as_transformers_saves_them(name: str, dtype: str, tmp_path: Path) -> None:
    wanted = random_model(recurrent_config(name), seed=1)
    if dtype == "BF16":
        wanted.to(torch.bfloat16).to(torch.float32)
    rewritten(wanted, tmp_path, as_bf16 if dtype == "BF16" else dict)
    check(tmp_path, wanted)


def fused(stored: Tensors) -> Tensors:
    """One tensor per layer for gate and up of all experts, one for down: as modules have it."""
    out = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    layers = sorted({name.partition(".experts.")[0] for name in stored if ".experts." in name})
    for layer in layers:
        count = len([name for name in stored if name.startswith(f"{layer}.experts.") and "down_proj" in name])
        matrices = {
            part: torch.stack([stored[f"{layer}.experts.{e}.{part}_proj.weight"] for e in range(count)])
            for part in ("gate", "up", "down")
        }
        out[f"{layer}.experts.gate_up_proj"] = torch.cat([matrices["gate"], matrices["up"]], dim=1)
        out[f"{layer}.experts.down_proj"] = matrices["down"]
    return out


def test_fused_experts(tmp_path: Path) -> None:
    """As the BF16 releases of Qwen3.5 have them; transformers saves one by one."""
    wanted = random_model(recurrent_config("qwen3_5_moe_text"), seed=2)
    rewritten(wanted, tmp_path, fused)
    check(tmp_path, wanted)


def in_fp8(stored: Tensors) -> tuple[Tensors, Tensors]:
    """(the files' tensors, what they stand for); fused experts have one grid of scales each."""
    files: Tensors = {}
    values: Tensors = {}
    for name, tensor in stored.items():
        if tensor.dim() == 3 and ".experts." in name:
            parts = [to_fp8(matrix) for matrix in tensor]
            files[name], files[f"{name}_scale_inv"], values[name] = (
                torch.stack([part[i] for part in parts]) for i in range(3)
            )
        elif tensor.dim() == 2 and name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            files[name], files[f"{name}_scale_inv"], values[name] = to_fp8(tensor)
        else:
            files[name] = values[name] = tensor
    return files, values


LAYOUTS = {
    "qwen3_next": ("qwen3_next", dict),
    "qwen3_5_moe fused": ("qwen3_5_moe_text", fused),
    "kimi_linear": ("kimi_linear", dict),
    "nemotron_h": ("nemotron_h", dict),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_fp8(name: str, tmp_path: Path) -> None:
    """The same numbers in FP8 and in F32 give the same parameters, and FP8 experts stay what they are."""
    family, change = LAYOUTS[name]
    wide = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "hidden": 256}
    model = random_model(recurrent_config(family, **wide), seed=3)
    files: Tensors = {}

    def take(stored: Tensors) -> Tensors:
        nonlocal files
        files, values = in_fp8(change(stored))
        return values

    rewritten(model, tmp_path / "f32", take)
    model.save_pretrained(tmp_path / "fp8")
    safetensors.torch.save_file(files, tmp_path / "fp8" / "model.safetensors")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    wanted, source = opened(tmp_path / "f32")
    fill(wanted, source)
    check(tmp_path / "fp8", wanted)
    skeleton, source = opened(tmp_path / "fp8")
    keys = routed_experts(skeleton)
    assert keys
    for key in keys:
        info = source.find_experts(key, read_layout(skeleton.get_submodule(key), key))
        assert {info.up.resident_type.name, info.down.resident_type.name} == {"F8_E4M3"}
        layout = read_layout(skeleton.get_submodule(key), key)
        quantized = source.experts(key, layout, QuantType.Q8_0)
        assert {raw.qtype for raw in (*quantized.up, *quantized.down)} == {QuantType.Q8_0}


def test_a_block_of_scales_for_two_projections_is_refused(tmp_path: Path) -> None:
    model = random_model(recurrent_config("qwen3_5_moe_text", hidden=256, moe_intermediate_size=96), seed=4)
    rewritten(model, tmp_path, lambda stored: in_fp8(fused(stored))[0])
    skeleton, source = opened(tmp_path)
    key = next(iter(routed_experts(skeleton)))
    with pytest.raises(UnsupportedError, match="gate and up of an expert in one block of scales"):
        source.experts(key, read_layout(skeleton.get_submodule(key), key))

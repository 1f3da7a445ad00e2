"""Safetensors with GGML blocks, as upstream's merge scripts write them, against the GGUF that the blocks are from."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.models.facts import ModelFacts
from ktransformers.weights.gguf.file import GGUFModel, open_gguf
from ktransformers.weights.mapped_file import typed_view
from ktransformers.weights.safetensors.file import open_safetensors
from ktransformers.weights.safetensors.source import SafetensorsSource
from tests.support.checks.source_checks import layout_of
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.tiny_models import tiny_model

EXPERTS = "model.layers.1.mlp.experts"


def merged_tensors(gguf: GGUFModel) -> dict[str, torch.Tensor]:
    """Names and layouts of upstream's script: bytes of blocks, 1-D, their type beside them unless it is F32 (0)."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in gguf.tensors.items():
        raw = gguf.raw(name)
        if "_exps" not in name:
            shape = (1, *tensor.shape) if "gate_inp_shexp" in name else tensor.shape  # as in the original
            tensors[name] = typed_view(raw.data, torch.float32).reshape(shape).clone()
            continue
        tensors[name] = raw.data.clone()
        if raw.qtype is not QuantType.F32:
            tensors[name.removesuffix(".weight") + ".ggml_type"] = torch.tensor(int(raw.qtype))
    return tensors


def write_merged(model: PreTrainedModel, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    model.config.save_pretrained(folder)
    safetensors.torch.save_file(
        {n: t for n, t in tensors.items() if "blk.1." not in n}, folder / "model-00000-of-00001.safetensors"
    )
    safetensors.torch.save_file(
        {n: t for n, t in tensors.items() if "blk.1." in n}, folder / "model-00001-of-00001.safetensors"
    )
    return folder


def logits(engine: StaticEngine) -> torch.Tensor:
    ids = list(range(3, 40))
    try:
        return engine.runner.forward(ids, 0, range(len(ids))).clone()
    finally:
        engine.close()


@pytest.mark.every(4)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v2", "qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("qtype", [QuantType.Q4_K, QuantType.F32])
def test_the_same_logits_as_the_gguf(model_type: str, qtype: QuantType, tmp_path: Path) -> None:
    model = tiny_model(model_type, seed=1, hidden=256)
    path = write_gguf(model, tmp_path / "m.gguf", qtype, QuantType.F32, kv_b="whole")
    folder = write_merged(model, tmp_path / "merged", merged_tensors(open_gguf(path)))
    config = EngineConfig(model_path=folder, cache_lens=64, cpu_infer=1)
    got = logits(static_engine(config))
    assert torch.equal(
        got, logits(static_engine(EngineConfig(model_path=folder, gguf_path=path, cache_lens=64, cpu_infer=1)))
    )


@pytest.fixture
def merged(tmp_path: Path) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    model = tiny_model("deepseek_v3", seed=1, hidden=256)
    path = write_gguf(model, tmp_path / "m.gguf", QuantType.Q8_0, QuantType.F32, kv_b="whole")
    return model, merged_tensors(open_gguf(path))


def source_of(model: PreTrainedModel, folder: Path, tensors: dict[str, torch.Tensor]) -> SafetensorsSource:
    return SafetensorsSource(open_safetensors(write_merged(model, folder, tensors)), ModelFacts.of(model.config))


def test_fp8_with_block_scales_beside_blocks(
    merged: tuple[PreTrainedModel, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    model, tensors = merged
    name = "blk.0.attn_output.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    rows, cols = tensors[name].shape
    tensors[f"{name}_scale_inv"] = torch.full((-(-rows // 128), -(-cols // 128)), 0.5)
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source = source_of(model, tmp_path / "fp8", tensors)
    info = source.find("model.layers.0.self_attn.o_proj.weight")
    assert info is not None
    assert info.is_fp8
    assert info.stored_names == (name, f"{name}_scale_inv")
    assert torch.equal(source.dense(info.name), tensors[name].float() * 0.5)
    assert source.find_experts(EXPERTS, layout_of(model, EXPERTS)) is not None


def test_names_of_both_kinds(merged: tuple[PreTrainedModel, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    model, tensors = merged
    tensors["model.norm.weight"] = tensors.pop("output_norm.weight")
    tensors["blk.1.ffn_gate_inp.e_score_correction_bias"] = tensors.pop("blk.1.exp_probs_b.bias")
    for part in ("gate", "up", "down"):
        name = f"blk.1.ffn_{part}_exps"
        tensors[f"{name}.weight.ggml_type"] = tensors.pop(f"{name}.ggml_type")
    source = source_of(model, tmp_path / "both", tensors)
    assert source.find("model.norm.weight") is not None
    assert source.find("model.layers.1.mlp.gate.e_score_correction_bias") is not None
    found = source.find_experts(EXPERTS, layout_of(model, EXPERTS))
    assert found is not None
    assert found.up.resident_type is QuantType.Q8_0
    assert len(found.stored_names) == 6


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t["blk.1.ffn_up_exps.weight"][:-34], TensorMismatchError, r"ffn_up_exps\.weight.*bytes"),
        (lambda t: None, TensorMismatchError, r"not \['up'\]"),
    ],
)
def test_damaged_blocks(
    change: object,
    error: type[Exception],
    message: str,
    merged: tuple[PreTrainedModel, dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    model, tensors = merged
    value = change(tensors)  # type: ignore[operator]
    if value is None:
        del tensors["blk.1.ffn_up_exps.weight"]
    else:
        tensors["blk.1.ffn_up_exps.weight"] = value
    source = source_of(model, tmp_path / "bad", tensors)
    with pytest.raises(error, match=message):
        source.find_experts(EXPERTS, layout_of(model, EXPERTS))


def test_an_unknown_type(merged: tuple[PreTrainedModel, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    model, tensors = merged
    tensors["blk.1.ffn_up_exps.ggml_type"] = torch.tensor(4321)
    source = source_of(model, tmp_path / "bad", tensors)
    with pytest.raises(UnsupportedError, match="4321"):
        source.find_experts(EXPERTS, layout_of(model, EXPERTS))

"""FP8 whose rows no type of blocks holds: in F32, each product rounded once; of all widths and all forms of scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from ktransformers.kernels.types import OwnType, QuantType
from ktransformers.models.facts import ModelFacts
from ktransformers.weights.safetensors.file import open_safetensors
from ktransformers.weights.safetensors.source import SafetensorsSource
from tests.support.models.tiny_models import tiny_config

NAME = "model.layers.0.self_attn.q_proj.weight"
ROWS = 40
CASES = [  # columns, columns of a scale (0: of the row), the scale's name and type, what the matrix is held as
    (100, 0, "weight_scale", torch.float32, "F32"),
    (100, 0, "weight_scale_inv", torch.float32, "F32"),
    (100, 0, "weight_scale", torch.bfloat16, "F32"),
    (100, 0, "weight_scale", torch.float16, "F32"),
    (33, 0, "weight_scale", torch.float32, "F32"),
    (7, 0, "weight_scale", torch.float32, "F32"),
    (96, 48, "weight_scale", torch.float32, "F32"),
    (100, 50, "weight_scale", torch.float32, "F32"),
    (96, 0, "weight_scale", torch.float32, "F8_32_F32"),
    (128, 0, "weight_scale", torch.float32, "F8_128_F32"),
    (192, 64, "weight_scale", torch.float32, "F8_32_F32"),
]


def source_of(folder: Path, stored: dict[str, torch.Tensor], method: str) -> SafetensorsSource:
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": method}
    return SafetensorsSource(open_safetensors(folder), ModelFacts.of(config))


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(("cols", "group", "suffix", "dtype", "held"), CASES)
def test_a_scale_for_each_row(
    cols: int, group: int, suffix: str, dtype: torch.dtype, held: str, is_flat: bool, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(cols)
    codes = torch.randn(ROWS, cols, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(ROWS, cols // (group or cols), generator=generator).to(dtype)
    if is_flat and scales.shape[1] > 1:
        return
    wanted = codes.float() * scales.float().repeat_interleave(group or cols, 1)
    stored = {NAME: codes, NAME.replace("weight", suffix): scales[:, 0].contiguous() if is_flat else scales}
    source = source_of(tmp_path, stored, "fbgemm_fp8")
    info = source.find(NAME)
    assert info is not None
    assert info.resident_type.name == held
    assert torch.equal(source.dense(NAME), wanted)
    raw = source.tensor(NAME)
    assert (raw.qtype.name, raw.shape, raw.nbytes) == (held, info.shape, info.nbytes)
    if held == "F32":
        assert torch.equal(raw.data.view(torch.float32).reshape(ROWS, cols), wanted)


@pytest.mark.parametrize("cols", [102, 6, 33])
def test_one_scale_and_rows_that_kernels_do_not_read(cols: int, tmp_path: Path) -> None:
    codes = torch.randn(ROWS, cols).to(torch.float8_e4m3fn)
    stored = {NAME: codes, f"{NAME}_scale": torch.tensor(0.3)}
    source = source_of(tmp_path, stored, "fp8")
    raw = source.tensor(NAME)
    assert raw.qtype is QuantType.F32
    assert torch.equal(raw.data.view(torch.float32).reshape(ROWS, cols), codes.float() * torch.tensor(0.3))


def test_rows_that_kernels_read_stay_as_they_are(tmp_path: Path) -> None:
    stored = {NAME: torch.randn(ROWS, 100).to(torch.float8_e4m3fn), f"{NAME}_scale": torch.tensor(0.3)}
    source = source_of(tmp_path, stored, "fp8")
    assert source.fp8(NAME).qtype is OwnType.F8_E4M3

"""FP8 under scales for blocks of every size that a config names, and FP4 as DeepSeek-V4 has it: every weight, bit for
bit, or refused."""

from __future__ import annotations

from pathlib import Path

import gguf.quants
import pytest
import safetensors.torch
import torch

from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.kernels import reference
from ktransformers.kernels.types import GroupType, OwnType, QuantType
from ktransformers.models.facts import ModelFacts
from ktransformers.weights.safetensors.file import open_safetensors
from ktransformers.weights.safetensors.source import SafetensorsSource
from tests.support.models.fp8_models import to_fp4
from tests.support.models.group_blocks import dequantized
from tests.support.models.tiny_models import tiny_config

MODULE = "model.layers.0.self_attn.q_proj"
NAME = f"{MODULE}.weight"
ROWS, COLS = 200, 320
CASES = [  # rows and columns of a block, the scales' type, what the matrix is held as
    ((128, 128), torch.float8_e8m0fnu, "F8_E4M3"),
    ((128, 128), torch.float32, "F8_E4M3"),
    ((32, 32), torch.float8_e8m0fnu, "MXFP8"),
    ((32, 32), torch.uint8, "MXFP8"),
    ((64, 64), torch.float8_e8m0fnu, "MXFP8"),
    ((1, 32), torch.float8_e8m0fnu, "MXFP8"),
    ((1, 128), torch.float8_e8m0fnu, "MXFP8"),  # the last of a row is cut
    ((1, 128), torch.float32, "F8_32_F32"),
    ((32, 32), torch.float32, "F8_32_F32"),
    ((64, 96), torch.bfloat16, "F8_32_BF16"),
    ((48, 64), torch.float16, "F8_32_F16"),
    ((16, 512), torch.float32, "F8_32_F32"),
    ((128, 48), torch.float32, "BF16"),
]


def source_of(folder: Path, stored: dict[str, torch.Tensor], block: tuple[int, int] | None) -> SafetensorsSource:
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": block and list(block)}
    return SafetensorsSource(open_safetensors(folder), ModelFacts.of(config))


def matrix(block: tuple[int, int], dtype: torch.dtype, cols: int = COLS) -> tuple[torch.Tensor, ...]:
    """Codes, scales, and the weight that they stand for."""
    generator = torch.Generator().manual_seed(sum(block))
    codes = torch.randn(ROWS, cols, generator=generator).to(torch.float8_e4m3fn)
    grid = [-(-size // step) for size, step in zip((ROWS, cols), block, strict=True)]
    exponents = torch.randint(120, 134, grid, generator=generator, dtype=torch.uint8)
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales, numbers = exponents.view(dtype), torch.exp2(exponents.float() - 127)
    else:
        scales = torch.rand(grid, generator=generator).to(dtype)
        numbers = scales.float()
    wide = numbers.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:ROWS, :cols]
    return codes, scales, codes.float() * wide


@pytest.mark.parametrize("name", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize(("block", "dtype", "held"), CASES)
def test_blocks_that_the_config_names(
    block: tuple[int, int], dtype: torch.dtype, held: str, name: str, tmp_path: Path
) -> None:
    codes, scales, wanted = matrix(block, dtype)
    source = source_of(tmp_path, {NAME: codes, f"{MODULE}.{name}": scales}, block)
    info = source.find(NAME)
    assert info is not None
    assert set(info.stored_names) == {NAME, f"{MODULE}.{name}"}
    assert torch.equal(source.dense(NAME), wanted)
    if held == "F8_E4M3":
        assert info.is_fp8
        assert source.fp8(NAME).qtype is OwnType.F8_E4M3
        assert torch.equal(reference.dequantize(source.fp8(NAME)), wanted)
        return
    assert info.resident_type.name == held
    raw = source.tensor(NAME)
    assert (raw.qtype.name, raw.shape, raw.nbytes) == (held, (ROWS, COLS), info.nbytes)
    if isinstance(raw.qtype, GroupType):
        assert torch.equal(dequantized(raw), wanted)


@pytest.mark.parametrize(("stored", "said"), [((32, 32), (128, 128)), ((128, 128), (32, 32)), ((32, 32), None)])
def test_other_blocks_than_the_config_names(
    stored: tuple[int, int], said: tuple[int, int] | None, tmp_path: Path
) -> None:
    codes, scales, _ = matrix(stored, torch.float8_e8m0fnu)
    source = source_of(tmp_path, {NAME: codes, f"{NAME}_scale_inv": scales}, said)
    for read in (source.find, source.tensor):  # a plan is refused as well
        with pytest.raises(TensorMismatchError, match=r"scales of FP8 tensor .* in blocks of"):
            read(NAME)


def test_fp4_of_deepseek_v4(tmp_path: Path) -> None:
    weight = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1))
    codes, scales, wanted = to_fp4(weight)
    source = source_of(tmp_path, {NAME: codes, f"{MODULE}.scale": scales}, (128, 128))
    info = source.find(NAME)
    assert info is not None
    assert (info.resident_type, info.shape) == (QuantType.MXFP4, (ROWS, COLS))
    assert torch.equal(source.dense(NAME), wanted)
    raw = source.tensor(NAME)
    held = gguf.quants.dequantize(raw.data.numpy().reshape(ROWS, -1), QuantType.MXFP4)
    assert torch.equal(torch.from_numpy(held), wanted)


def test_fp4_under_other_scales_is_refused(tmp_path: Path) -> None:
    codes, scales, _ = to_fp4(torch.randn(ROWS, COLS))
    with pytest.raises(UnsupportedError, match=r"E2M1 weights with scales of F32 per 32 columns"):
        source_of(tmp_path, {NAME: codes, f"{MODULE}.scale": scales.float()}, (128, 128))

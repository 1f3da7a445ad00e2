"""A checkpoint as DeepSeek-V3 is published, FP8 with block scales, against the same numbers in BF16.

Scales are powers of two, so that every weight is a BF16 number too: both engines multiply the same weights in fp32 and
differ in the order of summation only, which test_agreement.py bounds.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ktransformers.engine.builder import Engine
from ktransformers.kernels import cpu
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.linear.linear import KTransformersLinear
from tests.models.test_agreement import TOLERANCE, engine_of, prompt
from tests.support.tiny_models import tiny_model, write_safetensors

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


def check_planned_bytes(engine: Engine) -> None:
    """What the plan says of every module in FP8 is what the module holds, at most a byte and 3 % per weight."""
    entries = {entry.key: entry for entry in engine.plan.entries if "F8_E4M3" in entry.quant_types}
    assert entries
    for key, entry in entries.items():
        operator = engine.plan.operators[key]
        if isinstance(operator, KTransformersExperts):
            weights = operator._weights
            held = [*weights.gate, *weights.up, *weights.down]
        else:
            assert isinstance(operator, KTransformersLinear)
            held = [operator._weight]
        assert entry.nbytes == {"cpu": sum(weight.data.numel() for weight in held)}
        weights_held = sum(-(-weight.shape[0] // 16) * 16 * weight.shape[1] + 64 for weight in held)
        assert entry.nbytes["cpu"] <= 1.03 * weights_held + 1024


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe"])
def test_logits_equal_those_of_the_same_weights_in_bf16(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    count, vocab_size = write_both(model_type, tmp_path / "fp8", tmp_path / "bf16")
    with caplog.at_level(logging.INFO):
        engine = engine_of(tmp_path / "fp8")
    assert f"{count} FP8 matrices are computed with as they are" in caplog.text
    ids = prompt(vocab_size)
    want = engine_of(tmp_path / "bf16").runner.forward(ids, 0, range(len(ids)))
    got = engine.runner.forward(ids, 0, range(len(ids)))
    check_planned_bytes(engine)
    # Activations of BF16 weights, but not of FP8 ones, are rounded where the processor multiplies bf16.
    tolerance = 0.02 if cpu.has_bf16(cpu.active_isa()) else TOLERANCE
    assert (got - want).abs().max() <= tolerance * want.abs().max()
    for size in (1, 7):
        fresh = engine_of(tmp_path / "fp8")
        parts = [
            fresh.runner.forward(ids[at : at + size], at, range(len(ids[at : at + size])))
            for at in range(0, len(ids), size)
        ]
        assert torch.equal(torch.cat(parts), got)


@pytest.mark.parametrize("cpu_quant", [None, "q8_0"])
def test_quantizing_experts_while_loading_still_counts(cpu_quant: str | None, tmp_path: Path) -> None:
    write_both("deepseek_v3", tmp_path / "fp8", tmp_path / "bf16")
    engine = engine_of(tmp_path / "fp8", cpu_quant=cpu_quant)
    kinds = {kind for entry in engine.plan.entries if entry.key.endswith(".experts") for kind in entry.quant_types}
    assert kinds == {"F8_E4M3" if cpu_quant is None else "F8_E4M3>Q8_0"}

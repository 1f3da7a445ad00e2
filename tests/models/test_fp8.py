"""A checkpoint as DeepSeek-V3 is published, FP8 with block scales, against the same numbers in BF16.

Scales are powers of two, so that every weight is a BF16 number too: both engines multiply the same weights in fp32 and
differ in the order of summation only, which test_agreement.py bounds.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from ktransformers.kernels import cpu
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.linear.linear import KTransformersLinear
from tests.support.engines.one_sequence import StaticEngine
from tests.support.models.agreement import TOLERANCE, engine_of, prompt
from tests.support.models.fp8_models import write_both


def check_planned_bytes(engine: StaticEngine) -> None:
    """What the plan says of every module in FP8 is what the module holds, at most a byte and 3 % per weight."""
    entries = {entry.key: entry for entry in engine.plan.entries if "F8_E4M3" in entry.quant_types}
    assert entries
    for key, entry in entries.items():
        operator = engine.plan.operators[key]
        if isinstance(operator, KTransformersExperts):
            weights = operator.weights
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

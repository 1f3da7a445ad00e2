"""Whole models whose safetensors hold few bits: the engine beside the same weights dequantized, and planned bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.linear.linear import KTransformersLinear
from tests.support.engines.one_sequence import StaticEngine
from tests.support.models import few_bits
from tests.support.models.agreement import INT8_TOLERANCE, engine_of, prompt


def check_planned_bytes(engine: StaticEngine, names: set[str]) -> None:
    """What the plan says of a module in one of these types is what the module holds."""
    entries = {entry.key: entry for entry in engine.plan.entries if names & set(entry.quant_types)}
    assert {kind for entry in entries.values() for kind in entry.quant_types} == names
    for key, entry in entries.items():
        operator = engine.plan.operators[key]
        if isinstance(operator, KTransformersExperts):
            weights = operator.weights
            held = [part.data for part in (*weights.gate, *weights.up, *weights.down)]
            held += [b for b in (weights.gate_bias, weights.up_bias, weights.down_bias) if b is not None]
        else:
            assert isinstance(operator, KTransformersLinear)
            held = [operator._weight.data]
        assert entry.nbytes == {"cpu": sum(tensor.nbytes for tensor in held)}


def check_logits(few: Path, wide: Path, vocab_size: int, tolerance: float) -> StaticEngine:
    engine = engine_of(few)
    ids = prompt(vocab_size)
    got = engine.runner.forward(ids, 0, range(len(ids)))
    want = engine_of(wide).runner.forward(ids, 0, range(len(ids)))
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.median() <= tolerance
    assert (errors > tolerance).sum() <= 2  # a row whose router nearly ties may take another expert
    fresh = engine_of(few)
    parts = [fresh.runner.forward(ids[at : at + 7], at, range(len(ids[at : at + 7]))) for at in range(0, len(ids), 7)]
    assert torch.equal(torch.cat(parts), got)
    return engine


# Activations in front of integers are rounded to 1/254 of their block's largest, as in front of a GGUF's.
ROUNDED = INT8_TOLERANCE


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe"])
def test_experts_in_4_bits_and_linear_layers_in_fp8(model_type: str, tmp_path: Path) -> None:
    linears = dict.fromkeys(("self_attn.o_proj.weight", "self_attn.kv_b_proj.weight"), few_bits.fp8_by_row)
    names = ("q_proj", "k_proj", "v_proj") if model_type == "qwen3_moe" else ("q_a_proj", "kv_a_proj_with_mqa")
    linears |= dict.fromkeys((f"self_attn.{name}.weight" for name in names), few_bits.int4)
    experts = {f"experts.{e}.{part}_proj.weight": few_bits.int4 for e in range(8) for part in ("gate", "up", "down")}
    config: dict[str, object] = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    config |= {"ignore": ["lm_head", "re:.*shared_experts.*"]}
    size = few_bits.write_both(model_type, tmp_path / "few", tmp_path / "wide", config, {**linears, **experts})
    engine = check_logits(tmp_path / "few", tmp_path / "wide", size, ROUNDED)
    check_planned_bytes(engine, {"I4_32_BF16", "F8_ROW_BF16>F8_128_BF16"})


def test_gpt_oss(tmp_path: Path) -> None:
    parts: dict[str, few_bits.Make] = dict.fromkeys(("experts.gate_up_proj", "experts.down_proj"), few_bits.mxfp4)
    config: dict[str, object] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    size = few_bits.write_both("gpt_oss", tmp_path / "few", tmp_path / "wide", config, parts)
    engine = check_logits(tmp_path / "few", tmp_path / "wide", size, ROUNDED)
    kinds = {kind for entry in engine.plan.entries if entry.key.endswith(".experts") for kind in entry.quant_types}
    assert kinds == {"MXFP4"}

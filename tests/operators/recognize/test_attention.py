"""Attention modules are recognized by what they hand to attention."""

from __future__ import annotations

import pytest
import torch

from ktransformers.operators.recognize.attention import GqaSpec, NormPlace, recognize_attention
from tests.support.tiny_models import tiny_config


def spec_of(model_type: str, **overrides: object) -> GqaSpec | None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(model_type, **overrides))
    return recognize_attention(model.model.layers[0].self_attn)


@pytest.mark.parametrize(
    ("model_type", "place", "is_interleaved", "has_sinks"),
    [
        ("llama", None, False, False),
        ("mixtral", None, False, False),
        ("qwen3_moe", NormPlace.HEADS, False, False),
        ("hunyuan_v1_moe", NormPlace.ROTATED, False, False),
        ("minimax_m2", NormPlace.WHOLE, False, False),
        ("olmoe", NormPlace.WHOLE, False, False),
        ("ernie4_5_moe", None, True, False),
        ("gpt_oss", None, False, True),
    ],
)
def test_families(model_type: str, place: NormPlace | None, is_interleaved: bool, has_sinks: bool) -> None:
    spec = spec_of(model_type)
    assert spec is not None
    assert (spec.norms and spec.norms.place, spec.is_interleaved, spec.has_sinks) == (place, is_interleaved, has_sinks)
    assert (spec.shape(torch.bfloat16) is None) == has_sinks


def test_clipping_is_seen() -> None:
    """olmoe may clip queries, keys and values."""
    assert spec_of("olmoe", clip_qkv=30.0) is None


def test_others_are_left_alone() -> None:
    assert spec_of("deepseek_v3") is None  # latent attention
    assert recognize_attention(torch.nn.Linear(4, 4)) is None

"""Attention modules are recognized by what they hand to attention."""

from __future__ import annotations

import pytest
import torch

from ktransformers.operators.recognize.attention import GqaSpec, NormPlace, recognize_attention
from tests.support.models.family_models import family_config
from tests.support.models.recurrent_models import recurrent_config
from tests.support.models.tiny_models import tiny_config


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


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text"])
def test_gates_beside_queries(model_type: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(recurrent_config(model_type)).model.layers[2].self_attn
    spec = recognize_attention(module)
    assert spec is not None
    assert spec.norms is not None
    assert (spec.has_gate, spec.num_heads, spec.head_dim, spec.rotary_dim) == (True, 4, 32, 16)
    assert (spec.norms.place, spec.norms.offset) == (NormPlace.HEADS, 1.0)


def test_another_gate_is_seen() -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_next import modeling_qwen3_next

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(recurrent_config("qwen3_next")).model.layers[2].self_attn
    forward = modeling_qwen3_next.Qwen3NextAttention.forward

    class Other(type(module)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
            output, weights = forward(self, hidden_states, *args, **kwargs)
            return output * output.abs().sqrt(), weights

    module.__class__ = Other
    assert recognize_attention(module) is None


def test_clipping_is_seen() -> None:
    """olmoe may clip queries, keys and values."""
    assert spec_of("olmoe", clip_qkv=30.0) is None


def test_others_are_left_alone() -> None:
    assert spec_of("deepseek_v3") is None  # latent attention
    assert recognize_attention(torch.nn.Linear(4, 4)) is None


def test_norms_without_weights_are_another_make() -> None:
    """NanoChat's."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(family_config("nanochat", 0))
    assert recognize_attention(model.model.layers[0].self_attn) is None

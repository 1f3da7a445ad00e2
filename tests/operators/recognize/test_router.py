"""Routers are recognized by their results; the spec found must route random logits as the module's own forward does."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.cpu.router import Scoring
from ktransformers.operators.recognize.router import _SCORES, CHOICE_BIAS, recognize_router, route
from tests.support.models.latent_models import latent_model
from tests.support.models.tiny_models import tiny_model

EXPECTED = {
    "qwen3_moe": (Scoring.SOFTMAX, 1, True),
    "qwen2_moe": (Scoring.SOFTMAX, 1, False),
    "olmoe": (Scoring.SOFTMAX, 1, False),
    "mixtral": (Scoring.SOFTMAX, 1, True),
    "deepseek_v2": (Scoring.SOFTMAX, 1, False),
    "deepseek_v3": (Scoring.SIGMOID, 4, True),
    "glm4_moe": (Scoring.SIGMOID, 1, True),
    "dots1": (Scoring.SIGMOID, 1, True),
    "gpt_oss": (Scoring.SOFTMAX, 1, True),  # softmax of the chosen logits: of all, and divided by the sum of the chosen
}


@pytest.mark.parametrize("model_type", list(EXPECTED))
def test_recognized(model_type: str) -> None:
    mlp = tiny_model(model_type, seed=1).model.layers[-1].mlp
    gate = mlp.router if model_type == "gpt_oss" else mlp.gate
    spec = recognize_router(gate)
    assert spec is not None
    assert (spec.scoring, spec.num_groups, spec.renormalize) == EXPECTED[model_type]
    rows = torch.randn(40, gate.hidden_dim, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits, weights, ids = gate(rows)
        want = torch.zeros_like(logits).scatter_(1, ids, weights.float())
        got = route(logits, spec, gate._buffers.get(CHOICE_BIAS))
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", [1, 2])
def test_how_groups_are_ranked_is_found_out(seed: int) -> None:
    """Of a softmax: groups by their best and by their best two rank alike in most rows, but not in all."""
    gate = latent_model("mistral4", seed).model.layers[-1].mlp.gate
    spec = recognize_router(gate)
    assert spec is not None
    assert (spec.scoring, spec.num_groups, spec.group_score) == (Scoring.SOFTMAX, 2, "top2")


def test_every_scoring_is_looked_for() -> None:
    assert list(_SCORES) == list(Scoring)


def test_other_routers_keep_their_forward() -> None:
    assert recognize_router(tiny_model("phimoe", seed=1).model.layers[0].mlp.router) is None
    assert recognize_router(torch.nn.Linear(8, 4)) is None

"""Indexers, and what LongCat keeps elsewhere, are recognized by their results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ktransformers.kernels.types import Activation
from ktransformers.operators.experts.routed import read_layout
from ktransformers.operators.recognize.activation import recognize_expert_activation
from ktransformers.operators.recognize.indexer import Granularity, recognize_indexer
from ktransformers.operators.recognize.router import recognize_router, route
from tests.support.models.latent_models import BLOCK_VALUES, latent_model
from tests.support.models.pooled_models import POOLED_TYPES, pooled_model
from tests.support.models.tiny_models import tiny_model


@pytest.mark.parametrize(("model_type", "is_interleaved"), [("deepseek_v32", False), ("glm_moe_dsa", True)])
def test_how_an_indexer_rotates(model_type: str, is_interleaved: bool) -> None:
    indexer = latent_model(model_type, seed=1).model.layers[0].self_attn.indexer
    spec = recognize_indexer(indexer)
    assert spec is not None
    assert (spec.is_interleaved, spec.num_heads, spec.head_dim, spec.rotary_dim) == (is_interleaved, 8, 24, 8)
    of_family = type(indexer)

    class Other(of_family):  # type: ignore[misc,valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            chosen: torch.Tensor = super().forward(*args, **kwargs)
            return (chosen - 1).clamp_min(0)

    indexer.__class__ = Other
    assert recognize_indexer(indexer) is None
    assert recognize_indexer(torch.nn.Linear(2, 2)) is None


def test_blocks() -> None:
    indexer = tiny_model("minimax_m3_vl_text", seed=1, **BLOCK_VALUES).model.layers[1].self_attn.indexer
    spec = recognize_indexer(indexer, Granularity.BLOCK)
    assert spec is not None
    assert (spec.num_heads, spec.size, spec.num_chosen, spec.num_local) == (2, 4, 4, 1)
    of_family = type(indexer)

    class Other(of_family):  # type: ignore[misc,valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            chosen: torch.Tensor = super().forward(*args, **kwargs)
            return (chosen - 1).clamp_min(0)

    indexer.__class__ = Other
    assert recognize_indexer(indexer, Granularity.BLOCK) is None
    assert recognize_indexer(torch.nn.Linear(2, 2), Granularity.BLOCK) is None


def test_what_chooses_other_units_is_not_recognized() -> None:
    """Indexers of positions and of pools have parts of the same names."""
    of_positions = latent_model("deepseek_v32", seed=1).model.layers[0].self_attn.indexer
    of_pools = pooled_model(POOLED_TYPES[0]).model.layers[1].self_attn.indexer
    assert recognize_indexer(of_positions, Granularity.POOL) is None
    assert recognize_indexer(of_positions, Granularity.BLOCK) is None
    assert recognize_indexer(of_pools, Granularity.POSITION) is None


@pytest.mark.parametrize(
    ("model_type", "is_gated", "cached_dim"), [(*POOLED_TYPES[:1], True, 48), (*POOLED_TYPES[1:], False, 24)]
)
def test_pools(model_type: str, is_gated: bool, cached_dim: int) -> None:
    indexer = pooled_model(model_type).model.layers[1].self_attn.indexer
    spec = recognize_indexer(indexer, Granularity.POOL)
    assert spec is not None
    assert (spec.is_gated, spec.cached_dim, spec.num_heads, spec.size, spec.num_chosen) == (
        is_gated,
        cached_dim,
        16,
        4,
        4,
    )
    assert spec.scale == pytest.approx(24**-0.5)
    of_family = type(indexer)

    class Other(of_family):  # type: ignore[misc,valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            chosen: torch.Tensor = super().forward(*args, **kwargs)
            return chosen.flip(-2)

    indexer.__class__ = Other
    assert recognize_indexer(indexer, Granularity.POOL) is None
    assert recognize_indexer(torch.nn.Linear(2, 2), Granularity.POOL) is None


def test_experts_that_clamp_by_a_limit_of_their_own_name() -> None:
    experts = pooled_model("glm5_next_text").model.layers[1].mlp.experts
    activation = recognize_expert_activation(experts, read_layout(experts, "experts"))
    assert activation is not None
    assert (activation.kind, activation.limit) == (Activation.SWIGLU_CLAMPED, 0.5)


def test_a_router_with_its_matrix_in_a_child_and_experts_that_are_asked_as_a_whole() -> None:
    mlp = latent_model("longcat_flash", seed=1).model.layers[0].mlp
    spec = recognize_router(mlp.router)
    assert spec is not None
    rows = torch.randn(40, 64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits, weights, ids = mlp.router(rows)
    want = torch.zeros(40, 11).scatter_(1, ids, weights)
    got = route(logits, spec, mlp.router.e_score_correction_bias)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-6)
    layout = read_layout(mlp.experts, "experts")
    assert (layout.num_experts, layout.num_identities) == (8, 3)
    activation = recognize_expert_activation(mlp.experts, layout)
    assert activation is not None
    assert activation.kind is Activation.SILU

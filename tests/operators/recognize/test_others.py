"""What else modules are asked: scaled queries, scaled inputs of experts, scaled embeddings, gated blocks, keywords."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7MLP

from ktransformers.kernels.types import Activation, ActivationSpec
from ktransformers.operators.recognize.activation import recognize_gated_mlp
from ktransformers.operators.recognize.attention import recognize_temperature
from ktransformers.operators.recognize.block import scales_inputs, weighs_outputs
from ktransformers.operators.recognize.embedding import recognize_embedding, recognize_input_scale
from ktransformers.operators.recognize.layer import keeps_keywords
from ktransformers.operators.recognize.temperature import QueryTemperature
from tests.support.models.attention_families import config_of
from tests.support.models.family_models import family_config
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import random_model, tiny_model


@pytest.fixture(scope="module")
def llama4() -> nn.Module:
    return random_model(config_of("llama4"), seed=0)


@pytest.fixture(scope="module")
def gemma3n() -> nn.Module:
    return random_model(config_of("gemma3n"), seed=0)


def test_queries_that_grow_with_their_position(llama4: nn.Module) -> None:
    attention = llama4.get_submodule("model.layers.1.self_attn")
    assert recognize_temperature(attention) == QueryTemperature(scale=0.1, step=8.0, shift=1)
    factors = QueryTemperature(0.1, 8.0, shift=1).of(torch.arange(16).float())
    assert torch.equal(factors[:7], torch.ones(7))
    assert factors[7] == pytest.approx(1 + 0.1 * torch.log(torch.tensor(2.0)).item())
    assert factors[15] == pytest.approx(1 + 0.1 * torch.log(torch.tensor(3.0)).item())
    latent = QueryTemperature(0.1, 8.0).of(torch.tensor([0.0, 7.0, 8.0]))  # counted from 0
    assert latent.tolist() == pytest.approx([1.0, 1.0, 1 + 0.1 * torch.log(torch.tensor(2.0)).item()])
    rotated = llama4.get_submodule("model.layers.0.self_attn")
    assert recognize_temperature(rotated) is None


def test_blocks_that_scale_what_experts_see(llama4: nn.Module) -> None:
    assert scales_inputs(llama4.get_submodule("model.layers.0.feed_forward")) is True
    assert scales_inputs(tiny_model("qwen2_moe").get_submodule("model.layers.0.mlp")) is None


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe", "deepseek_v3", "hunyuan_v1_moe"])
def test_blocks_that_weigh_what_experts_give(model_type: str) -> None:
    assert weighs_outputs(tiny_model(model_type).get_submodule("model.layers.1.mlp")) is True


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text"])
def test_blocks_of_recurrent_families_weigh_what_experts_give(model_type: str) -> None:
    assert weighs_outputs(recurrent_model(model_type).get_submodule("model.layers.1.mlp")) is True


def test_blocks_of_the_same_parts_that_compute_something_else(llama4: nn.Module) -> None:
    cohere = random_model(family_config("cohere2_moe"), seed=0).get_submodule("model.layers.0.mlp")
    assert {"gate", "experts"} <= {name for name, _ in cohere.named_children()}
    assert weighs_outputs(cohere) is None  # the mean with what shared experts give
    assert weighs_outputs(llama4.get_submodule("model.layers.0.feed_forward")) is None
    assert weighs_outputs(tiny_model("granitemoe").get_submodule("model.layers.0.block_sparse_moe")) is None

    class Scaled(type(tiny_model("qwen3_moe").get_submodule("model.layers.0.mlp"))):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 2.5 * super().forward(hidden_states)

    block = tiny_model("qwen3_moe", seed=3).get_submodule("model.layers.0.mlp")
    block.__class__ = Scaled
    assert weighs_outputs(block) is None


@pytest.mark.parametrize(("model_type", "scale"), [("falcon_h1", 3.0), ("granitemoehybrid", 1.0)])
def test_rows_that_a_model_scales_when_it_looks_them_up(model_type: str, scale: float) -> None:
    """Falcon-H1 leaves rows alone that it is handed, Granite scales those too."""
    base = recurrent_model(model_type).get_submodule("model")
    assert base.embedding_multiplier == 3.0
    assert recognize_input_scale(base, "embed_tokens") == pytest.approx(scale)


def test_embeddings(gemma3n: nn.Module) -> None:
    assert recognize_embedding(nn.Embedding(4, 2)) == 1.0
    assert recognize_embedding(gemma3n.get_submodule("model.embed_tokens")) == 8.0  # the root of 64
    with torch.device("meta"):
        assert recognize_embedding(nn.Embedding(4, 2)) == 1.0

    class Normed(nn.Embedding):
        scalar_embed_scale = 2.0

        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("embed_scale", torch.tensor(2.0), persistent=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.normalize(super().forward(ids), dim=-1)

    assert recognize_embedding(Normed()) is None


def test_blocks_of_gate_up_and_down(gemma3n: nn.Module) -> None:
    plain = recognize_gated_mlp(tiny_model("llama").get_submodule("model.layers.0.mlp"))
    assert plain is not None
    assert plain.kind is Activation.SILU
    assert recognize_gated_mlp(gemma3n.get_submodule("model.layers.0.mlp")) is None  # keeps the largest only
    dense = recognize_gated_mlp(gemma3n.get_submodule("model.layers.4.mlp"))
    assert dense is not None
    assert dense.kind is Activation.GELU_TANH


def test_a_block_that_clamps_is_another() -> None:
    config = Step3p7TextConfig(hidden_size=16, intermediate_size=24, swiglu_limits_shared=[0.0, 4.0])
    with torch.device("meta"):
        free, clamped = (Step3p7MLP(config, layer) for layer in (0, 1))
    spec = recognize_gated_mlp(free)
    assert spec is not None
    assert spec.kind is Activation.SILU
    assert recognize_gated_mlp(clamped) is None  # behind the activation
    shared = tiny_model("deepseek_v4").get_submodule("model.layers.0.mlp.shared_experts")
    assert recognize_gated_mlp(shared) == ActivationSpec(Activation.SWIGLU_CLAMPED, limit=10.0)


@pytest.mark.parametrize(("name", "keeps"), [("stablelm", True), ("nemotron", True), ("laguna", False)])
def test_layers_that_keep_keywords(name: str, keeps: bool) -> None:
    layer = random_model(config_of(name), seed=0).get_submodule("model.layers.0")
    assert keeps_keywords(layer) is keeps

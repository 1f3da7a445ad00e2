"""Decoder layers in native calls: which families have them, and that they compute what the modules do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.sequence import SequenceRunner
from ktransformers.kernels.cpu.latent import LatentLayer
from ktransformers.kernels.cpu.layer import AttentionLayer, LayerKv, MlpLayer, MoeLayer, RecurrentLayer
from ktransformers.operators.attention.mla import KMLAAttention
from ktransformers.operators.layers.cpu import FusedLayer, fuse_layers
from tests.support.engines.runners import calls_of, fused_runner, random_ids, runner_of
from tests.support.models.agreement import TOLERANCE
from tests.support.models.family_models import family_config
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import random_model, tiny_config, tiny_model

# Family -> (attention, feed-forward) that must run in native calls; layers of one model may differ.
NATIVE = {
    "llama": (True, MlpLayer),
    "qwen2": (True, MlpLayer),
    "qwen3": (True, MlpLayer),
    "mixtral": (True, MoeLayer),
    "qwen3_moe": (True, MoeLayer),
    "qwen2_moe": (True, MoeLayer),  # a shared expert with a score
    "deepseek_v2": (True, MoeLayer),  # latent attention, angles as complex numbers
    "deepseek_v3": (True, MoeLayer),  # latent attention, shared experts
    "gpt_oss": (False, None),  # sinks, and a router with a bias
    "olmoe": (False, MoeLayer),  # by the default rules; its norms are of all heads at once
}

RECURRENT = ("qwen3_next", "qwen3_5_moe_text")


def layers_of(runner: SequenceRunner) -> list[torch.nn.Module]:
    base = getattr(runner.model.model, "inner", runner.model.model)
    return list(base.layers)


@pytest.mark.parametrize("family", NATIVE)
def test_fused_layers_agree_with_transformers(family: str) -> None:
    model = tiny_model(family)
    runner = fused_runner(model)
    has_attention, feed_forward = NATIVE[family]
    fused = [layer for layer in layers_of(runner) if isinstance(layer, FusedLayer)]
    assert any(layer.attention is not None for layer in fused) == has_attention
    if feed_forward is not None:
        assert any(isinstance(layer.feed_forward, feed_forward) for layer in fused)
    ids = random_ids(runner.vocab_size, 13)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = torch.cat([runner.forward(ids[:9], 0, range(9))] + [runner.forward([ids[i]], i, [0]) for i in range(9, 13)])
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("family", RECURRENT)
def test_layers_of_recurrent_families_run_whole_in_native_calls(family: str) -> None:
    """Gated DeltaNets, attention whose output is gated, experts chosen for a row and a shared one."""
    model = recurrent_model(family)
    runner = fused_runner(model)
    layers = layers_of(runner)
    assert all(isinstance(layer, FusedLayer) for layer in layers)
    kinds = [AttentionLayer if layer.mixer == "self_attn" else RecurrentLayer for layer in layers]
    assert [type(layer.attention) for layer in layers] == kinds
    assert set(kinds) == {AttentionLayer, RecurrentLayer}
    assert all(isinstance(layer.feed_forward, MoeLayer) for layer in layers)


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("values", [{}, {"attention_bias": True, "head_dim": 20, "num_key_value_heads": 1}])
def test_gated_attention_computes_what_its_module_does(family: str, values: dict[str, object]) -> None:
    model = recurrent_model(family, layer_types=["full_attention"] * 2, num_hidden_layers=2, **values)
    runner = fused_runner(model)
    assert all(isinstance(layer.attention, AttentionLayer) for layer in layers_of(runner))
    ids = random_ids(runner.vocab_size, 21)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    whole = runner.forward(ids, 0, range(21)).clone()
    assert (whole - want).abs().max() <= TOLERANCE / 2 * want.abs().max()
    for size in (1, 4):
        pieces = [(i, ids[i : i + size]) for i in range(0, 21, size)]
        parts = [runner.forward(piece, i, range(len(piece))).clone() for i, piece in pieces]
        assert torch.equal(torch.cat(parts), whole)


def test_a_layer_whose_attention_is_another_keeps_that_module_only() -> None:
    """Every second layer of this model rotates nothing; the others do."""
    model = random_model(family_config("exaone_moe"), seed=0)
    runner = fused_runner(model)
    layers = layers_of(runner)
    assert [type(layer.feed_forward) for layer in layers] == [MlpLayer, MoeLayer, MoeLayer, MoeLayer]
    assert [layer.attention is None for layer in layers] == [False, True, False, True]
    ids = random_ids(runner.vocab_size, 12)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = runner.forward(ids, 0, range(12))
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "llama"])
def test_a_row_does_not_depend_on_the_rows_beside_it(family: str) -> None:
    runner = fused_runner(tiny_model(family))
    assert all(isinstance(layer, FusedLayer) for layer in layers_of(runner))
    ids = random_ids(runner.vocab_size, 24)
    whole = runner.forward(ids, 0, range(24))
    for size in (1, 3, 11):
        parts = []
        for start in range(0, 24, size):
            piece = ids[start : start + size]
            parts.append(runner.forward(piece, start, range(len(piece))))
        assert torch.equal(torch.cat(parts), whole)


def test_a_layer_arranged_in_another_way_keeps_its_modules() -> None:
    """The same parts, but the feed-forward block reads what the attention read: found out by computing it."""
    model = tiny_model("llama")
    runner = runner_of(model)

    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states), position_embeddings=position_embeddings, **kwargs
        )
        return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))

    kind = type(layers_of(runner)[0])
    parallel = type("ParallelLayer", (kind,), {"forward": forward})
    for layer in layers_of(runner):
        layer.__class__ = parallel
    assert fuse_layers(runner.model, list(runner.cache.shapes), runner.pool, calls_of(runner)) == 0
    assert not any(isinstance(layer, FusedLayer) for layer in layers_of(runner))


def test_latent_attention_is_the_same_inside_and_outside_of_function_modes() -> None:
    """Where all of it is native it leaves the mode that watches a step, and what it computes stays as it was."""
    runner = runner_of(tiny_model("deepseek_v3"))
    found = [module for module in runner.model.modules() if isinstance(module, KMLAAttention)]
    ids = random_ids(runner.vocab_size, 13)
    outside = runner.forward(ids, 0, range(13))
    assert found
    for attention in found:
        assert attention._is_native
        attention._is_native = False
    assert torch.equal(runner.forward(ids, 0, range(13)), outside)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("deepseek_v2", {"q_lora_rank": 24}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"attention_bias": True}),
        ("glm4_moe_lite", None),
    ],
)
def test_latent_attention_computes_what_its_module_does(family: str, values: dict[str, object] | None) -> None:
    """With queries compressed or not, pairs of neighbours or of halves; in chunks of any size."""
    model = random_model(family_config(family) if values is None else tiny_config(family, **values), seed=2)
    runner = fused_runner(model)
    assert all(isinstance(layer.attention, LatentLayer) for layer in layers_of(runner))
    ids = random_ids(runner.vocab_size, 21)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    whole = runner.forward(ids, 0, range(21)).clone()
    assert (whole - want).abs().max() <= TOLERANCE * want.abs().max()
    for size in (1, 4):
        pieces = [(i, ids[i : i + size]) for i in range(0, 21, size)]
        parts = [runner.forward(piece, i, range(len(piece))).clone() for i, piece in pieces]
        assert torch.equal(torch.cat(parts), whole)


def test_latent_attention_with_a_gate_keeps_its_module() -> None:
    runner = fused_runner(random_model(family_config("dots3_note_text"), seed=0))
    layers = [layer for layer in layers_of(runner) if isinstance(layer, FusedLayer)]
    assert not any(isinstance(layer.attention, LatentLayer) for layer in layers)


def test_what_does_not_fit_latent_attention_is_refused() -> None:
    layer = layers_of(fused_runner(tiny_model("deepseek_v3")))[0]
    latent, cache = layer.attention, fused_runner(tiny_model("deepseek_v3")).cache
    assert isinstance(latent, LatentLayer)
    keys, values = cache.layer(0)
    with pytest.raises(ValueError, match="keys must have shape"):
        latent.native_cache(LayerKv(keys[:, :, 1:].contiguous(), values))
    with pytest.raises(ValueError, match="columns of its keys"):
        latent.native_cache(LayerKv(keys, values.contiguous()))
    with pytest.raises(ValueError, match="q must have shape"):
        LatentLayer(latent._kept, 2 * latent.rotary_dims + 2, 1.0, is_interleaved=True)
    with pytest.raises(ValueError, match="not both there"):
        LatentLayer(replace(latent._kept, query_norm=None), 2 * latent.rotary_dims, 1.0, is_interleaved=True)

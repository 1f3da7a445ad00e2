"""Families with latent attention: the cache holds the latent, and logits are those of `transformers` in fp32.

Both sides are fp32 and sum in another order: 5e-5 of the largest logit is some fifty times what that comes to, and a
factor or a rotation left out is off by 0.1 and more. See tests/models/test_agreement.py.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.mistral4.modeling_mistral4 import Mistral4Config, Mistral4ForCausalLM

from benchmarks.sequence import SequenceRunner
from ktransformers.config import EngineConfig
from ktransformers.operators.attention.mla import KMLAAttention
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.runners import random_ids, runner_of
from tests.support.models.latent_models import LATENT_TYPES, latent_model
from tests.support.models.tiny_models import write_safetensors

TOLERANCE = 5e-5
PROMPT_LEN, NUM_STEPS = 64, 16


@pytest.fixture(autouse=True)
def _mistral4(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers has a causal class for it, and does not say so."""
    monkeypatch.setitem(AutoModelForCausalLM._model_mapping._extra_content, Mistral4Config, Mistral4ForCausalLM)


def check_agrees(model: PreTrainedModel, runner: SequenceRunner) -> None:
    """The prompt whole and then token by token: near transformers, and equal to chunks of 7."""
    ids = random_ids(model.config.vocab_size, PROMPT_LEN + NUM_STEPS)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    steps = [(0, PROMPT_LEN), *((at, at + 1) for at in range(PROMPT_LEN, len(ids)))]
    whole = torch.cat([runner.forward(ids[a:b], a, range(b - a)) for a, b in steps])
    assert (whole - want).abs().max() <= TOLERANCE * want.abs().max()
    cuts = [(at, min(at + 7, len(ids))) for at in range(0, len(ids), 7)]
    parts = torch.cat([runner.forward(ids[a:b], a, range(b - a)) for a, b in cuts])
    assert torch.equal(parts, whole)


@pytest.mark.every(3)
@pytest.mark.parametrize("model_type", LATENT_TYPES)
def test_the_latent_is_cached_and_logits_agree(model_type: str) -> None:
    model = latent_model(model_type, seed=1)
    has_rules_for_others = model_type in (
        "kimi_linear",
        "bailing_hybrid",
    )  # layers: tests/engine/step/test_recurrent.py
    runner = runner_of(model, 96, strict=not has_rules_for_others)
    check_agrees(model, runner)
    found = [module for module in runner.model.modules() if isinstance(module, KMLAAttention)]
    assert len(found) == 4
    assert all((shape.is_latent, shape.key_dim) == (True, 32 + 8) for shape in runner.cache.shapes)


def test_a_full_rank_query() -> None:
    model = latent_model("glm4_moe_lite", seed=2, q_lora_rank=None)
    check_agrees(model, runner_of(model, 96))


def test_experts_without_weights_and_two_attentions_of_a_layer_from_files(tmp_path: Path) -> None:
    """transformers saves some of the matrices of experts that have no use for them; they may be left over."""
    model = latent_model("longcat_flash", seed=2)
    write_safetensors(model, tmp_path)
    ids = random_ids(model.config.vocab_size, PROMPT_LEN)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    with closing(static_engine(EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1))) as engine:
        got = engine.runner.forward(ids, 0, range(PROMPT_LEN))
        layer_devices = [layer_device.key for layer_device in engine.plan.layer_devices]
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    assert layer_devices == ["model.layers.0", "model.layers.0", "model.layers.1", "model.layers.1"]

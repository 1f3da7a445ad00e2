"""Operators of recurrent layers: which modules they are for, what a step saves, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import plan_model
from ktransformers.engine.model.skeleton import build_skeleton
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import reference_recurrent
from ktransformers.kernels.recurrent_call import ConvCall
from ktransformers.kernels.triton.recurrent.launch import workspace_nbytes
from ktransformers.kernels.types import StateStep
from ktransformers.models.facts import ModelFacts
from ktransformers.models.layers import mixers
from ktransformers.operators.base import OperatorConfig
from ktransformers.operators.recurrent.base import RecurrentOperator
from ktransformers.operators.recurrent.kinds import KRecurrent
from tests.support.models.recurrent_models import RECURRENT_TYPES, STATES_ONLY, recurrent_config, recurrent_model

KINDS = {
    "qwen3_next": "KGatedDeltaNet",
    "qwen3_5_moe_text": "KGatedDeltaNet",
    "lfm2_moe": "KShortConv",
    "jamba": "KMamba",
    "nemotron_h": "KMamba2",
    "granitemoehybrid": "KMamba2",
    "kimi_linear": "KKimiDeltaAttention",
    "bailing_hybrid": "KKimiDeltaAttention",
    "minimax": "KLightningAttention",
    "zaya": "KConvolvedProjection",
    "olmo_hybrid": "KGatedDeltaParts",
    "falcon_h1": "KMamba2",
    "mamba": "KMamba",
    "falcon_mamba": "KMamba",
    "mamba2": "KMamba2",
    "zamba": "KMambaHeads",
    "zamba2": "KMamba2",
    "recurrent_gemma": "KGatedLinearUnit",
    "lfm3": "KShortConv",
}


@pytest.mark.parametrize("model_type", RECURRENT_TYPES)
def test_the_kind_follows_from_the_module(model_type: str) -> None:
    model = build_skeleton(recurrent_config(model_type))
    config = OperatorConfig(ModelFacts.of(model.config))
    found = {key: module for key, module in model.named_modules() if KRecurrent.is_for(module)}
    assert {type(KRecurrent(module, key, config)).__name__ for key, module in found.items()} == {KINDS[model_type]}
    places = mixers(model)
    if model_type == "zaya":  # a part of attention
        places = {index: f"{key}.qkv_proj" for index, key in places.items()}
    for key, module in found.items():  # a layer that attends, too, counts as one that does
        assert places[module.layer_idx] == key or places[module.layer_idx].endswith(".self_attn")  # type: ignore[index]
    assert (set(found) == set(places.values())) == (model_type in {*STATES_ONLY, "zaya"})
    assert sorted(places) == list(range(model.config.num_hidden_layers))


@pytest.mark.parametrize("model_type", RECURRENT_TYPES)
def test_every_scan_by_head_plans_what_it_works_in(model_type: str) -> None:
    """Scans of states [heads, K, V] go chunk by chunk on a GPU; those of delta rules correct keys and values beside."""
    model = build_skeleton(recurrent_config(model_type))
    config = OperatorConfig(ModelFacts.of(model.config))
    for key, module in model.named_modules():
        if not KRecurrent.is_for(module):
            continue
        operator: RecurrentOperator = KRecurrent(module, key, config)
        sizes = operator.state_parts().get("recurrent", ())
        if len(sizes) < 3:
            assert operator.scan_nbytes(100) == 0
        else:
            is_delta = "Delta" in KINDS[model_type]
            assert operator.scan_nbytes(100) >= workspace_nbytes(100, *sizes, is_delta=is_delta)
            assert operator.scan_nbytes(200) == 2 * operator.scan_nbytes(100)


def test_other_modules_are_refused() -> None:
    config = OperatorConfig(ModelFacts.of(recurrent_config("jamba")))
    with pytest.raises(UnsupportedError, match="Linear is no kind that it knows"):
        KRecurrent(nn.Linear(2, 2), "layers.0.mlp", config)


def test_a_recurrent_layer_without_an_operator_is_refused(tmp_path: Path) -> None:
    recurrent_model("qwen3_next").save_pretrained(tmp_path)
    rules = tmp_path / "rules.yaml"
    text = "- match: {name: '[.]experts$'}\n  replace: {class: ktransformers.operators.experts.KTransformersExperts}\n"
    rules.write_text(text)
    config = EngineConfig(model_path=tmp_path, optimize_config_path=rules)
    with pytest.raises(UnsupportedError, match=r"layer 0 \(linear_attention\) keeps a state, and no operator stands"):
        plan_model(config)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_step_reads_saves_and_writes_the_slots_that_it_names() -> None:
    """A convolution of two taps that adds up: a state is the last input."""
    conv = torch.tensor([[[10.0]], [[20.0]], [[30.0]], [[40.0]], [[50.0]]])
    x = torch.arange(1.0, 8.0).view(7, 1)
    step = StateStep(ints(0, 3, 3, 5), ints(1, -1, -1), ints(2, 4, 0), ints(-1, 3, -1, -1, -1, -1, -1), ints(*[1] * 7))
    out = reference_recurrent.causal_conv(ConvCall(x, torch.ones(1, 2), None, conv, step, activation="none"))
    assert out[:, 0].tolist() == [21.0, 3.0, 5.0, 4.0, 9.0, 0.0, 0.0]
    # slot 2: written; slot 3: saved; slot 4: its sequence has no rows
    assert conv[:, 0, 0].tolist() == [5.0, 20.0, 3.0, 2.0, 50.0]

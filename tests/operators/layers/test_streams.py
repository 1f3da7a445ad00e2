"""Layers over streams of hidden states: native but for what their modules do, and as transformers computes them."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.operators.exact import modules_on_torch
from ktransformers.operators.layers.hyper import KHyperConnection
from ktransformers.operators.layers.streams import StreamsLayer
from tests.support.engines.runners import fused_runner, random_ids
from tests.support.models.agreement import TOLERANCE
from tests.support.models.pooled_models import pooled_model
from tests.support.models.tiny_models import tiny_model


def model_of(family: str) -> PreTrainedModel:
    return tiny_model(family, layers=3) if family == "deepseek_v4" else pooled_model(family, hc_mult=4)


@pytest.mark.parametrize("family", ["deepseek_v4", "glm5_next_text"])
def test_layers_agree_with_transformers(family: str) -> None:
    model = model_of(family)
    runner = fused_runner(model)
    base = runner.model.model
    for layer in getattr(base, "inner", base).layers:
        assert isinstance(layer, StreamsLayer)
        assert layer.is_native
        connection = layer.inner.get_submodule("attn_hc")
        assert isinstance(connection, KHyperConnection)
        assert connection.spec is not None
        assert not modules_on_torch(layer)
    ids = random_ids(runner.vocab_size, 13)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = torch.cat([runner.forward(ids[:9], 0, range(9))] + [runner.forward([ids[i]], i, [0]) for i in range(9, 13)])
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    assert torch.equal(fused_runner(model).forward(ids, 0, range(13)), got)

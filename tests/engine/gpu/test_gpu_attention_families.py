"""Families with shapes by layer, shared keys, chunks and inputs of single layers, on made-up GPUs.

Tolerance: see test_gpu. The prompt is longer than a chunk and a window.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ktransformers.engine.step.layout import StepLayout
from ktransformers.operators.layers.gpu import LayerStack
from tests.support.engines.gpu_engines import gpu_engine, logits_in_steps
from tests.support.models.agreement import TOLERANCE, prompt
from tests.support.models.attention_families import config_of
from tests.support.models.tiny_models import WINDOW, random_model, write_safetensors

pytest.importorskip("triton")

S, F = "sliding_attention", "full_attention"
SMALL: dict[str, dict[str, object]] = {
    "gemma4-shared": {"num_hidden_layers": 4, "layer_types": [S, F, S, F], "num_kv_shared_layers": 2},
    "llama4": {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "layer_types": None},
    "laguna": {
        "num_hidden_layers": 3,
        "layer_types": [F, S, S],
        "num_attention_heads_per_layer": [4, 6, 6],
        "mlp_layer_types": ["dense", "dense", "sparse"],
    },
    "stablelm": {"num_hidden_layers": 2},
}


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "num_gpus"), [("gemma4-shared", 1), ("gemma4-shared", 2), ("llama4", 1), ("laguna", 1), ("stablelm", 1)]
)
def test_on_gpus_as_transformers(name: str, num_gpus: int, tmp_path: Path) -> None:
    model = random_model(config_of(name, **SMALL[name]), seed=1)
    write_safetensors(model, tmp_path)
    engine = gpu_engine(tmp_path, num_gpus, self_check=False, spread_layers=num_gpus > 1)
    ids = prompt(160, WINDOW + 5)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = logits_in_steps(engine, ids)
    shared = [engine.runner.cache.shape(layer).shares for layer in range(model.config.num_hidden_layers)]
    stacks = [len(module.layers) for module in engine.runner.model.modules() if isinstance(module, LayerStack)]
    engine.close()
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    if name == "gemma4-shared":  # a layer on another GPU than the one that it shares with keeps its own
        assert shared == ([None, None, 0, 1] if num_gpus == 1 else [None] * 4)
    if name == "laguna":  # layers of another kind get other angles
        assert stacks == [1, 2]


def test_inputs_of_layers_travel_behind_hidden_states() -> None:
    layout = StepLayout(None, None, (), None, 14, (3, 2))  # type: ignore[arg-type]
    embedded = torch.arange(28.0).view(1, 2, 14)
    parts = layout.split(embedded)
    assert torch.equal(parts["inputs_embeds"], embedded[..., :8])
    assert parts["per_layer_inputs"].shape == (1, 2, 3, 2)
    assert torch.equal(parts["per_layer_inputs"].flatten(2), embedded[..., 8:])

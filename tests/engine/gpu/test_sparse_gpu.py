"""Attention to chosen positions, and latent attention as families have it, on a made-up GPU in fp32.

Logits against `transformers`; decode steps are replayed.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.operators.attention.gqa import KAttention
from ktransformers.operators.attention.indexer import KIndexer
from ktransformers.operators.attention.mla import KMLAAttention
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.runners import random_ids
from tests.support.models.agreement import TOLERANCE
from tests.support.models.family_models import family_config, family_model
from tests.support.models.latent_models import BLOCK_VALUES, INDEXED_TYPES, latent_model
from tests.support.models.pooled_models import POOLED_TYPES, pooled_model
from tests.support.models.tiny_models import random_model, tiny_model, write_safetensors

pytest.importorskip("triton")

BLOCK_TYPE = "minimax_m3_vl_text"
TWO_LAYERS: dict[str, dict[str, object]] = {
    "glm5_next_text": {
        "layer_types": ["indexed_attention"] * 2,
        "indexer_types": ["full", "shared"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "qwen4_exp_text": {"layer_types": ["linear_attention", "indexed_attention"], "ple_layer_ids": [1]},
}
CHUNKS = [(0, 20), (20, 22), (22, 23)]  # 16 positions are chosen


def model_of(model_type: str) -> PreTrainedModel:
    if model_type in POOLED_TYPES:
        return pooled_model(model_type, num_hidden_layers=2, **TWO_LAYERS[model_type])
    if model_type == BLOCK_TYPE:
        kinds = {"layer_types": ["minimax_m3_sparse"] * 2, "mlp_layer_types": ["dense", "sparse"]}
        return tiny_model(model_type, seed=1, **{**BLOCK_VALUES, "layers": 2, **kinds})
    kinds = {"indexer_types": ["full", "shared"]} if model_type == "glm_moe_dsa" else {}
    return latent_model(model_type, seed=1, layers=2, mlp_layer_types=["dense", "sparse"], **kinds)


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize("model_type", [*INDEXED_TYPES, BLOCK_TYPE, *POOLED_TYPES])
def test_chunks_and_replayed_steps_agree_with_transformers(model_type: str, tmp_path: Path) -> None:
    model = model_of(model_type)
    write_safetensors(model, tmp_path)
    ids, graphs = random_ids(model.config.vocab_size, CHUNKS[-1][1]), FakeGraphs()
    config = EngineConfig(model_path=tmp_path, cache_lens=24, cpu_infer=1)
    with closing(static_engine(config, hardware=fake_hardware(graphs=graphs))) as engine:
        got = torch.cat([engine.runner.forward(ids[a:b], a, range(b - a)).clone() for a, b in CHUNKS])
        indexers = [m for m in engine.runner.model.modules() if isinstance(m, KIndexer)]
    assert len(indexers) == (1 if model_type in ("glm_moe_dsa", *POOLED_TYPES) else 2)
    assert graphs.replays > 0
    assert all(indexer.device.is_gpu for indexer in indexers)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", [pytest.param("axk2", marks=pytest.mark.exhaustive), "hy_v4"])
def test_gates_made_with_queries_and_sinks(model_type: str, tmp_path: Path) -> None:
    config = family_config(model_type)
    config.index_head_dim = 32  # half of it is rotated
    model = random_model(config, 1)
    write_safetensors(model, tmp_path)
    ids, graphs = random_ids(model.config.vocab_size, CHUNKS[-1][1]), FakeGraphs()
    settings = EngineConfig(model_path=tmp_path, cache_lens=24, cpu_infer=1, self_check=False)
    with closing(static_engine(settings, hardware=fake_hardware(graphs=graphs))) as engine:
        got = torch.cat([engine.runner.forward(ids[a:b], a, range(b - a)).clone() for a, b in CHUNKS])
        assert {layer_device.device for layer_device in engine.plan.layer_devices} == {"cuda:0"}
    assert graphs.replays > 0
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.every(3)
@pytest.mark.parametrize("model_type", ["bailing_hybrid", "kimi_linear", "longcat_flash"])
def test_gates_scales_and_keys_without_rotation(model_type: str, tmp_path: Path) -> None:
    kinds = {"layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense", "sparse"]}
    values: dict[str, object] = {"layers": 2, **kinds}
    if model_type == "longcat_flash":  # one layer of two attentions
        values = {"layers": 2, "num_layers": 1}
    model = latent_model(model_type, seed=1, **values)
    write_safetensors(model, tmp_path)
    ids, graphs = random_ids(model.config.vocab_size, 12), FakeGraphs()
    config = EngineConfig(model_path=tmp_path, cache_lens=16, cpu_infer=1, self_check=False)
    with closing(static_engine(config, hardware=fake_hardware(graphs=graphs))) as engine:
        steps = [(0, 9), (9, 11), (11, 12)]
        got = torch.cat([engine.runner.forward(ids[a:b], a, range(b - a)).clone() for a, b in steps])
    assert graphs.replays > 0
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "model_type",
    [
        "dots3_note_text",
        *(pytest.param(t, marks=pytest.mark.exhaustive) for t in ("jetmoe", "zaya", "dbrx", "muse_spark")),
    ],
)
def test_attention_and_experts_of_other_forms(model_type: str, tmp_path: Path) -> None:
    """Of 16 positions that are chosen, or that a window has."""
    model = family_model(model_type)
    write_safetensors(model, tmp_path)
    ids = random_ids(model.config.get_text_config(decoder=True).vocab_size, CHUNKS[-1][1])
    config = EngineConfig(model_path=tmp_path, cache_lens=24, cpu_infer=1, self_check=False)
    with closing(static_engine(config, hardware=fake_hardware())) as engine:
        attention = [op for op in engine.plan.operators.values() if isinstance(op, KMLAAttention | KAttention)]
        got = torch.cat([engine.runner.forward(ids[a:b], a, range(b - a)).clone() for a, b in CHUNKS])
    assert len(attention) == 4
    assert all(operator.device.is_gpu for operator in attention)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()

"""Attention over compressed keys, hyper-connections and routers that look up the token, on a made-up GPU in fp32.

Logits against `transformers`; decode steps are replayed.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.engine.builder import build_engine
from ktransformers.operators.attention.compressed import KCompressedAttention
from tests.support.agreement import TOLERANCE
from tests.support.fake_gpus import FakeGraphs, fake_hardware
from tests.support.runners import random_ids
from tests.support.tiny_models import WINDOW, tiny_model, write_safetensors

pytest.importorskip("triton")

CHUNKS = [(0, 37), (37, 42), (42, 49), (49, 50), (50, 51), (51, 52)]  # three windows; 13 entries, 4 are chosen


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("deepseek_v4", seed=3, layers=3)


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek_v4")
    write_safetensors(model, path)
    return path


def test_chunks_and_replayed_steps_agree_with_transformers(model: PreTrainedModel, folder: Path) -> None:
    ids, graphs = random_ids(model.config.vocab_size, CHUNKS[-1][1]), FakeGraphs()
    assert len(ids) > 3 * WINDOW
    config = EngineConfig(model_path=folder, cache_lens=54, cpu_infer=1)
    with closing(build_engine(config, hardware=fake_hardware(graphs=graphs))) as engine:
        got = torch.cat([engine.runner.forward(ids[a:b], a, range(b - a)).clone() for a, b in CHUNKS])
        found = [m for m in engine.runner.model.modules() if isinstance(m, KCompressedAttention)]
    assert len(found) == 3
    assert all(attention.device.is_gpu for attention in found)
    assert graphs.replays == 3
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()

"""Embeddings: pooled from hidden states, the same in every chunk size, and those of plain transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ktransformers.config import EngineConfig
from ktransformers.core import Pooling, SamplingParams
from ktransformers.engine.builder import build_engine
from ktransformers.engine.hidden import HiddenTap, Pooled, pooling_of
from ktransformers.engine.reference import build_reference_engine
from ktransformers.engine.session import Session, SessionEngine
from ktransformers.errors import ConfigError, UnsupportedError
from tests.support.demo import DEMO_GGUF

ROWS = torch.arange(12, dtype=torch.float32).view(4, 3)
IDS = tuple(range(5, 35))


@pytest.mark.parametrize("cuts", [(4,), (1, 3), (2, 1, 1)])
def test_pooling(cuts: tuple[int, ...]) -> None:
    for pooling, expected in ((Pooling.LAST, [9.0, 10.0, 11.0]), (Pooling.MEAN, [4.5, 5.5, 6.5])):
        pooled = Pooled(pooling)
        for part in ROWS.split(cuts):
            pooled.add(part)
        assert np.frombuffer(pooled.vector(), "<f4").tolist() == expected


@pytest.mark.parametrize(
    ("modes", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, Pooling.LAST),
        ({"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True}, None),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, None),
        ({}, None),
    ],
)
def test_a_model_says_how_it_is_pooled(modes: dict[str, bool], pooling: Pooling | None, tmp_path: Path) -> None:
    assert pooling_of(None, tmp_path) is Pooling.LAST
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    file.write_text(json.dumps(modes))
    assert pooling_of(None, tmp_path) is pooling
    file.write_text("[")
    with pytest.raises(ConfigError, match="cannot be read"):
        pooling_of(tmp_path)


def test_a_model_without_a_decoder_of_its_own_makes_none() -> None:
    with pytest.raises(UnsupportedError, match="makes no embeddings"), HiddenTap(nn.Linear(2, 2)).watch():
        pass


def _embedding(engine: SessionEngine, pooling: Pooling) -> np.ndarray:
    """Of IDS, asked for twice: the second time the prompt is in the cache."""
    session, found = Session.of(engine), []
    for _ in range(2):
        first, second = session.generate(IDS, SamplingParams(temperature=0, max_tokens=2, pooling=pooling))
        assert second.embedding is None
        assert first.embedding is not None
        found.append(first.embedding)
    assert first.stats.cached_len == (0 if pooling is Pooling.MEAN else len(IDS) - 1)
    before, after = (np.frombuffer(one, "<f4") for one in found)
    assert np.allclose(before, after, rtol=1e-4, atol=1e-5)
    return before


@pytest.mark.parametrize("pooling", list(Pooling))
def test_embeddings_are_those_of_transformers(pooling: Pooling) -> None:
    configs = [EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=64, chunk_size=size) for size in (8, 64)]
    chunked, whole = (_embedding(build_engine(config), pooling) for config in configs)
    expected = _embedding(build_reference_engine(configs[0]), pooling)
    assert np.allclose(chunked, whole, rtol=1e-6, atol=1e-6)
    if pooling is Pooling.LAST:
        assert (chunked == whole).all()
    assert float(whole @ expected) > 0.999 * float(np.linalg.norm(whole) * np.linalg.norm(expected))


def test_a_pooling_is_named() -> None:
    with pytest.raises(ConfigError, match="pooling must be None or a Pooling, got 'mean'"):
        SamplingParams(pooling="mean")  # type: ignore[arg-type]

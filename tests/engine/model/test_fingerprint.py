"""Fingerprints: equal where everything is computed the same, different wherever anything may differ."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.model.fingerprint import ModelIdentity
from tests.support.engines.one_sequence import static_engine
from tests.support.models.tiny_models import SCALED_ROPES, tiny_model


def identity(config: EngineConfig, page_size: int | None = None) -> ModelIdentity:
    if page_size is None:
        engine: Any = static_engine(config)
    else:
        engine = build_engine(config, page_size=page_size, max_batch_size=2)
    engine.close()
    found: ModelIdentity = engine.identity
    return found


ROPE = {"rope_type": "default", "rope_theta": 5000.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In BF16, so that experts can be quantized."""
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3_moe", seed=6).bfloat16().save_pretrained(path)
    return path


def config_of(folder: Path, **values: Any) -> EngineConfig:
    return EngineConfig(model_path=folder, cpu_infer=1, self_check=False, **({"cache_lens": 128} | values))


def test_what_does_not_matter(folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    want = identity(config_of(folder))
    assert len(want.digest) == 32
    assert identity(config_of(moved, cache_lens=256, chunk_size=32, prefix_cache=False)).digest == want.digest
    assert identity(replace(config_of(folder), cpu_infer=2), page_size=16).digest == want.digest


def test_what_matters(folder: Path, tmp_path: Path) -> None:
    want = identity(config_of(folder))
    found = {"": want.digest}
    for name, values in {
        "quant": {"cpu_quant": "q8_0"},
        "bf16": {"cpu_bf16": "fp32"},
        "prefill": {"cpu_prefill": "bf16"},
        "activations": {"cpu_activations": "int16"},
    }.items():
        other = identity(config_of(folder, **values))
        assert want.other_model(other) is None
        assert want.other_arithmetic(other) is not None, name
        found[name] = other.digest
    assert "cpu_quant was None and is q8_0" in str(identity(config_of(folder, cpu_quant="q8_0")).other_arithmetic(want))
    for name, model, reason in (
        ("weights", tiny_model("qwen3_moe", seed=7), "other weights"),
        ("fp32", tiny_model("qwen3_moe", seed=6).float(), "another model|weights in"),
        ("layers", tiny_model("qwen3_moe", seed=6, layers=3), "another model"),
        ("theta", tiny_model("qwen3_moe", seed=6, rope_parameters=ROPE), "another model"),
    ):
        path = tmp_path / name
        (model if name == "fp32" else model.bfloat16()).save_pretrained(path)
        other = identity(config_of(path))
        why = want.other_model(other)
        assert why is not None
        assert any(part in why for part in reason.split("|")), why
        found[name] = other.digest
    assert len(set(found.values())) == len(found)


def test_rotations_that_depend_on_the_longest_position(tmp_path: Path) -> None:
    rope, values = SCALED_ROPES["llama"]
    tiny_model("llama", seed=6, rope_parameters=rope, **values).save_pretrained(tmp_path)
    short, long = (identity(config_of(tmp_path, cache_lens=length)) for length in (32, 48))
    assert short.other_model(long) is None
    assert "the longest position was 47 and is 31" in str(short.other_arithmetic(long))

"""Windows, layers without rotation and scaled RoPE, at lengths where they show, against `transformers` in fp32.

Tolerance: see test_agreement. A window that is dropped, or a rotation too many, is off by 0.1 and more.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.errors import UnsupportedError
from ktransformers.operators.attention.rope import _log_resolved
from ktransformers.operators.layers.cpu import FusedLayer
from ktransformers.operators.layers.native_stack import NativeStack
from ktransformers.operators.layers.traced import decoder_layers
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.models.agreement import TOLERANCE
from tests.support.models.tiny_models import (
    SCALED_ROPES,
    UNROTATED_TYPES,
    WINDOW,
    WINDOWED_TYPES,
    random_model,
    tiny_config,
    write_safetensors,
)

PROMPT_LEN = 48  # some windows, and whole pages
CACHE_LEN = 64


def tokens(vocab_size: int, count: int = PROMPT_LEN) -> list[int]:
    return torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(7)).tolist()


def engine_of(model: PreTrainedModel, folder: Path, cache_lens: int = CACHE_LEN) -> StaticEngine:
    write_safetensors(model, folder)
    return static_engine(EngineConfig(model_path=folder, cache_lens=cache_lens, cpu_infer=2))


def check_agrees(model: PreTrainedModel, engine: StaticEngine) -> None:
    """Whole, in chunks and token by token: near transformers, and equal to each other."""
    ids = tokens(model.config.vocab_size)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    whole = engine.runner.forward(ids, 0, range(len(ids)))
    assert (whole - want).abs().max() <= TOLERANCE * want.abs().max()
    for size in (1, 7, WINDOW + 1):
        parts = [
            engine.runner.forward(ids[at : at + size], at, range(len(ids[at : at + size])))
            for at in range(0, len(ids), size)
        ]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {size}"


@pytest.mark.every(4)
@pytest.mark.parametrize("model_type", sorted({*WINDOWED_TYPES, *UNROTATED_TYPES}))
def test_windows_and_layers_without_rotation(model_type: str, tmp_path: Path) -> None:
    model = random_model(tiny_config(model_type, layers=4), seed=1)
    engine = engine_of(model, tmp_path)
    try:
        check_agrees(model, engine)
    finally:
        engine.close()


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "smollm3"])
def test_layers_with_windows_or_without_rotation_are_fused_where_the_native_call_computes_them(
    model_type: str, tmp_path: Path
) -> None:
    engine = engine_of(random_model(tiny_config(model_type, layers=4), seed=1), tmp_path)
    places = decoder_layers(engine.runner.model)
    engine.close()
    # All of them native: one stack holds them.
    layers = list(places[0].layers) if isinstance(places[0], NativeStack) else places
    has_attention = [isinstance(layer, FusedLayer) and layer.attention is not None for layer in layers]
    # smollm3: every other layer does not rotate, which the native call always does.
    assert has_attention == ([True, False] * 2 if model_type == "smollm3" else [True] * 4)


@pytest.mark.parametrize("model_type", SCALED_ROPES)
def test_factors_are_those_of_the_longest_sequence(model_type: str, tmp_path: Path) -> None:
    """transformers takes them from the longest position of a step, so a prompt that fills the cache is the oracle."""
    rope, values = SCALED_ROPES[model_type]
    model = random_model(tiny_config(model_type, rope_parameters=rope, **values), seed=2)
    engine = engine_of(model, tmp_path, cache_lens=PROMPT_LEN)
    try:
        check_agrees(model, engine)
    finally:
        engine.close()


def test_short_factors_where_no_sequence_can_be_long(tmp_path: Path) -> None:
    rope, values = SCALED_ROPES["phi3"]
    model = random_model(tiny_config("phi3", rope_parameters=rope, **values), seed=2)
    engine = engine_of(model, tmp_path, cache_lens=16)
    ids = tokens(model.config.vocab_size, 16)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = engine.runner.forward(ids, 0, range(len(ids)))
    engine.close()
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


def test_a_window_that_only_the_mask_knows_is_refused(tmp_path: Path) -> None:
    """PhiMoE's attention is not told its window; where no sequence is longer, nothing is lost."""
    model = random_model(tiny_config("phimoe", sliding_window=WINDOW), seed=1)
    with pytest.raises(UnsupportedError, match=r"layer 0 \(PhimoeDecoderLayer\).*16 positions back.*--cache_lens 16"):
        engine_of(model, tmp_path)
    engine = static_engine(EngineConfig(model_path=tmp_path, cache_lens=WINDOW, cpu_infer=1))
    ids = tokens(model.config.vocab_size, WINDOW)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = engine.runner.forward(ids, 0, range(WINDOW))
    engine.close()
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize(
    ("model_type", "values", "reason"),
    [
        ("diffllama", {}, "calls attention 2 times"),
    ],
)
def test_what_cannot_run_is_refused_while_loading(
    model_type: str, values: dict[str, object], reason: str, tmp_path: Path
) -> None:
    model = random_model(tiny_config(model_type, **values), seed=1)
    with pytest.raises(UnsupportedError, match=reason):
        engine_of(model, tmp_path)


def test_the_log_says_which_factors_were_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rope, values = SCALED_ROPES["phi3"]
    _log_resolved.cache_clear()  # it is said once a process, and another test may have made it do so
    with caplog.at_level(logging.INFO, logger="ktransformers"):
        engine_of(random_model(tiny_config("phi3", rope_parameters=rope, **values)), tmp_path).close()
    assert "RoPE of type longrope: every step has the factors of 64 positions (--cache_lens)" in caplog.text

"""A model's figures, from both formats of the bundled model."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from ktransformers.config import EngineConfig
from ktransformers.engine.model.card import ModelCard
from ktransformers.engine.model.opened import describe_model, open_model
from tests.support.models.demo import DEMO_GGUF

CHECKPOINT = Path(__file__).resolve().parents[3] / "examples" / "demo_model" / "checkpoint"


def card(config: EngineConfig) -> ModelCard:
    return describe_model(open_model(config)).card


def test_both_formats_are_one_model() -> None:
    packed, plain = card(EngineConfig(gguf_path=DEMO_GGUF)), card(EngineConfig(model_path=CHECKPOINT))
    assert (packed.family, packed.format, packed.quantization) == ("qwen3moe", "gguf", "Q4_K_M")
    assert (plain.family, plain.format, plain.quantization) == ("qwen3_moe", "safetensors", "BF16")
    drafting = sum(tensor.numel() for tensor in load_file(CHECKPOINT / "mtp.safetensors").values())
    assert packed.num_parameters == plain.num_parameters == plain.num_bytes / 2 - drafting
    assert packed.num_bytes < DEMO_GGUF.stat().st_size
    for one in (packed, plain):
        assert (one.num_layers, one.hidden_size, one.num_heads, one.num_kv_heads) == (4, 256, 8, 2)
        assert (one.num_experts, one.num_used_experts) == (16, 4)
    assert packed.digest != plain.digest
    assert packed.modified == DEMO_GGUF.stat().st_mtime
    assert card(EngineConfig(gguf_path=DEMO_GGUF)) == packed


@pytest.mark.parametrize(("number", "name"), [(15, "Q4_K_M"), (140, "IQ4_K"), (156, "IQ1_KT")])
def test_file_types_have_the_names_of_who_gave_the_numbers(
    number: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """140 is ik_llama.cpp's LLAMA_FTYPE_MOSTLY_IQ4_K, which the gguf package does not know."""
    opened = open_model(EngineConfig(gguf_path=DEMO_GGUF))
    assert opened.gguf is not None
    monkeypatch.setitem(opened.gguf.metadata, "general.file_type", number)
    assert describe_model(opened).card.quantization == name


def test_an_unknown_file_type_is_the_type_of_most_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_model(EngineConfig(gguf_path=DEMO_GGUF))
    assert opened.gguf is not None
    monkeypatch.setitem(opened.gguf.metadata, "general.file_type", 9999)
    assert describe_model(opened).card.quantization == max(opened.stored, key=opened.stored.__getitem__)

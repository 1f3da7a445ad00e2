"""What a draft model is opened with, and which tokens it must have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from ktransformers.config import EngineConfig
from ktransformers.engine.model.draft_model import check_same_tokens, draft_config
from ktransformers.errors import ConfigError
from ktransformers.tokenizer import Tokenizer
from tests.support.engines.fake_runner import byte_tokenizer


def changed(swap: tuple[str, str] | None = None, without: str | None = None, special: str | None = None) -> Tokenizer:
    """The bytes' tokenizer with two tokens in each other's place, without one, or with another special token more."""
    values: dict[str, Any] = json.loads(byte_tokenizer().backend.backend_tokenizer.to_str())
    vocab = values["model"]["vocab"]
    if swap is not None:
        vocab[swap[0]], vocab[swap[1]] = vocab[swap[1]], vocab[swap[0]]
    if without is not None:
        del vocab[without]
    if special is not None:
        values["added_tokens"].append(values["added_tokens"][0] | {"content": special, "id": 300})
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=RustTokenizer.from_str(json.dumps(values))))


def test_the_same_tokens_are_good_and_special_ones_may_differ() -> None:
    check_same_tokens(byte_tokenizer(), byte_tokenizer(), "small")
    check_same_tokens(byte_tokenizer(), changed(special="<|more|>"), "small")
    check_same_tokens(changed(special="<|more|>"), byte_tokenizer(), "small")
    check_same_tokens(Tokenizer(None), byte_tokenizer(), "small")  # nobody knows


def test_other_tokens_are_refused_by_name() -> None:
    ids = sorted(byte_tokenizer().backend.get_vocab()[letter] for letter in "ab")
    with pytest.raises(
        ConfigError, match=f"--draft_model small has other tokens .*: token {ids[0]} is 'a' there 'b', "
    ):
        check_same_tokens(byte_tokenizer(), changed(swap=("a", "b")), "small")
    with pytest.raises(ConfigError, match="is 'q' there missing; take a smaller model of the same family"):
        check_same_tokens(byte_tokenizer(), changed(without="q"), "small")
    with pytest.raises(ConfigError, match="--draft_model small has no tokenizer"):
        check_same_tokens(byte_tokenizer(), Tokenizer(None), "small")


def test_it_is_opened_with_what_is_said_of_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    target = EngineConfig(cpu_prefill="bf16", cpu_infer=3, hot_experts="auto", kv_type="int8", draft_model=file)
    made = draft_config(target)
    assert (made.gguf_path, made.model_path, made.use_cuda, made.cpu_infer) == (file, None, None, 3)
    assert (made.cpu_prefill, made.hot_experts, made.kv_type, made.drafter) == ("bf16", "off", "auto", "ngram")
    (tmp_path / "config.json").write_text("{}")
    made = draft_config(EngineConfig(draft_model=tmp_path))
    assert (made.gguf_path, made.model_path) == (None, tmp_path)

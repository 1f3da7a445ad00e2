"""Small tokenizers made from scratch, and the GGUF metadata that describes them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from tests.support.gguf.vocabularies import gguf_metadata, train_byte_level


@pytest.fixture(scope="session")
def qwen_like() -> Tokenizer:
    from tokenizers import Regex

    return train_byte_level(pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"), nfc=True)


@pytest.fixture(scope="session")
def qwen_metadata(qwen_like: Tokenizer) -> dict[str, Any]:
    return gguf_metadata(qwen_like, "qwen2")

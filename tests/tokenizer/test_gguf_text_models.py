"""Tokenizer models of GGUF files whose tokens are text: "t5" (unigram) and "gemma4" (BPE), against their originals."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as proto
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from ktransformers.errors import ConfigError
from ktransformers.tokenizer import load_tokenizer
from ktransformers.tokenizer.gguf_vocab import build_gguf_tokenizer, read_gguf_vocab
from ktransformers.tokenizer.pattern_limits import unknown_patterns
from tests.support.gguf.vocabularies import CORPUS, STRINGS

TEXTS = [
    *STRINGS,
    "  two  spaces   and\ttabs\n\nlines ",
    "ﬁ ½ ＡＢＣ e\u0301",
    "   ",
    "the quick\u3000brown 狐 \u00a0fox",
]


def train_unigram(**options: Any) -> sentencepiece.SentencePieceProcessor:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=written, model_type="unigram", minloglevel=2, num_threads=1,
        vocab_size=220 + 256 * options.get("byte_fallback", False), hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, **options,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def t5_metadata(original: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """What llama.cpp's converter writes for a T5 model."""
    stated = proto.ModelProto.FromString(original.serialized_model_proto())
    kinds = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6}  # both formats count alike
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [piece.piece for piece in stated.pieces],
        "tokenizer.ggml.scores": np.array([piece.score for piece in stated.pieces], dtype=np.float32),
        "tokenizer.ggml.token_type": [kinds[piece.type] for piece in stated.pieces],
        "tokenizer.ggml.add_space_prefix": stated.normalizer_spec.add_dummy_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": stated.normalizer_spec.remove_extra_whitespaces,
        "tokenizer.ggml.precompiled_charsmap": np.frombuffer(stated.normalizer_spec.precompiled_charsmap, np.uint8),
    }


def rebuilt(metadata: dict[str, Any]) -> Tokenizer:
    return build_gguf_tokenizer(read_gguf_vocab(metadata)).backend_tokenizer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"remove_extra_whitespaces": False},
        {"add_dummy_prefix": False},
        {"byte_fallback": True},
        {"normalization_rule_name": "identity"},
    ],
    ids=str,
)
def test_unigram_ids_equal_sentencepiece(options: dict[str, Any]) -> None:
    original = train_unigram(**options)
    ours = rebuilt(t5_metadata(original))
    assert unknown_patterns(ours) == []
    for text in TEXTS:
        if options.get("remove_extra_whitespaces") is False:  # tokenizers takes \r\n for one character, and one space
            text = text.replace("\r\n", "\n")
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == original.encode(text), text
        if 2 not in ids:  # the token of what is unknown has no text
            assert ours.decode(ids, skip_special_tokens=True) == original.decode(ids)


def test_t5_ends_texts() -> None:
    original = train_unigram()
    assert load_tokenizer(None, t5_metadata(original)).encode("Hello") == [*original.encode("Hello"), 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.scores": None}, "scores"),
        ({"tokenizer.ggml.precompiled_charsmap": [1, 2, 300]}, "array of bytes"),
        ({"tokenizer.ggml.precompiled_charsmap": [1, 2, 3]}, "cannot be built"),
    ],
)
def test_hostile_unigrams_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rebuilt(t5_metadata(train_unigram()) | change)


def gemma_like() -> Tokenizer:
    """As Gemma 4's tokenizer.json: BPE over the whole text, spaces spelled as U+2581, bytes as fallback."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, "\n\n\n", "a\n\n  b"] * 2, trainer)
    return tokenizer


def gemma_metadata(tokenizer: Tokenizer) -> dict[str, Any]:
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.token_type": [6 if t.startswith("<0x") else 3 if i < 6 else 1 for i, t in enumerate(tokens)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }


def test_gemma4_ids_equal_the_original() -> None:
    original = gemma_like()
    metadata = gemma_metadata(original)
    ours = rebuilt(metadata)
    for text in [*TEXTS, "\n\n\n\n", "x\n\n  y", "<|turn>user\nhi<turn|>"]:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == original.encode(text).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text
    loaded = load_tokenizer(None, metadata)
    assert loaded.encode("Hello")[0] == 2
    assert loaded.eos_token_ids == (1, 5)


@pytest.mark.parametrize(("pre", "adds_bos"), [("sarvam-moe", False), ("granite-embed-multi-311m", True)])
def test_text_bpe_by_its_pre_tokenizer(pre: str, adds_bos: bool) -> None:
    metadata = gemma_metadata(gemma_like())
    named = metadata | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
    ids = rebuilt(metadata).encode("a  b 狐\n", add_special_tokens=False).ids
    assert rebuilt(named).encode("a  b 狐\n").ids == [2] * adds_bos + ids


def test_gemma4_needs_merges() -> None:
    with pytest.raises(ConfigError, match="merges"):
        rebuilt(gemma_metadata(gemma_like()) | {"tokenizer.ggml.merges": None})

"""Tokenizers that come back from a GGUF as they went in, and those that cannot."""

from __future__ import annotations

import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ktransformers.convert.vocab import PROBE, vocab_metadata
from ktransformers.errors import UnsupportedError
from ktransformers.tokenizer.gguf_vocab import build_gguf_tokenizer, read_gguf_vocab
from ktransformers.tokenizer.pretokenizers import PRE_TOKENIZERS
from tests.support.gguf.vocabularies import CHAT_TEMPLATE, STRINGS, train_byte_level


def comes_back(backend: PreTrainedTokenizerFast, vocab_size: int = 0) -> dict[str, object]:
    values = {key: one.value for key, one in vocab_metadata(backend, vocab_size or len(backend)).items()}
    back = build_gguf_tokenizer(read_gguf_vocab(values))
    for text in (*STRINGS, PROBE):
        assert back(text)["input_ids"] == backend(text)["input_ids"]
    assert back.chat_template == backend.chat_template
    return values


def cut(pre: str) -> pre_tokenizers.PreTokenizer:
    """A rule's patterns, without the spelling of bytes."""
    patterns = PRE_TOKENIZERS[pre].patterns
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(one), behavior="isolated") for one in patterns])


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "deepseek-v3", "gpt-4o", "tekken"])
def test_byte_level(pre: str) -> None:
    """The name that is found stands for the same rule."""
    rule = PRE_TOKENIZERS[pre]
    fast = train_byte_level(cut(pre), rule.nfc, rule.ignore_merges)
    backend = PreTrainedTokenizerFast(
        tokenizer_object=fast, chat_template=CHAT_TEMPLATE, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    values = comes_back(backend, len(backend) + 3)
    assert PRE_TOKENIZERS[str(values["tokenizer.ggml.pre"])].patterns == rule.patterns
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    assert (tokens[-1], types[-1]) == (f"[PAD{len(tokens) - 1}]", 5)
    assert types[tokens.index("<|im_end|>")] == 3
    assert types[tokens.index("<think>")] == 4
    assert values["tokenizer.ggml.eos_token_id"] == tokens.index("<|im_end|>")
    assert values["tokenizer.ggml.add_bos_token"] is False


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2's tokenizer.json: bytes, then pieces by merges."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    letters = sorted({*"abcdefghijklmnopqrstuvwxyz"})
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("i", "n"), ("in", "g"), ("\u2581", "a"), ("e", "r")]
    pieces += [*letters, *("".join(pair) for pair in merges)]
    model = models.BPE(
        {piece: at for at, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    fast = Tokenizer(model)
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    content = json.loads(fast.to_str())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    whole = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(
        tokenizer_object=whole, unk_token=backend.unk_token, bos_token="<s>", eos_token="</s>"
    )


def test_sentencepiece() -> None:
    values = comes_back(sentencepiece())
    assert values["tokenizer.ggml.model"] == "llama"
    assert values["tokenizer.ggml.add_bos_token"] is True
    tokens, scores, types = (values[f"tokenizer.ggml.{one}"] for one in ("tokens", "scores", "token_type"))
    assert isinstance(tokens, list)
    assert isinstance(scores, list)
    assert isinstance(types, list)
    assert scores[tokens.index("th")] > scores[tokens.index("the")] > scores[tokens.index("ing")]
    assert types[tokens.index("<0x41>")] == 6


def test_others_are_refused() -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    with pytest.raises(UnsupportedError, match="type 'WordLevel' cannot be written"):
        vocab_metadata(words, 2)
    fast = train_byte_level(cut("gpt-2"), nfc=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(False)])
    with pytest.raises(UnsupportedError, match="none of the rules that GGUF has names for"):
        vocab_metadata(PreTrainedTokenizerFast(tokenizer_object=fast), 0)
    with pytest.raises(UnsupportedError, match="the tokenizer has token 100, the model 100 tokens"):
        vocab_metadata(PreTrainedTokenizerFast(tokenizer_object=train_byte_level(cut("gpt-2"), nfc=False)), 100)

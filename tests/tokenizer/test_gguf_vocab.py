"""Tokenizers rebuilt from GGUF metadata give the ids of the tokenizers that they came from."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from ktransformers.errors import ConfigError, KTransformersError, UnsupportedError
from ktransformers.tokenizer import load_tokenizer
from ktransformers.tokenizer.gguf_vocab import build_gguf_tokenizer, read_gguf_vocab
from ktransformers.tokenizer.pretokenizers import PRE_TOKENIZERS, find_pre_tokenizer
from tests.support.gguf.vocabularies import STRINGS, gguf_metadata, train_byte_level


def rebuilt(metadata: dict[str, Any]) -> Tokenizer:
    return build_gguf_tokenizer(read_gguf_vocab(metadata)).backend_tokenizer


# Each as its model's tokenizer.json has it, written out here independently of the table under test.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]


# As in the tokenizer's own tokenization_kimi.py; && is "and": words of Han end where other letters begin.
KIMI_K2 = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)


def split_sequence(patterns: list[str]) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])


ORACLES = {
    "qwen2": (split_sequence([QWEN2]), True, False),
    "llama-bpe": (split_sequence([LLAMA3]), False, True),
    "glm4": (split_sequence([LLAMA3]), False, False),
    "deepseek-v3": (split_sequence(DEEPSEEK_V3), False, False),
    "kimi-k2": (split_sequence([KIMI_K2]), False, True),
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True), False, False),
    "starcoder": (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        False,
        False,
    ),
}


def oracle(pre: str) -> Tokenizer:
    split, nfc, ignore_merges = ORACLES[pre]
    if pre not in ("gpt-2", "starcoder"):
        return train_byte_level(split, nfc, ignore_merges)
    tokenizer = train_byte_level(split_sequence([QWEN2]), nfc, ignore_merges)
    tokenizer.pre_tokenizer = split  # spells bytes itself
    return tokenizer


@pytest.mark.parametrize("pre", sorted(ORACLES))
def test_ids_equal_the_original(pre: str) -> None:
    original = oracle(pre)
    ours = rebuilt(gguf_metadata(original, pre))
    assert [ours.encode(text).ids for text in STRINGS] == [original.encode(text).ids for text in STRINGS]


@pytest.mark.parametrize("pre", [name for name, rule in sorted(PRE_TOKENIZERS.items()) if rule.byte_level])
def test_every_pre_tokenizer_loses_nothing(pre: str, qwen_like: Tokenizer) -> None:
    ours = rebuilt(gguf_metadata(qwen_like, pre))
    for text in STRINGS:
        normalized = normalizers.NFC().normalize_str(text) if find_pre_tokenizer(pre).nfc else text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == normalized


def test_special_tokens_are_whole_and_skipped(qwen_metadata: dict[str, Any]) -> None:
    ours = rebuilt(qwen_metadata)
    ids = ours.encode("<|im_start|>a<think>").ids
    assert ids == [ours.token_to_id("<|im_start|>"), ours.token_to_id("a"), ours.token_to_id("<think>")]
    assert ours.decode(ids) == "a<think>"


def test_control_tokens_outside_of_the_byte_alphabet(qwen_like: Tokenizer) -> None:
    """DeepSeek spells its control tokens with characters that byte-level BPE never produces."""
    tokenizer = Tokenizer.from_str(qwen_like.to_str())
    tokenizer.add_special_tokens([AddedToken("<｜begin▁of▁sentence｜>", special=True, normalized=False)])
    metadata = gguf_metadata(tokenizer, "qwen2")
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    metadata["tokenizer.ggml.token_type"][last] = 3
    metadata |= {"tokenizer.ggml.bos_token_id": last, "tokenizer.ggml.add_bos_token": True}
    assert rebuilt(metadata).encode("<｜begin▁of▁sentence｜>a").ids == [last, last, *tokenizer.encode("a").ids]


def test_numpy_arrays_and_end_tokens(qwen_metadata: dict[str, Any]) -> None:
    kinds = np.array(qwen_metadata["tokenizer.ggml.token_type"], dtype=np.int32)
    tokenizer = load_tokenizer(None, qwen_metadata | {"tokenizer.ggml.token_type": kinds})
    assert tokenizer.eos_token_ids == (tokenizer.token_id("<|im_end|>"),)
    named = load_tokenizer(None, qwen_metadata | {"tokenizer.ggml.eos_token_id": tokenizer.token_id("<|endoftext|>")})
    assert named.eos_token_ids == (tokenizer.token_id("<|endoftext|>"), tokenizer.token_id("<|im_end|>"))


@pytest.mark.parametrize(
    ("added", "named", "ends"),
    [
        (["<|end|>", "<|eot_id|>"], [], ["<|end|>", "<|eot_id|>"]),
        (["<|end|>", "<|return|>", "<|call|>"], [], ["<|return|>", "<|call|>"]),  # gpt-oss: messages of one answer
        (["<|end|>", "<|return|>"], [], ["<|end|>", "<|return|>"]),
        (["<|call|>", "<x>"], ["<x>"], ["<x>"]),
        (["<|end|>"], ["<|end|>", "a"], ["<|end|>", "a"]),
    ],
)
def test_what_ends_an_answer(added: list[str], named: list[str], ends: list[str], qwen_like: Tokenizer) -> None:
    """Control tokens that are known, and what `eos_token_ids` lists, as Ollama's converter writes it."""
    tokenizer = Tokenizer.from_str(qwen_like.to_str())
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    metadata = gguf_metadata(tokenizer, "qwen2")
    metadata.pop("tokenizer.ggml.eos_token_id", None)
    kinds = [3 if token in added else 1 for token in metadata["tokenizer.ggml.tokens"]]
    ids = np.array([tokenizer.token_to_id(token) for token in named], dtype=np.int32)
    metadata |= {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eos_token_ids": ids}
    vocab = read_gguf_vocab(metadata)
    assert {vocab.tokens[one] for one in vocab.eos_token_ids()} == set(ends)
    for wrong in ([len(kinds)], [-1], ["a"], [True]):
        with pytest.raises(ConfigError, match="eos_token_ids must be ids"):
            read_gguf_vocab(metadata | {"tokenizer.ggml.eos_token_ids": wrong})


def test_tokens_beyond_the_embedding_table_are_left_aside(
    qwen_metadata: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Ollama's Gemma 3 lists one for images; here one that a merge makes, too."""
    size = len(qwen_metadata["tokenizer.ggml.tokens"])
    longer = dict(qwen_metadata)
    longer["tokenizer.ggml.tokens"] = [*qwen_metadata["tokenizer.ggml.tokens"], "zqz", "<image>"]
    longer["tokenizer.ggml.token_type"] = [*qwen_metadata["tokenizer.ggml.token_type"], 1, 3]
    tokens = set(longer["tokenizer.ggml.tokens"])
    pair = next((f"{a} {b}" for a, b in (("z", "qz"), ("zq", "z")) if {a, b} <= tokens), None)
    if pair is None:
        longer["tokenizer.ggml.tokens"][-2], pair = "zq", "z q"
    longer["tokenizer.ggml.merges"] = [*qwen_metadata["tokenizer.ggml.merges"], pair]
    cut, expected = load_tokenizer(None, longer, vocab_size=size), load_tokenizer(None, qwen_metadata)
    assert "2 tokens more than the model" in caplog.text
    assert cut.vocab_size == expected.vocab_size == size
    for text in (*STRINGS, "a <image> zqz"):
        assert cut.encode(text) == expected.encode(text)
    assert len(read_gguf_vocab(longer).tokens) == len(read_gguf_vocab(longer, size + 2).tokens) == size + 2
    assert len(read_gguf_vocab(qwen_metadata, size + 64).tokens) == size  # rows that no token is for
    with pytest.raises(ConfigError, match="eos_token_id"):
        read_gguf_vocab(longer | {"tokenizer.ggml.eos_token_id": size}, size)


# --- SentencePiece ---------------------------------------------------------------------------------------------------

PIECES = [
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "▁h",
    "he",
    "ll",
    "▁he",
    "llo",
    "▁hello",
    "wo",
    "▁wo",
    "rld",
    "ld",
    "你",
    "▁▁",
]


def spm_metadata(add_space_prefix: bool = True) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "[INST]"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES))] + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


def spm_encode(text: str) -> list[int]:
    """SentencePiece's BPE, naively: merge the adjacent pair of best score, leftmost first; then byte fallback."""
    ids = {piece: 259 + i for i, piece in enumerate(PIECES)}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        best = [(-ids[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
        if not best:
            break
        at = -max(best)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("text", ["hello world", "hello  hello", "wo rld ll", "你好", "héllo", "he  llo", "x"])
def test_sentencepiece_ids(text: str) -> None:
    tokenizer = load_tokenizer(None, spm_metadata())
    assert tokenizer.encode(text) == [1, *spm_encode(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_prefix_after_special_tokens() -> None:
    tokenizer = load_tokenizer(None, spm_metadata())
    inst = tokenizer.token_id("[INST]")
    assert tokenizer.encode("hello[INST]hello", add_special_tokens=False) == [
        *spm_encode("hello"),
        inst,
        *spm_encode("hello"),
    ]
    bare = load_tokenizer(None, spm_metadata(add_space_prefix=False))
    assert bare.encode("llo", add_special_tokens=False) == [tokenizer.token_id("llo")]
    assert bare.decode(bare.encode(" llo", add_special_tokens=False)) == " llo"


def test_sentencepiece_equals_transformers() -> None:
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    metadata = spm_metadata()
    scores = dict(zip(PIECES, metadata["tokenizer.ggml.scores"][259:-1], strict=True))
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = generate_merges({piece: vocab[piece] for piece in PIECES}, scores)
    theirs = LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)
    tokenizer = load_tokenizer(None, metadata)
    for text in ["hello world", "wo rld ll", "你好 hello", "a"]:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text)
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


# --- hostile metadata ------------------------------------------------------------------------------------------------

HOSTILE: list[dict[str, Any]] = [
    {"tokenizer.ggml.model": 7},
    {"tokenizer.ggml.model": "rwkv"},
    {"tokenizer.ggml.tokens": "abc"},
    {"tokenizer.ggml.tokens": [1, 2]},
    {"tokenizer.ggml.tokens": []},
    {"tokenizer.ggml.token_type": [1]},
    {"tokenizer.ggml.token_type": ["x"] * 607},
    {"tokenizer.ggml.merges": ["no-space"]},
    {"tokenizer.ggml.merges": ["zz9 qq8"]},
    {"tokenizer.ggml.merges": ["a b c"]},
    {"tokenizer.ggml.merges": None},
    {"tokenizer.ggml.merges": 5},
    {"tokenizer.ggml.pre": "no-such-rule"},
    {"tokenizer.ggml.pre": 3},
    {"tokenizer.ggml.eos_token_id": -1},
    {"tokenizer.ggml.eos_token_id": 10**12},
    {"tokenizer.ggml.eos_token_id": True},
    {"tokenizer.ggml.add_bos_token": "yes"},
    {"tokenizer.chat_template": 5},
]


@pytest.mark.parametrize("change", HOSTILE, ids=str)
def test_hostile_metadata_is_refused(change: dict[str, Any], qwen_metadata: dict[str, Any]) -> None:
    with pytest.raises(KTransformersError):
        load_tokenizer(None, qwen_metadata | change)


@pytest.mark.parametrize("scores", [[math.nan] * 280, [0.0], ["a"] * 280])
def test_hostile_scores_are_refused(scores: list[Any]) -> None:
    with pytest.raises(ConfigError, match="scores"):
        load_tokenizer(None, spm_metadata() | {"tokenizer.ggml.scores": scores})


def test_twice_spelled_and_empty_tokens(qwen_metadata: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    tokens = [*qwen_metadata["tokenizer.ggml.tokens"], "a", ""]
    kinds = [*qwen_metadata["tokenizer.ggml.token_type"], 1, 1]
    ours = rebuilt(qwen_metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds})
    assert ours.encode("a").ids == [tokens.index("a")]
    assert "spells 1 tokens twice" in caplog.text


def test_no_vocabulary() -> None:
    for metadata in (None, {}, {"tokenizer.ggml.model": "no_vocab"}):
        tokenizer = load_tokenizer(None, metadata)
        assert not tokenizer.has_vocabulary
        assert not tokenizer.has_chat_template
        assert tokenizer.reasoning_tags is None
        for use in (lambda t=tokenizer: t.encode("x"), lambda t=tokenizer: t.detokenizer()):
            with pytest.raises(ConfigError, match="no vocabulary"):
                use()
        with pytest.raises(ConfigError, match="no vocabulary"):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_unknown_pre_tokenizer_lists_the_known() -> None:
    with pytest.raises(UnsupportedError, match=r"'moonlight'.*qwen2.*--model_path"):
        find_pre_tokenizer("moonlight")

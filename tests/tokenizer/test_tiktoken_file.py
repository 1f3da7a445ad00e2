"""Kimi's tiktoken.model, read by us, against tiktoken itself."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizers import Regex, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.tokenizer import Tokenizer, has_tokenizer_files, load_tokenizer
from ktransformers.tokenizer.tiktoken_file import load_kimi_tokenizer
from tests.support.gguf.vocabularies import CHAT_TEMPLATE, STRINGS, train_byte_level
from tests.tokenizer.test_pretokenizers import HARD, KIMI

NAMED = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    11: "<|tool_calls_section_begin|>",
    254: "[UNK]",
    255: "[PAD]",
}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """A small vocabulary of Kimi's pattern: bytes first, then what is merged, in order."""
    trained = train_byte_level(pre_tokenizers.Split(Regex(KIMI), "isolated"), nfc=False)
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokens = {bytes([byte]): None for byte in range(256)}
    vocab = json.loads(trained.to_str())["model"]["vocab"]
    tokens |= {bytes(letters[letter] for letter in word): None for word in sorted(vocab, key=vocab.__getitem__)}
    return {token: rank for rank, token in enumerate(tokens)}


def config_of(ranks: dict[bytes, int], module: str = "tokenization_kimi") -> dict[str, Any]:
    named = {
        str(len(ranks) + i): {"content": text, "special": not text.startswith("<|tool")} for i, text in NAMED.items()
    }
    return {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": [f"{module}.TikTokenTokenizer", None]},
        "added_tokens_decoder": named,
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]"},
        "pad_token": "[PAD]",
        "chat_template": CHAT_TEMPLATE,
    }


def write(folder: Path, ranks: dict[bytes, int], config: object) -> Path:
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def original(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """As the tokenizer's own code makes it."""
    special = {NAMED.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i for i in range(258)}
    return tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=special)


@pytest.fixture(scope="module")
def loaded(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write(tmp_path_factory.mktemp("kimi"), ranks, config_of(ranks))
    assert has_tokenizer_files(folder)
    return load_tokenizer(folder, None)


def test_ids_equal_tiktoken(ranks: dict[bytes, int], loaded: Tokenizer) -> None:
    oracle = original(ranks)
    texts = [
        *STRINGS,
        *HARD,
        "[BOS]<|im_user|>user<|im_middle|>你好<|im_end|>",
        f"<|reserved_token_{len(ranks) + 5}|>x",
    ]
    for text in texts:
        ids = loaded.encode(text)
        assert ids == oracle.encode(text, allowed_special="all"), text
        assert loaded.backend.backend_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_random_words_equal_tiktoken(ranks: dict[bytes, int], loaded: Tokenizer) -> None:
    """Of few letters, so that tokens can be made in many ways."""
    oracle, rng = original(ranks), random.Random(3)
    for letters in ("ab", "the ", "1+", "你好,", "\u0301é\n"):
        texts = ["".join(rng.choices(letters, k=40)) for _ in range(50)]
        assert [loaded.encode(text) for text in texts] == [oracle.encode(text) for text in texts]


def test_random_vocabularies_equal_tiktoken(tmp_path: Path) -> None:
    """Tokens of two letters of which none need be a merge of earlier ones in any natural order."""
    rng = random.Random(5)
    for _ in range(20):
        words = {"".join(rng.choices("ab", k=rng.randint(2, 5))).encode() for _ in range(25)}
        reachable = {b"a", b"b"}
        for word in sorted(words, key=len):
            if any(word[:cut] in reachable and word[cut:] in reachable for cut in range(1, len(word))):
                reachable.add(word)
        tokens = [bytes([byte]) for byte in range(256)] + sorted(reachable - {b"a", b"b"}, key=len)
        ranks = {token: rank for rank, token in enumerate(tokens)}
        ours = load_kimi_tokenizer(write(tmp_path, ranks, config_of(ranks))).backend_tokenizer
        oracle = original(ranks)
        texts = ["".join(rng.choices("ab", k=30)) for _ in range(20)]
        assert [ours.encode(text).ids for text in texts] == [oracle.encode(text) for text in texts]


def test_control_tokens(ranks: dict[bytes, int], loaded: Tokenizer) -> None:
    base = len(ranks)
    assert (loaded.bos_token_id, loaded.eos_token_ids) == (base, (base + 1,))
    assert loaded.vocab_size == base + 256
    assert base + 2 in loaded.special_ids
    assert base + 11 not in loaded.special_ids
    assert "<|im_start|>user\nhi<|im_end|>" in loaded.backend.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )


def test_a_template_of_its_own_file(ranks: dict[bytes, int], tmp_path: Path) -> None:
    write(tmp_path, ranks, config_of(ranks, "tokenization_moonshot"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}é", encoding="utf-8")
    assert load_kimi_tokenizer(tmp_path).chat_template == "{{ messages[0].content }}é"


def test_keys_of_tools_are_sorted(ranks: dict[bytes, int], tmp_path: Path) -> None:
    """As Kimi's own code does before it renders a conversation."""
    template = "{{ tools | tojson }}"
    loaded = load_kimi_tokenizer(write(tmp_path, ranks, config_of(ranks) | {"chat_template": template}))
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"b": [1], "a": {}}}}]
    text = loaded.apply_chat_template([{"role": "user", "content": "x"}], tools=tools, tokenize=False)
    assert text == json.dumps(tools, sort_keys=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"added_tokens_decoder": {"7": {"content": "x"}}}, "token 7 is none of the 256"),
        ({"added_tokens_decoder": []}, "no object"),
        ({"added_tokens_decoder": {"x": {"content": "x"}}}, "no token"),
        ({"bos_token": "<s>"}, "'<s>' is no token"),
    ],
)
def test_broken_configs_are_refused(
    change: dict[str, Any], message: str, ranks: dict[bytes, int], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_kimi_tokenizer(write(tmp_path, ranks, config_of(ranks) | change))


def test_tokens_spelled_twice_are_refused(ranks: dict[bytes, int], tmp_path: Path) -> None:
    config = config_of(ranks)
    config["added_tokens_decoder"][str(len(ranks) + 20)] = {"content": "[BOS]", "special": True}
    with pytest.raises(ConfigError, match=r"two tokens are spelled '\[BOS\]'"):
        load_kimi_tokenizer(write(tmp_path, ranks, config))


@pytest.mark.parametrize("config", [{}, {"auto_map": {"AutoTokenizer": "tokenization_other.TikTokenTokenizer"}}])
def test_files_of_others_are_refused(config: dict[str, Any], ranks: dict[bytes, int], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="not known to be Kimi's"):
        load_kimi_tokenizer(write(tmp_path, ranks, config))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"", "256 of the 256 bytes"),
        (b"YQ==\n", r":1: no token in base64"),
        (b"YQ== 0\nYQ== 1\n", r":2: token 1 is expected"),
        (b"YQ== 0\nYg== 2\n", r":2: token 1 is expected"),
        (b"\x00\xff 0\n", r":1: no token in base64"),
        (b"YQ== 0 1\n", r":1: no token in base64"),
    ],
)
def test_broken_files_are_refused(lines: bytes, message: str, ranks: dict[bytes, int], tmp_path: Path) -> None:
    write(tmp_path, ranks, config_of(ranks))
    (tmp_path / "tiktoken.model").write_bytes(lines)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path, None)

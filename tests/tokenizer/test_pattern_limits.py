"""Patterns that come with a tokenizer: unusual ones run in a process, which is ended when they take too long."""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from ktransformers.errors import ConfigError
from ktransformers.tokenizer import Tokenizer as OurTokenizer
from ktransformers.tokenizer import pattern_limits
from ktransformers.tokenizer.growth import growth_of
from ktransformers.tokenizer.loading import load_tokenizer
from ktransformers.tokenizer.pattern_limits import unknown_patterns
from ktransformers.tokenizer.pretokenizers import PRE_TOKENIZERS, QUADRATIC_PATTERNS
from tests.support.gguf.vocabularies import STRINGS, train_byte_level

SLOW = r"(a*)(a*)c|."  # cubic
# As the models' authors publish them.
PUBLISHED = {
    "llama-3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": PRETOKENIZE_REGEX,
    "o200k": r"[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "deepseek-v3, numbers": r"\p{N}{1,3}",
    "deepseek-v3, characters": "[一-龥぀-ゟ゠-ヿ]+",
    "deepseek-v3, words": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
}


def byte_level(pattern: str) -> Tokenizer:
    return train_byte_level(pre_tokenizers.Split(Regex(pattern), behavior="isolated"), nfc=False)


def loaded(tokenizer: Tokenizer) -> OurTokenizer:
    return OurTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_patterns_of_gguf_files_are_known(name: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name].build()
    quadratic = [pattern for pattern in PRE_TOKENIZERS[name].patterns if pattern in QUADRATIC_PATTERNS]
    assert unknown_patterns(tokenizer) == quadratic


@pytest.mark.parametrize("name", PUBLISHED)
def test_patterns_that_models_publish_are_known(name: str) -> None:
    assert unknown_patterns(byte_level(PUBLISHED[name])) == []


def test_where_patterns_are_found() -> None:
    tokenizer = Tokenizer(models.BPE())
    assert unknown_patterns(tokenizer) == []
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("x", behavior="isolated"), pre_tokenizers.Split(Regex(SLOW), behavior="isolated")]
    )
    tokenizer.decoder = decoders.Replace("_", " ")
    assert unknown_patterns(tokenizer) == [" {2,}", SLOW]
    tokenizer.decoder = decoders.Replace(Regex("(a*)*"), " ")
    with pytest.raises(ConfigError, match="decoder has a pattern of its own"):
        unknown_patterns(tokenizer)


def test_a_pattern_of_ones_own_gives_the_same_ids(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ktransformers")
    tokenizer = byte_level(r"\w+|\s|[^\w\s]+")
    ours = loaded(tokenizer)
    assert len([line for line in caplog.messages if "has a pattern of its own" in line]) == 1
    for text in STRINGS:
        assert ours.encode(text) == tokenizer.encode(text).ids
    assert ours._encoder.timed is not None
    process = ours._encoder.timed.child.process
    assert process is not None
    process.kill()  # by whoever kills for want of memory
    process.wait()
    assert ours.encode("a text") == tokenizer.encode("a text").ids  # by another one
    ours._encoder.timed.close()


DOUBLE = normalizers.Replace("a", "aa")
GROWING = {
    "forty replacements": normalizers.Sequence([DOUBLE] * 40),
    "one long one": normalizers.Replace("a", "b" * 5_000_000),
    "two, one of them in a sequence of its own": normalizers.Sequence(
        [normalizers.Replace("a", "b" * 3000), normalizers.Sequence([normalizers.Replace("b", "c" * 3000)])]
    ),
    "an empty pattern": normalizers.Replace("", "b" * 5_000_000),
    "a beginning, replaced": normalizers.Sequence([normalizers.Prepend("a" * 10_000), *[DOUBLE] * 30]),
    "bytes as characters": normalizers.Sequence([normalizers.ByteLevel()] * 40),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", GROWING)
def test_a_text_of_which_too_much_is_made_is_given_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit these take all memory of the machine."""
    monkeypatch.setattr(pattern_limits, "SECONDS", 3.0)
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "y": 1}, "x"))
    tokenizer.normalizer = GROWING[name]
    ours = loaded(tokenizer)
    assert ours._encoder.timed is not None
    with pytest.raises(ConfigError, match=r"gives up on this text of 3000 characters: (its process died|it took more)"):
        ours.encode("ä a" * 1000)
    ours._encoder.timed.close()


def test_growth() -> None:
    """What is usual is trusted: Llama's, Gemma's, T5's, and all kinds of Unicode's normal forms."""
    usual: list[object] = [
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        normalizers.Replace(Regex(" {2,}"), "▁"),
        normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]),
        normalizers.Sequence([normalizers.Replace("``", '"'), normalizers.Replace("\n", " \n "), normalizers.NFKC()]),
        normalizers.BertNormalizer(),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.ByteLevel(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        None,
    ]
    for part in usual:
        assert 1 <= growth_of(part) < 16
    assert growth_of(normalizers.Sequence([DOUBLE] * 10)) == 1024
    assert growth_of(normalizers.Replace("abc", "defghi")) == 2
    assert growth_of(normalizers.Replace("ab", "a")) == 1
    assert (
        growth_of(normalizers.Sequence([normalizers.Replace(Regex(p), " ") for p in (r"\s+", "[a-z]", r"\p{Z}")])) < 3
    )
    for pattern in ("a*", "(?=a)", r"\b", "^", "a|"):
        assert growth_of(normalizers.Replace(Regex(pattern), "b")) == 2


@pytest.mark.parametrize("name", GROWING)
def test_a_tokenizer_whose_added_tokens_would_take_all_memory_is_not_loaded(name: str, tmp_path: Path) -> None:
    """The library normalizes them while it loads."""
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "y": 1}, "x"))
    state = json.loads(tokenizer.to_str())
    state["normalizer"] = json.loads(GROWING[name].__getstate__())
    state["added_tokens"] = [
        {"id": 0, "content": "xaä", "normalized": True, "special": False, "single_word": False, "lstrip": False,
         "rstrip": False}
    ]  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be used: its normalizer makes a text .* as long"):
        load_tokenizer(tmp_path, None)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Replace("a", "b" * 1000),
        decoders.Sequence([decoders.Replace("a", "aa")] * 40),
        decoders.Metaspace(),
    ],
)
def test_decoders_that_make_much_of_little_are_refused(decoder: object) -> None:
    tokenizer = byte_level(PUBLISHED["qwen2"])
    tokenizer.decoder = decoder
    if isinstance(decoder, decoders.Metaspace):
        loaded(tokenizer)
        return
    with pytest.raises(ConfigError, match=r"decoder makes a text .* times as long"):
        loaded(tokenizer)


def test_a_text_that_takes_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level(SLOW)
    ours = loaded(tokenizer)
    assert ours.encode("abc") == tokenizer.encode("abc").ids
    monkeypatch.setattr(pattern_limits, "SECONDS", 0.2)
    assert ours._encoder.timed is not None
    process = ours._encoder.timed.child.process
    assert process is not None
    with pytest.raises(ConfigError, match=r"gives up on this text of 20000 characters: it took more than 0 s"):
        ours.encode("a" * 20_000)  # an hour
    assert not Path(f"/proc/{process.pid}").exists()
    monkeypatch.setattr(pattern_limits, "SECONDS", 60.0)
    assert ours.encode("abc") == tokenizer.encode("abc").ids
    ours._encoder.timed.close()


def test_a_forked_process_does_not_end_the_parents_encoder() -> None:
    """It starts one of its own, and its end leaves the parent's alone."""
    ours = loaded(byte_level(SLOW))
    timed = ours._encoder.timed
    assert timed is not None
    wanted = ours.encode("hello")
    process = timed.child.process
    assert process is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of this process hold no lock that matters
        pid = os.fork()
    if pid == 0:
        is_same = False
        try:
            is_same = ours.encode("hello") == wanted and timed.child.process is not process
            timed.close()
        finally:
            os._exit(0 if is_same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert process.poll() is None
    assert ours.encode("hello") == wanted

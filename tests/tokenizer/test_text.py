"""Detokenizer, stop strings, reasoning and tool-call parsers: exact, however the text is cut."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from ktransformers.errors import ConfigError, ContextLengthError, UnsupportedError
from ktransformers.tokenizer import Tokenizer, load_tokenizer
from ktransformers.tokenizer.detokenizer import ByteDetokenizer, WindowDetokenizer, token_bytes_of
from ktransformers.tokenizer.encoding import TextEncoder
from ktransformers.tokenizer.reasoning import ReasoningParser
from ktransformers.tokenizer.stop import StopMatcher, held_back
from tests.support.gguf.vocabularies import STRINGS


def cuts(text: str, seed: int) -> list[str]:
    """`text` in random pieces."""
    rng, pieces, at = random.Random(seed), [], 0
    while at < len(text):
        step = rng.randint(1, 4)
        pieces.append(text[at : at + step])
        at += step
    return pieces


# --- detokenizer -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 606), max_size=40))
def test_byte_level_equals_the_full_decoding(qwen_like: RustTokenizer, ids: list[int]) -> None:
    """Random ids are mostly malformed UTF-8: both must replace the same bytes."""
    table = token_bytes_of(qwen_like)
    assert table is not None
    assert ByteDetokenizer(table).all(ids) == qwen_like.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", STRINGS)
def test_pieces_hold_whole_characters(qwen_like: RustTokenizer, text: str) -> None:
    table = token_bytes_of(qwen_like)
    assert table is not None
    stream = ByteDetokenizer(table)
    pieces = [stream.add(token) for token in qwen_like.encode(text).ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == qwen_like.normalizer.normalize_str(text)  # type: ignore[union-attr]
    assert stream.flush() == ""


def test_unfinished_character_shows_at_the_end(qwen_like: RustTokenizer) -> None:
    ids = qwen_like.encode("😀").ids
    table = token_bytes_of(qwen_like)
    assert table is not None
    stream = ByteDetokenizer(table)
    if len(ids) == 1:
        pytest.skip("the vocabulary learned this emoji")
    assert [stream.add(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.flush() == "\ufffd"


def test_unknown_ids_have_no_text(qwen_like: RustTokenizer) -> None:
    table = token_bytes_of(qwen_like)
    assert table is not None
    assert table[10**6] == b""


def test_window_detokenizer_equals_the_full_decoding(qwen_like: RustTokenizer) -> None:
    for text in STRINGS:
        ids = qwen_like.encode(text).ids
        stream = WindowDetokenizer(lambda some: qwen_like.decode(some, skip_special_tokens=False))
        assert stream.all(ids) == qwen_like.decode(ids, skip_special_tokens=False)


def test_other_decoders_use_the_window(qwen_like: RustTokenizer) -> None:
    other = RustTokenizer.from_str(qwen_like.to_str())
    other.decoder = decoders.Metaspace()
    assert token_bytes_of(other) is None
    assert isinstance(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=other)).detokenizer(), WindowDetokenizer)


def test_tags_survive_when_special_tokens_are_skipped(qwen_metadata: dict[str, Any]) -> None:
    """Some tokenizers mark <think> as special; the reasoning parser must still see it."""
    tokens = qwen_metadata["tokenizer.ggml.tokens"]
    kinds = [
        3 if token == "<think>" else kind
        for token, kind in zip(tokens, qwen_metadata["tokenizer.ggml.token_type"], strict=True)
    ]
    tokenizer = load_tokenizer(None, qwen_metadata | {"tokenizer.ggml.token_type": kinds})
    ids = tokenizer.encode("<think>a</think>b<|im_end|>")
    assert tokenizer.decode(ids) == "<think>a</think>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think>a</think>b<|im_end|>"


# --- chat templates and folders --------------------------------------------------------------------------------------


def test_folder_and_gguf_agree(tmp_path: Path, qwen_like: RustTokenizer, qwen_metadata: dict[str, Any]) -> None:
    PreTrainedTokenizerFast(tokenizer_object=qwen_like, eos_token="<|im_end|>").save_pretrained(tmp_path)
    folder = load_tokenizer(tmp_path, qwen_metadata)
    gguf = load_tokenizer(None, qwen_metadata)
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "你好 17 + 25?"}]
    ids = gguf.apply_chat_template(messages)
    assert ids == folder.apply_chat_template(messages)  # the folder has no template of its own
    assert gguf.decode(ids, skip_special_tokens=False) == gguf.render_chat_template(messages)
    assert folder.eos_token_ids == gguf.eos_token_ids
    assert gguf.render_chat_template(messages, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_folder_without_tokenizer_falls_back_to_gguf(tmp_path: Path, qwen_metadata: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path, qwen_metadata).has_vocabulary


def test_broken_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_tokenizer(tmp_path, None)


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}", "{{ 1 + 'a' }}", "{% if %}"])
def test_templates_that_refuse(template: str, qwen_metadata: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(None, qwen_metadata | {"tokenizer.chat_template": template})
    with pytest.raises(ConfigError, match="refuses this conversation"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_template_cannot_reach_python(qwen_metadata: dict[str, Any]) -> None:
    hostile = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ConfigError, match="refuses"):
        load_tokenizer(None, qwen_metadata | {"tokenizer.chat_template": hostile}).apply_chat_template(
            [{"role": "user", "content": "x"}]
        )


def test_no_template(qwen_metadata: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(None, {k: v for k, v in qwen_metadata.items() if k != "tokenizer.chat_template"})
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(UnsupportedError, match="no chat template"):
        tokenizer.apply_chat_template(messages)
    assert tokenizer.decode(tokenizer.apply_plain_template(messages)) == "user: hi\nassistant:"
    with pytest.raises(ConfigError, match="at least one message"):
        tokenizer.apply_chat_template([])


def test_named_templates(qwen_metadata: dict[str, Any]) -> None:
    template = "tools: {{ tools | map(attribute='function.name') | join }}"
    named = qwen_metadata | {"tokenizer.chat_template.tool_use": template}
    tokenizer = load_tokenizer(None, named)
    messages = [{"role": "user", "content": "x"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert tokenizer.render_chat_template(messages, [tool]) == "tools: f"
    assert tokenizer.render_chat_template(messages).startswith("<|im_start|>user")


@pytest.mark.parametrize(
    ("template", "reads", "does_not"),
    [
        ("{% if thinking is defined %}a{% endif %}", "thinking", "a"),
        ("{# a #}{{ messages[0].a }} a {{ 'a' }}{% for a in messages %}{% endfor %}", "messages", "a"),
        ("{% generation %}{{ date }}{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}", "date", "m"),
        ("{% if x is not defined %}{% set x = 1 %}{% endif %}{% set y = x %}{{ y }}", "x", "y"),
        ("{% macro f(a) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}", "b", "f"),
    ],
)  # fmt: skip
def test_a_template_knows_the_variables_that_it_reads(
    template: str, reads: str, does_not: str, qwen_metadata: dict[str, Any]
) -> None:
    tokenizer = load_tokenizer(None, qwen_metadata | {"tokenizer.chat_template": template})
    assert tokenizer.template_knows(reads)
    assert not tokenizer.template_knows(does_not)


def test_truncation_and_padding_of_a_tokenizer_file_are_switched_off(tmp_path: Path, qwen_like: RustTokenizer) -> None:
    text = "What is 17 + 25? The quick brown fox"
    whole, blank = qwen_like.encode(text).ids, qwen_like.encode("a").ids
    other = RustTokenizer.from_str(qwen_like.to_str())
    other.enable_truncation(max_length=3)
    other.enable_padding(length=20, direction="left")
    PreTrainedTokenizerFast(tokenizer_object=other, eos_token="<|im_end|>").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["padding"] is not None
    tokenizer = load_tokenizer(tmp_path, None)
    assert tokenizer.encode(text) == whole
    assert tokenizer.encode("a") == blank


def test_more_text_than_any_prompt_can_have_is_refused_unseen(
    qwen_metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(None, qwen_metadata)
    assert len(tokenizer.encode("<|im_start|>" * 10, max_len=10)) == 10
    with pytest.raises(ContextLengthError, match="11 tokens, and there is room for 10"):
        tokenizer.encode("<|im_start|>" * 11, max_len=10)
    monkeypatch.setattr(TextEncoder, "_ids", lambda *_: pytest.fail("it was tokenized"))
    longest = max(map(len, tokenizer.backend.get_vocab()))
    with pytest.raises(ContextLengthError, match="11 tokens or more") as caught:
        tokenizer.encode("a" * (longest * 10 + 1), max_len=10)
    assert (caught.value.prompt_len, caught.value.max_len) == (11, 10)


def test_a_tokenizer_that_panics_refuses_the_text() -> None:
    """What it raises then is no Exception: a pattern that goes back and forth for too long is enough."""
    rust = RustTokenizer(models.BPE({"a": 0, "b": 1}, []))
    rust.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))
    with pytest.raises(ConfigError, match=r"gives up on this text of 41 characters: .*retry-limit"):
        tokenizer.encode("a" * 40 + "b")
    assert tokenizer.encode("ab") == [0, 1]


def test_text_that_is_not_unicode(qwen_metadata: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="surrogates not allowed at character 1"):
        load_tokenizer(None, qwen_metadata).encode("a\ud800")


def test_prompt_that_opens_reasoning(qwen_metadata: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(None, qwen_metadata)
    assert tokenizer.reasoning_tags == ("<think>", "</think>")
    assert tokenizer.has_tool_calls
    assert tokenizer.opens_reasoning(tokenizer.encode("assistant\n<think>\n"))
    assert not tokenizer.opens_reasoning(tokenizer.encode("assistant\n<think>\n</think>\n"))


# --- stop strings ----------------------------------------------------------------------------------------------------


def run_stops(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def naive_stop(stops: list[str], text: str) -> tuple[str, str | None]:
    """Grow the text by one character until some stop string is its end."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.text(alphabet="ab\n", max_size=60),
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=9), max_size=6),
    st.integers(0, 1000),
)
def test_stops_do_not_depend_on_the_cut(text: str, stops: list[str], seed: int) -> None:
    assert run_stops(stops, cuts(text, seed)) == naive_stop(stops, text)


@given(st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=9), max_size=6))
def test_no_more_is_held_back_than_could_begin_a_stop(text: str, stops: list[str]) -> None:
    shown, stop = StopMatcher(stops).feed(text)
    if stop is None:
        assert len(shown) == len(text) - held_back(text, stops)


def test_long_stops_that_nearly_match_take_a_step_per_character() -> None:
    """31 strings that the text is about to become all the time: the work is counted in lines of Python."""
    stops = ["a" * (300 + i) + "b" for i in range(31)]
    num_lines = 0

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    matcher = StopMatcher(stops)
    matcher.feed("a" * 400)  # as far as it goes
    before = sys.gettrace()
    sys.settrace(count)
    try:
        for _ in range(50):
            matcher.feed("aaaa")
    finally:
        sys.settrace(before)
    assert num_lines < 40 * 200


def test_only_what_could_be_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["</s>", "STOP"])
    assert matcher.feed("abc<") == ("abc", None)
    assert matcher.feed("/x") == ("</x", None)
    assert matcher.feed("ST") == ("", None)
    assert matcher.feed("OPPED") == ("", "STOP")
    assert held_back("xSTO", ("STOP", "TOY")) == 3


# --- reasoning -------------------------------------------------------------------------------------------------------

TAGS = ("<think>", "</think>")


def run_reasoning(pieces: list[str], tags: tuple[str, str] | None = TAGS, inside: bool = False) -> tuple[str, str]:
    parser = ReasoningParser(tags, inside)
    parts = [*map(parser.feed, pieces), parser.flush()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nwhy\n</think>\n\nbecause", False, ("why\n", "because")),
        ("  \n<think>a</think>b", False, ("a", "b")),
        ("why</think>because", True, ("why", "because")),
        ("\nwhy", True, ("why", "")),
        ("plain answer", False, ("", "plain answer")),
        ("use the <think> tag </think> so", False, ("", "use the <think> tag </think> so")),
        ("<thin", False, ("", "<thin")),
        ("<think>a</thin b", False, ("a</thin b", "")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("", False, ("", "")),
        ("<think></think>\n", False, ("", "")),
    ],
)
def test_reasoning(text: str, inside: bool, expected: tuple[str, str]) -> None:
    for seed in range(20):
        assert run_reasoning(cuts(text, seed), inside=inside) == expected
    assert run_reasoning([text], inside=inside) == expected


def test_model_without_reasoning_keeps_everything() -> None:
    assert run_reasoning(["<think>", "a"], tags=None) == ("", "<think>a")

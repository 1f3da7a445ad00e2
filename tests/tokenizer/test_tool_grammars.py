"""Grammars of tool calls, held against what templates write, by the library that will enforce them."""

from __future__ import annotations

import re

import pytest
from transformers import AddedToken

from ktransformers.tokenizer.tokenizer import Tokenizer
from ktransformers.tokenizer.tools import TOOL_FORMATS
from tests.support.fake_runner import byte_tokenizer
from tests.support.tool_answers import CALLS, CONTENT, FORMAT_OF, TEMPLATES, TOOLS, render

# What calls begin with. Gemma's and Python's have no grammar.
FIRST_TAG = {name: TOOL_FORMATS[form].tokens[0] for name, form in FORMAT_OF.items()} | {
    "llama3_json": "{",
    "harmony": "<|channel|>commentary to",
    "deepseek_v32": "<｜DSML｜",
    "deepseek_v4": "<｜DSML｜",
}
del FIRST_TAG["gemma4"], FIRST_TAG["llama4_pythonic"]


@pytest.mark.parametrize("are_special", [False, True])
@pytest.mark.parametrize("name", FIRST_TAG)
def test_a_grammar_takes_the_calls_that_templates_write(name: str, are_special: bool) -> None:
    """are_special: the format's tags are special tokens, which text in a grammar does not match."""
    LLMatcher, hf = pytest.importorskip("llguidance").LLMatcher, pytest.importorskip("llguidance.hf")
    backend = byte_tokenizer((TEMPLATES / f"{name}.jinja").read_text()).backend
    if are_special:
        tags = TOOL_FORMATS[FORMAT_OF[name]].tokens
        backend.backend_tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in tags])
    tokenizer = Tokenizer(backend)
    vocabulary = hf.from_tokenizer(backend, n_vocab=tokenizer.vocab_size)

    def takes(text: str, parallel: bool = True) -> bool:
        grammar = tokenizer.tool_grammar(TOOLS, parallel=parallel)
        assert grammar is not None
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.get_error()
        return matcher.consume_tokens(tokenizer.encode(text)) and matcher.is_accepting()

    calls = CALLS[:1] if name in ("llama3_json", "harmony") else CALLS
    text = render(name, calls)
    text = text[text.index(FIRST_TAG[name], text.find(CONTENT) + 1) :].strip()
    for left_out in ("<|call|>", "\n</answer>"):  # no part of the calls
        text = text.removesuffix(left_out)
    text = re.sub(r', "id": "call\d+"', "", text).replace("\nTrue\n", "\ntrue\n")
    assert takes(text)
    assert not takes("Hello")
    assert not takes(text.replace("get_weather", "forget"))
    assert takes(text, parallel=False) == (len(calls) == 1)


def test_what_has_no_grammar() -> None:
    tokenizer = byte_tokenizer((TEMPLATES / "gemma4.jinja").read_text())
    assert tokenizer.tool_grammar(TOOLS) is None
    tokenizer.use_tool_format("hermes")
    assert tokenizer.tool_grammar(TOOLS) is not None
    assert tokenizer.tool_grammar({}) is None

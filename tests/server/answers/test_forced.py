"""What a demanded call asks of the engine."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AddedToken

from ktransformers.core import ConstraintKind, SamplingParams
from ktransformers.errors import ConfigError, FieldError, UnsupportedError
from ktransformers.server.answers.forced import forced_calls, reason_of_refusal
from ktransformers.server.answers.requests import Conversation, Message, Tool, ToolChoice
from ktransformers.server.backend.base import ModelInfo
from ktransformers.tokenizer import Tokenizer
from ktransformers.tokenizer.tools import TOOL_FORMATS
from tests.support.engines.fake_runner import byte_tokenizer

ODD = {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}
TOOLS = (Tool(name="add", parameters={"type": "object"}), Tool(name="odd", parameters=ODD))
HELLO = (Message(role="user", content="Hello"),)


def tokenizer_of(form: str) -> Tokenizer:
    backend = byte_tokenizer().backend
    tags = TOOL_FORMATS[form].tokens
    backend.backend_tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in tags])
    made = Tokenizer(backend)
    made.use_tool_format(form)
    return made


def forced(
    tokenizer: Tokenizer, choice: ToolChoice, prompt: str = "x", tools: Any = TOOLS[:1], **more: Any
) -> dict[str, Any]:
    conversation = Conversation(messages=HELLO, tools=tools, **more)
    return forced_calls(tokenizer, conversation, choice, tokenizer.encode(prompt))


def test_the_grammar_begins_behind_the_reasoning() -> None:
    tokenizer = tokenizer_of("hermes")
    named = forced(tokenizer, ToolChoice(is_required=True, name="add", max_calls=1), "<think>\n", reasoning_budget=7)
    assert named["constraint"].kind is ConstraintKind.TOOL_CALLS
    assert "odd" not in named["constraint"].text
    assert "call)*" not in named["constraint"].text
    assert (named["reasoning"].is_open, named["reasoning"].max_tokens) == (True, 7)
    assert "call)*" in forced(tokenizer, ToolChoice(is_required=True))["constraint"].text
    assert forced(tokenizer, ToolChoice(is_required=True), "<think></think>")["reasoning"] is None


def test_harmony_tells_its_reasoning_in_the_grammar() -> None:
    made = forced(tokenizer_of("harmony"), ToolChoice(is_required=True), reasoning_budget=7)
    assert "reasoning" not in made
    assert "[max_tokens=7]" in made["constraint"].text


def test_what_cannot_be_demanded() -> None:
    tokenizer, required = tokenizer_of("hermes"), ToolChoice(is_required=True)
    ends, params = tokenizer.eos_token_ids, SamplingParams()
    model = ModelInfo(tokenizer, 64, tokenizer.vocab_size, ends, params, None, "a fake")
    conversation = Conversation(messages=HELLO, tools=TOOLS)
    refusal = reason_of_refusal(model, conversation, required)
    assert isinstance(refusal, FieldError)
    assert "calls of 'odd' cannot be forced" in str(refusal)
    assert reason_of_refusal(model, conversation, ToolChoice(is_required=True, name="add")) is None
    with pytest.raises(FieldError, match="there are no tools"):
        forced_calls(tokenizer, Conversation(messages=HELLO), required, [1])
    with pytest.raises(FieldError, match="calls of 'odd' cannot be forced"):
        forced(tokenizer_of("gemma4"), required, tools=TOOLS)
    with pytest.raises(UnsupportedError, match="--tool_format"):
        forced(byte_tokenizer(None), required)


def test_no_request_says_such_a_grammar_itself() -> None:
    with pytest.raises(ConfigError, match="exactly one of"):
        SamplingParams(constraint={"tool_calls": "start: /x/"})  # type: ignore[arg-type]

"""Forced calls that are cut: whatever an answer had begun is a call, in every format, and never text."""

from __future__ import annotations

from typing import Any

import pytest

from ktransformers.tokenizer.templates.calls import spelled
from ktransformers.tokenizer.tools import TOOL_FORMATS, CallStarted, ParsedEvent, TextPiece
from ktransformers.tokenizer.tools.shape_parser import ShapeParser
from ktransformers.tokenizer.tools.shapes import CallShape, shape_of

TOOLS: dict[str, Any] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "now": {"type": "object", "properties": {}},
}
CALLS = [
    {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}},
    {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}},
]


def written(name: str) -> str:
    """Calls as a grammar of this format makes the model write them."""
    shape = TOOL_FORMATS[name].shape or shape_of(name, "")
    one = spelled(CALLS[: 1 if shape.sep is None else 2], shape)
    return one.replace("#", "1")


def read(name: str, text: str, size: int, *, is_forced: bool) -> list[ParsedEvent]:
    parser = TOOL_FORMATS[name].parser(TOOLS)
    if is_forced:
        parser.expect_calls()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [*(event for piece in pieces for event in parser.feed(piece)), *parser.flush(is_cut=True)]


def text_of(events: list[ParsedEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextPiece))


@pytest.mark.every(5)
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_no_cut_shows_half_a_call(name: str, size: int) -> None:
    whole = written(name)
    assert any(isinstance(event, CallStarted) for event in read(name, whole, size, is_forced=True))
    for end in range(1, len(whole) + 1):
        assert text_of(read(name, whole[:end], size, is_forced=True)).strip() == "", whole[:end]


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        ("llama3_json", '{"name": "ge'),
        ("json", '[{"na'),
        ("json", '```json\n{"name": "get_w'),
        ("llama4_pythonic", "[get_w"),
    ],
)
def test_what_nobody_demanded_may_be_text(name: str, begun: str) -> None:
    """Any JSON and any list begins like that."""
    for size in (1, 100):
        assert text_of(read(name, begun, size, is_forced=False)) == begun
        assert text_of(read(name, begun, size, is_forced=True)) == ""


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        ("llama3_json", '<|python_tag|>{"name": "ge'),
        ("llama4_pythonic", "<|python_start|>[get_w"),
        ("json", '<tool_call>\n{"name": "ge'),
        ("json", "<TOOLCALL>["),
    ],
)
def test_a_tag_of_calls_alone_tells_enough(name: str, begun: str) -> None:
    for size in (1, 100):
        assert text_of(read(name, f"So: {begun}", size, is_forced=False)) == "So: "


def test_shapes_without_a_tag_hide_it_too() -> None:
    """A format that was found by rendering may have calls that begin with a bracket."""
    shape = CallShape(open="[", head='{"name": "NAME", "arguments": ', foot="}", sep=", ", close="]")
    parser = ShapeParser(shape, TOOLS)
    parser.expect_calls()
    assert text_of([*parser.feed('[{"name": "ge'), *parser.flush(is_cut=True)]) == ""

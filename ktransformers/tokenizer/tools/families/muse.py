"""Muse Glimmer: messages with recipients; one to a tool holds the call as XML.

    <|start|>assistant to=name<|message|><atem:function_calls>
    <atem:invoke name="name">
    <atem:parameter name="key">value</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eom|>

Source: the chat template of meta-models/Muse-Glimmer-30B. The prompt ends with the role, so that an answer begins with
` to=`: `self` for reasoning, `user` for text. Both are marks of the answer (reasoning.py).
"""

from __future__ import annotations

from typing_extensions import override

from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.events import ToolSchemas
from ktransformers.tokenizer.tools.shape_parser import ShapeParser
from ktransformers.tokenizer.tools.shapes import SHAPES

__all__ = ["MuseGlimmerParser"]

_NEXT = "<|eom|><|start|>assistant"


class MuseGlimmerParser(ShapeParser):
    """A parser of Muse Glimmer's calls, which may follow a text message, whose end and the next head belong to them."""

    begun_len = 4  # " to" is a word, too

    def __init__(self, tools: ToolSchemas | None = None):
        super().__init__(SHAPES["muse_glimmer"], tools)
        self.opening = (f"{_NEXT} to=", " to=", *self.opening)
        self.closing = ("<|eom|>", "<|eot|>")

    @override
    def calls(self, tag: str) -> Steps[None]:
        yield from super().calls("to=")

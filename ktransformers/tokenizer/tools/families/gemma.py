"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`.

Source: the chat template of google/gemma-4.
"""

from __future__ import annotations

import re

from typing_extensions import override

from ktransformers.tokenizer.tools.base import NAME_LEN, TaggedParser
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.json_text import GemmaReader

__all__ = ["GemmaParser"]

_NAME = re.compile(r"[^\s<>{}\"]*")


class GemmaParser(TaggedParser):
    """A parser of Gemma 4's calls in nearly JSON: keys are bare, strings stand between special tokens."""

    opening = ("<|tool_call>",)
    closing = ("<tool_call|>",)

    @override
    def calls(self, tag: str) -> Steps[None]:
        if not (yield from self.cursor.match("call:")):
            return
        name = yield from self.cursor.word(_NAME, NAME_LEN)
        if name and (yield from self.cursor.peek()) == "{":
            self.start_call(name)
            self.end_call((yield from GemmaReader(self.cursor).value(self.argue)))

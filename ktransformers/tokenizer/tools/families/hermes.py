"""Hermes 2 Pro, Qwen 2.5 and 3, ERNIE 4.5: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Source: the chat templates of NousResearch/Hermes-2-Pro, Qwen/Qwen3, baidu/ERNIE-4.5-Thinking.
"""

from __future__ import annotations

from typing_extensions import override

from ktransformers.tokenizer.tools.base import JsonCalls, TaggedParser
from ktransformers.tokenizer.tools.cursor import Steps

__all__ = ["HermesParser"]


class HermesParser(TaggedParser):
    """A parser of calls of Hermes and its kin, one between the tags; several are read too.

    A last call needs no closing tag when its JSON is complete.
    """

    opening = ("<tool_call>",)
    closing = ("</tool_call>",)

    @override
    def calls(self, tag: str) -> Steps[None]:
        while (yield from self.cursor.blanks()) == "{":
            if not (yield from JsonCalls(self).call()):
                return

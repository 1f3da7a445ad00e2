"""Calls as JSON objects with a name and arguments, for chat templates that tell of no form: alone, in a list, fenced.

Any JSON looks like that, so only tools of the request can be called, and a call needs its arguments. Tags that other
families write around calls are taken for what they are.
"""

from __future__ import annotations

from typing_extensions import override

from ktransformers.tokenizer.tools.base import JsonCalls
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.families.llama import UntaggedParser

__all__ = ["PlainJsonParser"]

_CLOSING = {
    "```json": "```",
    "<tool_call>": "</tool_call>",
    "<tool_calls>": "</tool_calls>",
    "<function_call>": "</function_call>",
    "<|tool_call|>": "<|/tool_call|>",
    "<TOOLCALL>": "</TOOLCALL>",
}


class PlainJsonParser(UntaggedParser):
    """A parser of calls as plain JSON, at the beginning of an answer or behind one of the tags of other families."""

    opening = tuple(_CLOSING)
    doubtful = ("```json",)
    brackets = "{["

    @override
    def calls(self, tag: str) -> Steps[None]:
        calls = JsonCalls(self, needs_arguments=True, is_known=True)
        num_calls = self._num_calls
        while (yield from self.cursor.blanks()) in ("{", "["):
            if not (yield from calls.array()):
                return
            self.keep("")
            for char in ",;":
                if (yield from self.cursor.blanks()) == char:
                    self.cursor.skip()
        if self._num_calls > num_calls and tag in _CLOSING:
            yield from self.cursor.blanks()
            if (yield from self.cursor.match(_CLOSING[tag])):
                self.cursor.kept = None

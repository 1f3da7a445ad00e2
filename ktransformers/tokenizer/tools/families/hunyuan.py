"""Hunyuan A13B: `<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>`.

Source: the chat template of tencent/Hunyuan-A13B-Instruct.
"""

from __future__ import annotations

from typing_extensions import override

from ktransformers.tokenizer.tools.base import JsonCalls, TaggedParser
from ktransformers.tokenizer.tools.cursor import Steps

__all__ = ["HunyuanParser"]


class HunyuanParser(TaggedParser):
    """A parser of Hunyuan A13B's calls, a list between the tags."""

    opening = ("<tool_calls>",)
    closing = ("</tool_calls>",)

    @override
    def calls(self, tag: str) -> Steps[None]:
        yield from JsonCalls(self).array()

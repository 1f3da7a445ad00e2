"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` in a section.

Source: the chat template of moonshotai/Kimi-K2-Instruct and its guide to tool calls.
"""

from __future__ import annotations

from typing_extensions import override

from ktransformers.tokenizer.tools.base import NAME_LEN
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.sections import NAME, SectionParser

__all__ = ["KimiParser"]


class KimiParser(SectionParser):
    """A parser of Kimi K2's calls.

    A call's id holds its name: `functions.` in front of it and a number behind it are left out.
    """

    call_open, call_close = "<|tool_call_begin|>", "<|tool_call_end|>"
    opening = ("<|tool_calls_section_begin|>", call_open)
    closing = ("<|tool_calls_section_end|>", call_close)

    @override
    def head(self) -> Steps[str]:
        yield from self.cursor.blanks()
        name = yield from self.cursor.word(NAME, NAME_LEN)
        yield from self.cursor.blanks()
        if not (yield from self.cursor.match("<|tool_call_argument_begin|>")):
            return ""
        head, colon, number = name.rpartition(":")
        return (head if colon and number.isdecimal() else name).removeprefix("functions.")

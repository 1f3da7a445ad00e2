"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, later `[TOOL_CALLS]name[ARGS]{...}` for each call.

Source: the chat templates of mistralai's models: a list up to Mistral-Small-3.1 (tokenizer versions 3 and 7), the other
form with version 11 (Mistral-Small-3.2, Magistral, Devstral), where `[CALL_ID]` and an id may follow the name.
"""

from __future__ import annotations

import re

from typing_extensions import override

from ktransformers.tokenizer.tools.base import NAME_LEN, JsonCalls, TaggedParser
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.json_text import JsonReader

__all__ = ["MistralParser"]

_NAME = re.compile(r"[\w.\-/:]*")


class MistralParser(TaggedParser):
    """A parser of both of Mistral's forms; what follows the tag says which it is."""

    opening = ("[TOOL_CALLS]",)

    @override
    def calls(self, tag: str) -> Steps[None]:
        char = yield from self.cursor.blanks()
        if char in "[{" and char:
            yield from JsonCalls(self).array()
            return
        name = yield from self.cursor.word(_NAME, NAME_LEN)
        if name and (yield from self.cursor.match("[CALL_ID]")):
            yield from self.cursor.word(_NAME, NAME_LEN)
        yield from self.cursor.match("[ARGS]")
        if name and (yield from self.cursor.blanks()) == "{":
            self.start_call(name)
            self.end_call((yield from JsonReader(self.cursor).value(self.argue)))

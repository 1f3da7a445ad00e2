"""gpt-oss (harmony): messages on channels.

    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>

Source: OpenAI's description of the harmony response format. Reasoning is the channel `analysis`, the answer `final`;
`commentary` without a recipient is meant for the reader too. The ends `<|call|>` and `<|return|>` are end tokens.
"""

from __future__ import annotations

import re

from ktransformers.tokenizer.tools.base import NAME_LEN, ToolParser
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.events import ToolSchemas
from ktransformers.tokenizer.tools.json_text import JsonReader

__all__ = ["HARMONY_TAGS", "HarmonyParser"]

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_TAGS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class HarmonyParser(ToolParser):
    """Reads reasoning, text and calls. has_tools: without them calls are text. starts_inside: of the reasoning."""

    def __init__(self, tools: ToolSchemas | None = None, *, has_tools: bool = True, starts_inside: bool = False):
        super().__init__(tools)
        self._has_tools, self._starts_inside = has_tools, starts_inside

    def _run(self) -> Steps[None]:
        if self._starts_inside and (yield from self.cursor.find(_ENDS, self.think)) is None:
            return
        while True:
            tag = yield from self.cursor.find((_START, _CHANNEL, *_ENDS), self.say)
            if tag is None:
                return
            if tag not in _ENDS:
                yield from self._message(tag)

    def _message(self, tag: str) -> Steps[None]:
        """From its head to its end."""
        self.keep(tag)
        head = [tag]
        if (yield from self.cursor.find((_MESSAGE,), head.append)) is None:
            self.give_back()
            return
        text = "".join(head)
        call, is_reasoning = _RECIPIENT.search(text), _ANALYSIS.search(text)
        if call and self._has_tools and len(call[1]) <= NAME_LEN:
            if (yield from self.cursor.blanks()) == "{":
                self.start_call(call[1])
                yield from JsonReader(self.cursor).value(self.argue)
                self.end_call()
            self.give_back()
        self.cursor.kept = None
        sink = self.think if is_reasoning and not call else self.say
        yield from self.cursor.find(_ENDS, sink)

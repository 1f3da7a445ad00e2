"""Functionary v3.2: messages to recipients, `all` for the user and a tool's name for a call.

    >>>all
    Let me look.>>>get_weather
    {"city": "Oslo"}

Source: the chat templates of meetkai/functionary-small-v3.2 and -medium-v3.2, whose prompts end with the first `>>>`.
"""

from __future__ import annotations

import re

from ktransformers.tokenizer.tools.base import NAME_LEN, ToolParser
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.json_text import JsonReader

__all__ = ["FunctionaryParser"]

_MARK, _USER = ">>>", "all"
_RECIPIENT = re.compile(r"[\w.\-]*")


class FunctionaryParser(ToolParser):
    """A parser of Functionary's messages, also of requests without tools: the head of those to the user is no text."""

    def _run(self) -> Steps[None]:
        self.keep("")
        yield from self.cursor.blanks()
        if (yield from self.cursor.match(_MARK)):
            self.keep(_MARK)
        yield from self._message()
        while (yield from self.cursor.find((_MARK,), self.say, drops_begun=self.num_hidden(0))) is not None:
            self.keep(_MARK)
            yield from self._message()

    def _message(self) -> Steps[None]:
        """The head behind its mark, and the call when it is to a tool. What is neither is text."""
        name = yield from self.cursor.word(_RECIPIENT, NAME_LEN)
        if name and (yield from self.cursor.match("\n")):
            if name == _USER:
                self.cursor.kept = None
                return
            if name in self.tools and (yield from self.cursor.blanks()) == "{":
                self.start_call(name)
                self.end_call((yield from JsonReader(self.cursor).value(self.argue)))
        self.give_back()

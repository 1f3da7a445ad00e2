"""gpt-oss (harmony): messages on channels.

    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>

Source: OpenAI's description of the harmony response format. Reasoning is the channel `analysis`, the answer `final`;
`commentary` without a recipient is meant for the reader too. The ends `<|call|>` and `<|return|>` are end tokens.
The recipient may stand in the role's part as well, which is where the chat template of gpt-oss writes past calls:

    <|start|>assistant to=functions.name<|channel|>commentary json<|message|>{...}<|call|>

The prompt ends with the role then, and the answer begins with ` to=functions.name`.
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
_RECIPIENT = re.compile(r"\bto=\s*(functions\.)?([^\s<]+)")
_WORD = re.compile(r"[^\s<]*")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class HarmonyParser(ToolParser):
    """A parser of reasoning, text and calls in harmony's channels. has_tools: without them calls are text.

    starts_inside: of the reasoning.
    """

    def __init__(self, tools: ToolSchemas | None = None, *, has_tools: bool = True, starts_inside: bool = False):
        super().__init__(tools)
        self._has_tools, self._starts_inside = has_tools, starts_inside

    def _run(self) -> Steps[None]:
        if self._starts_inside and (yield from self.cursor.find(_ENDS, self.think)) is None:
            return
        if not self._starts_inside:
            yield from self._first_message()
        while True:
            tag = yield from self.cursor.find((_START, _CHANNEL, *_ENDS), self.say, drops_begun=self.num_hidden(0))
            if tag is None:
                return
            if tag not in _ENDS:
                yield from self._message(tag)

    def _first_message(self) -> Steps[None]:
        """A message whose head began in the prompt and goes on with the recipient: `to=NAME`, perhaps a word, a tag."""
        self.keep("")
        yield from self.cursor.blanks()
        if (yield from self.cursor.match("to=")):
            head = ["to="]
            for _ in range(2):
                yield from self.cursor.blanks(head.append)
                head.append((yield from self.cursor.word(_WORD, NAME_LEN)))
            if (yield from self.cursor.blanks()) == "<":
                yield from self._message("".join(head))
                return
        self.give_back()

    def _message(self, tag: str) -> Steps[None]:
        """From its head, of which `tag` was read already, to its end."""
        self.keep(tag)
        head = [tag]
        if (yield from self.cursor.find((_MESSAGE,), head.append)) is None:
            self.give_back()
            return
        text = "".join(head)
        call, is_reasoning = _RECIPIENT.search(text), _ANALYSIS.search(text)
        # Models forget the namespace; a message to one of the tools is a call all the same.
        if call and self._has_tools and len(call[2]) <= NAME_LEN and (call[1] or call[2] in self.tools):
            char = yield from self.cursor.blanks()
            if char == "{":
                self.start_call(call[2])
                self.end_call((yield from JsonReader(self.cursor).value(self.argue)))
            elif (yield from self._is_over()):
                self.start_call(call[2])
                self.argue("{}")
                self.end_call(is_whole=True)
            self.give_back()
        self.cursor.kept = None
        sink = self.think if is_reasoning and not call else self.say
        yield from self.cursor.find(_ENDS, sink)

    def _is_over(self) -> Steps[bool]:
        """Whether the message ends here, with a tag; takes that."""
        for end in _ENDS:
            if (yield from self.cursor.match(end)):
                return True
        return False

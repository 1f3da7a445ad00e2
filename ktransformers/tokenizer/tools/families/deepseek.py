"""DeepSeek V3, R1 and V3.1: JSON between special tokens. V3.2 and V4 write XML, see xml_text.py.

Sources: the chat templates of deepseek-ai/DeepSeek-V3-0324, -R1-0528 and -V3.1.
"""

from __future__ import annotations

from typing_extensions import override

from ktransformers.tokenizer.tools.base import NAME_LEN
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.sections import NAME, SectionParser

__all__ = ["DeepSeekV3Parser", "DeepSeekV31Parser"]

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_SEP = "<｜tool▁sep｜>"
_FENCE = "```"


class DeepSeekV31Parser(SectionParser):
    """A parser of `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`."""

    call_open, call_close = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    opening = (_BEGIN, call_open)
    closing = (_END, call_close)

    @override
    def head(self) -> Steps[str]:
        yield from self.cursor.blanks()
        name = yield from self.cursor.word(NAME, NAME_LEN)
        return name if (yield from self.cursor.match(_SEP)) else ""


class DeepSeekV3Parser(DeepSeekV31Parser):
    """A parser of `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, then the arguments fenced as json on own lines."""

    @override
    def head(self) -> Steps[str]:
        yield from self.cursor.blanks()
        if not (yield from self.cursor.match("function")) or not (yield from self.cursor.match(_SEP)):
            return ""
        name = yield from self.cursor.word(NAME, NAME_LEN)
        yield from self.cursor.blanks()
        if (yield from self.cursor.match(_FENCE)):
            yield from self.cursor.match("json")
        return name

    @override
    def foot(self) -> Steps[bool]:
        yield from self.cursor.blanks()
        yield from self.cursor.match(_FENCE)
        return (yield from super().foot())

"""Llama 3 (JSON) and Llama 4 (Python): the whole answer is a call; there need be no tag.

Sources: the chat templates of meta-llama/Llama-3.1 and 3.2, and Llama-4, whose system prompt asks for
`[func_name1(param=value, ...), func_name2(...)]`. Because any JSON and any list looks like that, only the request's own
tools can be called, and a call in JSON needs its arguments.
"""

from __future__ import annotations

from typing_extensions import override

from ktransformers.tokenizer.tools.base import NAME_LEN, JsonCalls, ToolParser
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.keyword_arguments import KEYWORD, read_keywords

__all__ = ["LlamaJsonParser", "LlamaPythonicParser", "UntaggedParser"]


class UntaggedParser(ToolParser):
    """A parser of calls that need no tag.

    opening: what may stand in front of the calls, where they begin the answer or not. brackets: how they begin.
    doubtful: those of `opening` that stand in front of other texts, too.
    """

    opening: tuple[str, ...]
    doubtful: tuple[str, ...] = ()
    brackets: str

    def _run(self) -> Steps[None]:
        tag: str | None = ""
        while tag is not None:
            self._hides_begun = tag not in ("", *self.doubtful)  # any JSON begins as a call without a tag does
            self.keep(tag)
            char = yield from self.cursor.blanks()
            if char and char in self.brackets:
                yield from self.calls(tag)
            self.give_back()
            tag = yield from self.cursor.find(self.opening, self.say, drops_begun=self.num_hidden(0))

    def calls(self, tag: str) -> Steps[None]:
        """Read the calls that begin here, as far as they are calls."""
        raise NotImplementedError


class LlamaJsonParser(UntaggedParser):
    """A parser of `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or not; semicolons part several."""

    opening = ("<|python_tag|>",)
    brackets = "{"

    @override
    def calls(self, tag: str) -> Steps[None]:
        calls = JsonCalls(self, needs_arguments=True, is_known=True)
        while (yield from calls.call()):
            char = yield from self.cursor.blanks()
            if char not in (";", ","):
                return
            self.keep("")
            self.cursor.skip()
            if (yield from self.cursor.blanks()) != "{":
                return


class LlamaPythonicParser(UntaggedParser):
    """A parser of `[f(a=1, b="x"), g()]`, between `<|python_start|>` and `<|python_end|>` or not."""

    opening = ("<|python_start|>",)
    brackets = "["

    @override
    def calls(self, tag: str) -> Steps[None]:
        self.cursor.skip()
        while True:
            yield from self.cursor.blanks()
            name = yield from self.cursor.word(KEYWORD, NAME_LEN)
            if name not in self.tools or (yield from self.cursor.blanks()) != "(":
                return
            self.cursor.skip()
            self.start_call(name)
            is_whole = yield from read_keywords(self)
            self.end_call(is_whole)
            if not is_whole:
                return
            if (yield from self.cursor.blanks()) != ",":
                break
            self.keep("")
            self.cursor.skip()
        if (yield from self.cursor.match("]")):
            self.keep("")
            yield from self.cursor.blanks()
            if (yield from self.cursor.match("<|python_end|>")):
                self.cursor.kept = None

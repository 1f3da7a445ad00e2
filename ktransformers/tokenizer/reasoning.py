"""Splits an answer into its reasoning (`<think>` ... `</think>`) and its content, as it streams.

Only a tag at the very beginning of an answer opens reasoning: an answer may talk about the tag later. Line breaks right
after either tag belong to the tag. Does not know tokens or templates.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktransformers.tokenizer.stop import held_back

__all__ = ["ReasoningParser", "SplitText"]


@dataclass(frozen=True, slots=True)
class SplitText:
    """A piece of an answer: text of the reasoning, then text of the content. Either may be empty."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """tags: opening and closing tag, None for a model without them. starts_inside: the prompt wrote the opening tag."""

    def __init__(self, tags: tuple[str, str] | None, starts_inside: bool = False):
        self._open, self._close = tags or ("", "")
        self._state = "content" if tags is None else "reasoning" if starts_inside else "start"
        self._text = ""
        self._drops_newlines = starts_inside

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    def feed(self, piece: str) -> SplitText:
        self._text += piece
        if self._state == "start" and not self._leave_start():
            return SplitText()
        reasoning = self._take_reasoning() if self._state == "reasoning" else ""
        return SplitText(reasoning, self._take(len(self._text)) if self._state == "content" else "")

    def flush(self) -> SplitText:
        """What was held back. Call once, at the end of the answer."""
        rest = self._take(len(self._text))
        return SplitText(reasoning=rest) if self._state == "reasoning" else SplitText(content=rest)

    def _leave_start(self) -> bool:
        stripped = self._text.lstrip()
        if stripped.startswith(self._open):
            self._state, self._text, self._drops_newlines = "reasoning", stripped[len(self._open) :], True
        elif not self._open.startswith(stripped):
            self._state = "content"
        return self._state != "start"

    def _take_reasoning(self) -> str:
        end = self._text.find(self._close)
        if end < 0:
            return self._take(len(self._text) - held_back(self._text, (self._close,)))
        reasoning = self._take(end)
        self._text = self._text[len(self._close) :]
        self._state, self._drops_newlines = "content", True
        return reasoning

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        if self._drops_newlines and taken:
            taken = taken.lstrip("\r\n")
            self._drops_newlines = not taken
        return taken

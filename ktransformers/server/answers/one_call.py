"""An answer that may make one tool call only: it ends where that call does."""

from __future__ import annotations

from collections.abc import Iterator

from ktransformers.core import TokenEvent
from ktransformers.server.answers.choices import Choice
from ktransformers.server.answers.events import AnswerEvent, AnswerFinished, AnswerReason, ToolCallEnded

__all__ = ["OneCall"]


class OneCall(Choice):
    """A choice that ends the answer of another choice after its first tool call. What the engine computes after that is
    not shown.
    """

    def __init__(self, choice: Choice):
        self._choice, self._is_over = choice, False

    def feed(self, event: TokenEvent) -> tuple[AnswerEvent, ...]:
        """Return the client's events for an event of the backend, as Choice.feed does; none once the answer is over."""
        return () if self._is_over else tuple(self._cut(event))

    def _cut(self, event: TokenEvent) -> Iterator[AnswerEvent]:
        for one in self._choice.feed(event):
            yield one
            is_cut = event.finish_reason is not None and isinstance(one, ToolCallEnded) and not one.is_whole
            if isinstance(one, ToolCallEnded) and not is_cut:  # else the choice inside says why it ends
                self._is_over = True
                yield AnswerFinished(AnswerReason.TOOL_CALLS, None, event.stats)
                return

    def _split(self, text: str, is_last: bool, is_cut: bool) -> Iterator[AnswerEvent]:
        raise NotImplementedError("the choice inside splits its text")

"""The events that an answer becomes, which dialects write.

    AnswerStarted  (ReasoningDelta | TextDelta | ToolCallStarted ToolArgumentsDelta* ToolCallEnded | TokenAdded)*
    AnswerFinished

One AnswerStep carries what one token changed. Tokens and texts are apart: text can come later than its token
(unfinished characters, tags, stop strings), several tokens may have none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ktransformers.core import GenerationStats, TokenLogprobs

__all__ = [
    "AnswerEvent",
    "AnswerFinished",
    "AnswerReason",
    "AnswerStarted",
    "AnswerStep",
    "ReasoningDelta",
    "TextDelta",
    "TokenAdded",
    "ToolArgumentsDelta",
    "ToolCallEnded",
    "ToolCallStarted",
    "WholeAnswer",
    "WholeCall",
]


class AnswerReason(StrEnum):
    """Reason why an answer ended. ABORT reaches a client only when the server goes down in the middle of its answer."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """Event that the prompt is computed. stats: its counts; the same object as in AnswerFinished, filled as the answer
    goes on.

    prompt_text, prompt_logprobs: for requests with an echo; one entry per prompt token, None for the first.
    """

    stats: GenerationStats
    prompt_text: str = ""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class TokenAdded:
    """Event with one more token of the answer. is_end: it ended the answer, and has no text."""

    token_id: int
    logprobs: TokenLogprobs | None
    is_end: bool


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Event with more of the reasoning, which comes before the text. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Event with more of the answer's text. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """Event that a tool call begins: index counts the calls of one answer from 0; id is unique."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """Event with more of a call's arguments, which are a JSON object as text. Never empty."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """Event that a tool call has no more arguments. is_whole: they are an object that the model closed.

    Else they are the beginning of one: the answer was cut there, or the model went on with what is no JSON.
    """

    index: int
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class AnswerFinished:
    """The last event of an answer. stop: the stop string behind STOP, if it was one. stats: what this answer alone
    took.
    """

    reason: AnswerReason
    stop: str | None
    stats: GenerationStats


AnswerEvent = (
    AnswerStarted
    | TokenAdded
    | ReasoningDelta
    | TextDelta
    | ToolCallStarted
    | ToolArgumentsDelta
    | ToolCallEnded
    | AnswerFinished
)


@dataclass(frozen=True, slots=True)
class AnswerStep:
    """The events that one token caused in answer number `index` of the request."""

    index: int
    events: tuple[AnswerEvent, ...]


@dataclass(slots=True)
class WholeCall:
    """A tool call of a whole answer. is_whole: see ToolCallEnded."""

    id: str
    name: str
    arguments: str = ""
    is_whole: bool = False


@dataclass(slots=True)
class WholeAnswer:
    """An answer that is sent as a whole, built by `add` from its events."""

    reasoning: str = ""
    text: str = ""
    calls: list[WholeCall] = field(default_factory=list)
    finished: AnswerFinished | None = None

    def add(self, event: AnswerEvent) -> None:
        """Add the answer's next event. Token events are left to dialects that show them."""
        match event:
            case ReasoningDelta(text):
                self.reasoning += text
            case TextDelta(text):
                self.text += text
            case ToolCallStarted(_, id, name):
                self.calls.append(WholeCall(id, name))
            case ToolArgumentsDelta(index, text):
                self.calls[index].arguments += text
            case ToolCallEnded(index, is_whole):
                self.calls[index].is_whole = is_whole
            case AnswerFinished():
                self.finished = event

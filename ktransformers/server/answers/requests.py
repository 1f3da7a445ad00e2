"""Requests for answers, whatever the dialect. Adapters fill these; values that a dialect allows are in range.

body of a dialect ── its adapter ──> ChatRequest | TextRequest ── prepare ──> PreparedRequest ──> AnswerStep
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ktransformers.core import Constraint
from ktransformers.engine.sequence.keywords import SamplingKeywords
from ktransformers.errors import ConfigError
from ktransformers.media.picture import ReadPicture

__all__ = [
    "MAX_ANSWERS",
    "AnswerRequest",
    "ChatRequest",
    "Content",
    "Conversation",
    "Message",
    "PastCall",
    "TextRequest",
    "Tool",
    "ToolChoice",
    "UnreadPicture",
    "count_answers",
    "derived_id",
    "joined",
    "new_id",
]

MAX_ANSWERS = 128
"""Most answers of one request: prompts times n."""


def new_id(prefix: str) -> str:
    """Return a new random id behind this prefix."""
    return f"{prefix}-{secrets.token_hex(16)}"


def count_answers(num_prompts: int, n: int) -> int:
    """Return the answers of a request, num_prompts times n. Raises ConfigError when they are more than one request may
    want.
    """
    if num_prompts * n > MAX_ANSWERS:
        raise ConfigError(f"{num_prompts} prompts times n {n} are more than {MAX_ANSWERS} answers in one request")
    return num_prompts * n


def derived_id(prefix: str, of: str, number: int, joint: str = "-") -> str:
    """Return a unique id that is always the same for part `number` of the object with the id `of`."""
    return f"{prefix}{joint}{hashlib.blake2b(f'{of}/{number}'.encode(), digest_size=16).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """The fields that all requests for answers share.

    id: of the answer, spelled as the dialect does. model: the name that was asked for. sampling: what the request says;
    the operator says the rest, else the model's authors. default_max_tokens: of the route, for requests that name no
    limit. constraint: what the answer must look like, as it was asked for. n: answers per prompt. timeout: seconds,
    priority: a smaller number is served earlier. cache_salt: prefixes are shared within the same salt only. prediction:
    text that the client expects of the answer. is_prompt_only: nothing but the prompt is looked at; the one token that
    is computed for that is not part of the answer.
    """

    id: str
    model: str | None
    sampling: SamplingKeywords = field(default_factory=SamplingKeywords)
    default_max_tokens: int | None = None
    constraint: Constraint | None = None
    n: int = 1
    priority: int = 0
    timeout: float | None = None
    cache_salt: str = ""
    prediction: str = ""
    is_prompt_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PastCall:
    """A tool call that an earlier answer made."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadPicture:
    """A picture as it was sent. `answers/pictures.py` makes a ReadPicture of it.

    source: its URL, or its bytes as base64, which has no colon. place: in the body, for errors. name: of the field, for
    the log and the header. detail: OpenAI's: low, high or auto; None: auto.
    """

    source: str = field(repr=False)
    place: str
    name: str
    detail: str | None = None


Part = str | UnreadPicture | ReadPicture
Content = str | Sequence[Part]
"""The content of a turn: a text, or texts and pictures in their order."""


def joined(parts: Iterable[Part], joint: str = "\n") -> Content:
    """Return these parts as the content of one turn: neighbouring texts are one, with `joint` between them."""
    made: list[Part] = []
    for _, group in groupby(parts, key=lambda part: isinstance(part, str)):
        run = list(group)
        texts = [part for part in run if isinstance(part, str)]
        made += filter(None, [joint.join(texts)] if texts else run)
    return made[0] if len(made) == 1 and isinstance(made[0], str) else tuple(made) or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A turn of a conversation. The role goes to the model's chat template as it is; the template knows which roles
    there are.

    name, tool_call_id: of whom, and to which call this is the answer; None where the dialect has or needs none.
    """

    role: str
    content: Content = ""
    reasoning: str = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Sequence[PastCall] = ()

    @property
    def parts(self) -> Sequence[Part]:
        """The texts and pictures of the content, in their order."""
        return (self.content,) if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        """The texts of the content, without its pictures."""
        return "\n".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. parameters: a JSON schema. None is not shown to the model."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Limits on how many tool calls an answer makes. is_required: at least one. name: of the tool to call. max_calls:
    None: any number.

    Which tools there are to choose from is the Conversation's to say.
    """

    is_required: bool = False
    name: str | None = None
    max_calls: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation of which a chat template makes a prompt.

    tools: empty when the model must not call any. template_kwargs: more for the chat template. reasoning_effort,
    thinks, reasoning_budget (tokens): about the reasoning; None: as the template has it. What it does not know of
    these four has no effect, see `answers/prompts.py`. opens_answer: whether the prompt ends with the header of
    the answer. continues: the last message is the beginning of the answer, which goes on from its last character.
    drops_oldest: whether the oldest turns leave where all are longer than the context; None: as the operator says.
    max_prompt_len: they leave until the prompt has at most so many tokens.
    altered: fields of messages that stand in `messages` otherwise than they were sent, see `history.py`. field_names:
    what the dialect calls fields of a conversation and names of folds, where that is not as in chat completions.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    thinks: bool | None = None
    reasoning_budget: int | None = None
    opens_answer: bool = True
    continues: bool = False
    drops_oldest: bool | None = None
    max_prompt_len: int | None = None
    altered: Sequence[str] = ()
    field_names: Mapping[str, str] = field(default_factory=dict)

    def named(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return these fields by the names that the client knows."""
        return tuple(self.field_names.get(name, name) for name in names)

    @property
    def parts(self) -> Sequence[Part]:
        """The texts and pictures of all messages, in their order."""
        return [part for message in self.messages for part in message.parts]

    @property
    def continues_text(self) -> bool:
        """Whether the answer goes on from text (or calls) of the last message."""
        return self.continues and bool(self.messages[-1].content or self.messages[-1].tool_calls)

    @property
    def continues_reasoning(self) -> bool:
        """Whether the answer goes on inside its reasoning: the last message has no more than that."""
        return self.continues and not self.continues_text and bool(self.messages[-1].reasoning)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(AnswerRequest):
    """A request for the next turn of a conversation."""

    conversation: Conversation
    tool_choice: ToolChoice = ToolChoice()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest(AnswerRequest):
    """A request for the continuation of texts or of token ids, as they are: no template, no reasoning, no tool calls.

    has_echo: AnswerStarted shows the prompt. max_prompt_len: of longer ones the last so many tokens are taken; -1: as
    many as leave room for an answer; None: longer ones are refused.
    """

    prompts: Sequence[str | Sequence[int]]
    has_echo: bool = False
    max_prompt_len: int | None = None

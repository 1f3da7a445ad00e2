"""Reads the body of POST /v1/responses into the neutral request. Knows the store, not the model."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from ktransformers.errors import ConfigError
from ktransformers.server.answers.constraints import constraint_of
from ktransformers.server.answers.replay import Replay
from ktransformers.server.answers.requests import (
    ChatRequest,
    Conversation,
    Message,
    ToolChoice,
    derived_id,
    joined,
)
from ktransformers.server.api.openai.responses.earlier import Earlier
from ktransformers.server.api.openai.responses.items import Turns, answered_calls, kind_of
from ktransformers.server.api.openai.responses.schemas import ResponsesBody
from ktransformers.server.api.openai.responses.store import ResponseStore, Turn
from ktransformers.server.api.openai.responses.tools import ToolSet, read_tools
from ktransformers.tokenizer.templates.effort import EFFORT_VARIABLES

__all__ = ["Exchange", "begin_exchange"]

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
_INCLUDABLE = frozenset(
    {
        LOGPROBS,
        SEALED_REASONING,
        "web_search_call.results",
        "web_search_call.action.sources",
        "file_search_call.results",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "message.input_image.image_url",
    }
)
"""What requests may ask to be shown; of tools that do not run here there is nothing to show."""

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def _made_id(prefix: str) -> str:
    """An id that nothing else has, spelled as OpenAI's are."""
    return f"{prefix}_{secrets.token_hex(16)}"


@dataclass(slots=True)
class Exchange:
    """A request to /v1/responses while it is answered. id: of the response. earlier: what it refers to. note: called
    with fields without effect.

    items (the input's), context and tools are there once `read` was called, which works on a thread.
    """

    body: ResponsesBody
    id: str
    earlier: Earlier
    note: Callable[[Sequence[str]], None]
    template_knows: Callable[[str], bool]
    items: Sequence[dict[str, Any]] = ()
    context: tuple[Turn, ...] = ()
    tools: ToolSet = field(default_factory=ToolSet)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of earlier turns that `read` has to go through beside the body."""
        return sum(len(turn.data) for turn in self.earlier.turns)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's text comes with log probabilities."""
        return LOGPROBS in (self.body.include or ()) or bool(self.body.top_logprobs)

    @property
    def wants_sealed(self) -> bool:
        """Whether the answer's reasoning comes with encrypted_content."""
        return SEALED_REASONING in (self.body.include or ())

    def _field_names(self) -> dict[str, str]:
        """See Conversation."""
        has_system = any(item.get("role") in ("system", "developer") for item in self.items)
        return {
            "messages.system": "instructions" if self.body.instructions and not has_system else "input.system",
            "messages.user": "input.user",
            "messages.assistant": "input.assistant",
            "messages.empty": "input.empty",
            "messages.tool_calls": "input.function_call",
            "messages.tool": "input.function_call_output",
            "reasoning_effort": "reasoning.effort",
        }

    def read(self) -> ChatRequest:
        """Read the body into a request. Raises ConfigError and UnsupportedError for what cannot be honoured."""
        body = self.body
        self.tools = read_tools(body.tools, body.tool_choice)
        self.items = self._resolved()
        earlier = [item for turn in self.earlier.history for item in turn.items()]
        turns = Turns(answered_calls([*earlier, *self.items]))
        for item in earlier:
            turns.add(item, "previous_response_id")
        for index, item in enumerate(self.items):
            turns.add(item, f"input[{index}]")
        messages = _with_instructions(body.instructions, turns.end())
        if not messages:
            raise ConfigError("input: there is nothing to answer; send a text or a message")
        knows_effort = any(map(self.template_knows, EFFORT_VARIABLES))
        self.note([*self._ignored_fields(knows_effort), *self.tools.ignored, *turns.ignored])
        if body.keeps:
            listed = (_listed(item, self.id, index) for index, item in enumerate(self.items))
            self.context = (*self.earlier.history, Turn.of(listed))
        return ChatRequest(
            id=self.id,
            model=body.model,
            sampling=body.sampling(
                max_tokens=body.max_output_tokens,
                stop=list(filter(None, [body.stop] if isinstance(body.stop, str) else body.stop or ())),
                logprobs=(body.top_logprobs or 0) if self.wants_logprobs else None,
            ),
            constraint=constraint_of({"text.format": body.text_format, **body.constraint_fields()}),
            **body.scheduling,
            prediction=body.predicted_text,
            conversation=Conversation(
                messages=messages,
                altered=tuple(turns.altered),
                field_names=self._field_names(),
                tools=self.tools.shown,
                template_kwargs=body.chat_template_kwargs or {},
                reasoning_effort=body.reasoning.effort if body.reasoning and knows_effort else None,
                drops_oldest=None if body.truncation is None else body.truncation == "auto",
            ),
            tool_choice=self._choice(),
        )

    def _choice(self) -> ToolChoice:
        """Where a call is optional, the writer cuts an answer that may have one of them only."""
        choice = self.tools.choice
        is_single = choice.is_required and self.body.parallel_tool_calls is False
        return replace(choice, max_calls=1) if is_single else choice

    def _resolved(self) -> list[dict[str, Any]]:
        """The input's items, those in the place of references too. Each turn is parsed once."""
        referred = self.earlier.referred
        turns = set(referred.values())
        found = {item["id"]: item for turn in turns for item in turn.items() if item["id"] in referred}
        return [found[item["id"]] if _refers(item) else item for item in self.body.input or ()]

    def _ignored_fields(self, knows_effort: bool) -> Iterable[str]:
        body = self.body
        if body.reasoning and body.reasoning.effort and not knows_effort:
            yield "reasoning.effort"
        yield from (f"include.{name}" for name in body.include or () if name not in _INCLUDABLE)


def begin_exchange(
    body: ResponsesBody,
    store: ResponseStore,
    key: str,
    note: Callable[[Sequence[str]], None],
    template_knows: Callable[[str], bool],
    replay: Replay | None = None,
) -> Exchange:
    """Look up the earlier turns that a request refers to, and return its exchange. Raises UnknownIdError for what is
    not kept.

    replay: it goes on here, and has with it what it referred to then.
    """
    id = _made_id("resp") if replay is None else replay.kept.opened.id
    if replay is not None and replay.kept.opened.beside:
        return Exchange(body, id, Earlier.unpacked(replay.kept.opened.beside), note, template_knows)
    previous = body.previous_response_id
    history = store.get(key, previous).turns if previous is not None else ()
    ids = [_reference(item, index) for index, item in enumerate(body.input or ()) if _refers(item)]
    referred = {id: store.turn_of(key, id) for id in ids}
    return Exchange(body, id, Earlier(history, referred), note, template_knows)


def _refers(item: dict[str, Any]) -> bool:
    """References may leave out their type."""
    return item.get("type") == "item_reference" or set(item) == {"id"}


def _reference(item: dict[str, Any], index: int) -> str:
    if not isinstance(item.get("id"), str):
        raise ConfigError(f"input[{index}].id must be a string")
    return str(item["id"])


def _with_instructions(instructions: str | None, messages: list[Message]) -> list[Message]:
    """One system turn of the instructions and what the conversation begins with: templates take the first one only."""
    leading = list(takewhile(lambda message: message.role in ("system", "developer"), messages))
    if not instructions and len(leading) < 2:
        return messages
    parts = [instructions, *(part for message in leading for part in message.parts)]
    role = "system" if instructions else leading[0].role
    return [Message(role=role, content=joined(filter(None, parts), "\n\n")), *messages[len(leading) :]]


def _listed(item: dict[str, Any], response_id: str, index: int) -> dict[str, Any]:
    """An item of the input as it is kept and listed: with an id, and with parts for its text."""
    kind, id = kind_of(item), item.get("id")
    if not isinstance(id, str) or not id:
        id = derived_id(_PREFIXES.get(kind, "item"), f"{response_id}/input", index, "_")
    made = item | {"type": kind, "id": id}
    if kind == "message" and isinstance(item.get("content"), str):
        is_ours = item.get("role") == "assistant"
        text = {"text": item["content"]}
        made["content"] = [
            {"type": "output_text", "annotations": []} | text if is_ours else {"type": "input_text"} | text
        ]
    if kind != "reasoning" and made.get("status") is None:
        made["status"] = "completed"
    return made

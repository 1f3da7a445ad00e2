"""Edits of a conversation before the model reads it, as `context_management` asks for them.

    clear_tool_uses_20250919   results of the oldest tool calls become a short text, and their inputs empty on request
    clear_thinking_20251015    reasoning of the oldest turns is left out

Source: Anthropic's documentation of context editing; values that a request leaves out are Anthropic's. A context that
is smaller than the trigger triggers where the prompt no longer fits it. Clients send the whole conversation each time,
and the same edits clear the same parts of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ktransformers.server.answers.requests import Conversation, Message, PastCall
from ktransformers.server.api.anthropic.schemas import ContextEdit, Keep, Trigger

__all__ = ["CLEARED", "CLEAR_THINKING", "CLEAR_TOOL_USES", "Edited", "edited"]

CLEAR_TOOL_USES, CLEAR_THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"

CLEARED = "[The result of this call was cleared to make room.]"
"""What the model reads in place of a result."""

_TRIGGER = Trigger(type="input_tokens", value=100_000)
_KEPT_USES, _KEPT_TURNS = 3, 1

Count = Callable[[Conversation], int]
"""Tokens of the prompt that a conversation makes."""


@dataclass(frozen=True, slots=True)
class Edited:
    """A conversation after its edits. applied: what was done, as responses say it. original_len: tokens of the prompt
    before.
    """

    conversation: Conversation
    applied: tuple[dict[str, Any], ...]
    original_len: int


def edited(conversation: Conversation, edits: Sequence[ContextEdit], count: Count, room: int) -> Edited:
    """Return the conversation after these edits, made in their order; those of other types do nothing.

    count: called for each step that cleared something. room: tokens of a prompt that leaves room for the answer.
    """
    before = original_len = count(conversation)
    applied: list[dict[str, Any]] = []
    for edit in edits:
        clear = {CLEAR_TOOL_USES: _without_results, CLEAR_THINKING: _without_thoughts}.get(edit.type)
        made = None if clear is None else clear(conversation.messages, edit, before, room)
        if made is None:
            continue
        messages, said = made
        changed = replace(conversation, messages=messages)
        after = count(changed)
        least = edit.clear_at_least.value if edit.clear_at_least is not None else None
        if before - after < (least or 0):
            continue
        applied.append({"type": edit.type, **said, "cleared_input_tokens": max(before - after, 0)})
        conversation, before = changed, after
    return Edited(conversation, tuple(applied), original_len)


_Cleared = tuple[list[Message], dict[str, int]]
"""The messages, and how many of what was cleared."""


def _without_results(messages: Sequence[Message], edit: ContextEdit, num_tokens: int, room: int) -> _Cleared | None:
    calls = list(_calls(messages))
    trigger = edit.trigger or _TRIGGER
    has_many = len(calls) if trigger.type == "tool_uses" else num_tokens
    if has_many <= (trigger.value or 0) and num_tokens <= room:
        return None
    keep = edit.keep if isinstance(edit.keep, Keep) else None
    kept = _KEPT_USES if keep is None or keep.value is None else keep.value
    old = {id(call): call for call in calls[: max(len(calls) - kept, 0)] if call.name not in (edit.exclude_tools or ())}
    ids = {call.id for call in old.values()} - {call.id for call in calls if id(call) not in old} - {None}
    made, num_cleared = list[Message](), 0
    for message in messages:
        if message.role == "tool" and message.tool_call_id in ids and message.content != CLEARED:
            num_cleared += 1
            message = replace(message, content=CLEARED)
        elif any(_is_emptied(call, edit) for call in message.tool_calls if id(call) in old):
            emptied = [
                replace(call, arguments={}) if id(call) in old and _is_emptied(call, edit) else call
                for call in message.tool_calls
            ]
            message = replace(message, tool_calls=emptied)
        made.append(message)
    return (made, {"cleared_tool_uses": num_cleared}) if num_cleared else None


def _calls(messages: Sequence[Message]) -> Iterator[PastCall]:
    for message in messages:
        yield from message.tool_calls


def _is_emptied(call: PastCall, edit: ContextEdit) -> bool:
    """Whether the input of this call, whose result is cleared, is cleared too."""
    wanted = edit.clear_tool_inputs
    return bool(call.arguments) and (call.name in wanted if isinstance(wanted, list) else bool(wanted))


def _without_thoughts(messages: Sequence[Message], edit: ContextEdit, num_tokens: int, room: int) -> _Cleared | None:
    """A turn is everything that the assistant says up to the user's next text."""
    keep = edit.keep
    if keep == "all" or (isinstance(keep, Keep) and keep.type == "all"):
        return None
    kept = _KEPT_TURNS if keep is None or keep.value is None else keep.value
    turns: list[list[int]] = [[]]
    for at, message in enumerate(messages):
        if message.role == "user":
            turns.append([])
        elif message.reasoning:
            turns[-1].append(at)
    thoughtful = [turn for turn in turns if turn]
    old = thoughtful[: max(len(thoughtful) - kept, 0)]
    places = {at for turn in old for at in turn}
    if not places:
        return None
    made = [replace(message, reasoning="") if at in places else message for at, message in enumerate(messages)]
    return made, {"cleared_thinking_turns": len(old)}

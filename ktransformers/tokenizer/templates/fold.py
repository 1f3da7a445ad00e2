"""Folds the turns that a chat template drops or refuses into the nearest ones that it keeps; leaves all others alone.

    messages ── texts, ids, arguments ──> calls and results ──> system turns ──> neighbours ──> messages

Every text stays, in its order. What depends on the place of a turn depends on the turns before it and on the next one
only, so that a conversation that goes on begins as it did before. Takes as many steps as there are messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ktransformers.tokenizer.templates.calls import SpellCalls, name_of, with_arguments, with_ids
from ktransformers.tokenizer.templates.probe import CallForm
from ktransformers.tokenizer.templates.traits import Traits

__all__ = ["WHY", "Folded", "fold"]

_BLANK = "\n\n"
_ROLES = {"S": "system", "D": "developer"}
_Turn = dict[str, Any]

WHY: Mapping[str, str] = {
    "messages.system": "a system or developer turn that the template does not keep is part of another turn",
    "messages.user": "turns of the user that follow each other are one turn",
    "messages.assistant": "turns of the assistant that follow each other are one turn",
    "messages.empty": "a turn without text stands where the template wants one",
    "messages.tool_calls": "calls that the template does not keep are turns of their own, or text",
    "messages.tool": "results of tools that the template does not keep are text of another turn",
}
"""What a fold can do, by the names that responses say it with."""


@dataclass(frozen=True, slots=True)
class Folded:
    """A folded conversation. messages: for the template. changes: what was done to them, of the names in WHY."""

    messages: list[_Turn]
    changes: tuple[str, ...] = ()


def fold(messages: Sequence[Mapping[str, Any]], traits: Traits, spell: SpellCalls, *, continues: bool) -> Folded:
    """Fold the conversation into the turns that this template keeps.

    spell: writes calls as text. continues: the last turn is the beginning of the answer, and stays the last.
    """
    if not traits.is_understood:
        return Folded([dict(message) for message in messages])
    work = _Fold(traits, spell, continues)
    turns = [work.plain(dict(message)) for message in messages]
    turns = work.calls(turns)
    turns = work.systems(turns)
    turns = work.neighbours(turns)
    return Folded([work.in_parts(turn) for turn in turns], tuple(work.changes))


class _Texts(list[str]):
    """The content of a turn that has taken others' texts: a string that grows would be copied each time."""


def _text(turn: Mapping[str, Any]) -> str:
    content = turn.get("content")
    if isinstance(content, _Texts):
        return _joined_text(*content)
    return content if isinstance(content, str) else ""


def _with_text(turn: _Turn, text: str) -> _Turn:
    """The turn with one more text."""
    texts = turn.get("content")
    if not isinstance(texts, _Texts):
        texts = _Texts([_text(turn)])
    texts.append(text)
    return {**turn, "content": texts}


def _is_joinable(turn: Mapping[str, Any]) -> bool:
    """Whether its content is a text, or nothing: parts that are no text cannot be joined."""
    return turn.get("content") is None or isinstance(turn["content"], str | _Texts)


def _joined_text(*texts: str) -> str:
    return _BLANK.join(text for text in texts if text)


def _kind(turn: Mapping[str, Any]) -> str:
    """The letter that probe.py has for it; "?" for roles that are not known."""
    role = turn.get("role")
    if role == "assistant" and turn.get("tool_calls"):
        return "C"
    return {"system": "S", "developer": "D", "user": "U", "assistant": "A", "tool": "T"}.get(str(role), "?")


class _Fold:
    """One conversation on its way."""

    def __init__(self, traits: Traits, spell: SpellCalls, continues: bool):
        self.changes: dict[str, None] = {}
        self._traits, self._spell, self._continues = traits, spell, continues
        self._looked_at = 0

    def _note(self, name: str) -> None:
        self.changes[name] = None

    # Texts.

    def plain(self, turn: _Turn) -> _Turn:
        """Content as one text, where it is a list of texts that the template does not write as a list."""
        content, role = turn.get("content"), str(turn.get("role"))
        if role == "assistant" and content is None:
            turn["content"] = ""
        is_texts = isinstance(content, list) and all(
            isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
        )
        if is_texts and (role in self._traits.parts or not self._traits.takes_parts(role)):
            turn["content"] = "\n".join(part["text"] for part in content or ())
        return turn

    def in_parts(self, turn: _Turn) -> _Turn:
        """The other way round, where the template wants lists."""
        if turn.get("role") in self._traits.parts and isinstance(turn.get("content"), str):
            return {**turn, "content": [{"type": "text", "text": turn["content"]}]}
        return turn

    # Calls and results.

    def calls(self, turns: Sequence[_Turn]) -> list[_Turn]:
        """Past calls and their results in the form that the template takes."""
        if all(_kind(turn) not in "CT" for turn in turns):
            return list(turns)
        form = self._traits.call_form
        names = {call.get("id"): name_of(call) for turn in turns for call in turn.get("tool_calls") or ()}
        if form is None:
            return [self._without_calls(turn, names) for turn in turns]
        needs_ids = not self._traits.takes_missing_ids
        turns = with_ids(turns, form.ids, needs_ids=needs_ids, needs_names=form.has_names)
        made: list[_Turn] = []
        at = 0
        while at < len(turns):
            turn = turns[at]
            at += 1
            if _kind(turn) != "C":
                made.append(turn)
                continue
            results = list(takewhile(lambda one: _kind(one) == "T", turns[at:]))
            at += len(results)
            made += self._turn_of_calls(turn, results, form, is_last=at == len(turns))
        return made

    def _without_calls(self, turn: _Turn, names: Mapping[Any, str]) -> _Turn:
        if _kind(turn) == "C":
            self._note("messages.tool_calls")
            rest = {key: value for key, value in turn.items() if key != "tool_calls"}
            return {**rest, "content": _joined_text(_text(turn), self._spell(turn["tool_calls"]))}
        if _kind(turn) == "T" and not all(map(self._traits.keeps, ("UAT", "UATA"))):
            return self._result_as_text(turn, names.get(turn.get("tool_call_id")))
        return turn

    def _result_as_text(self, turn: _Turn, name: str | None = None) -> _Turn:
        self._note("messages.tool")
        name = turn.get("name") or name
        return {"role": "user", "content": f"Result of {name or 'the call'}:\n{_text(turn)}"}

    def _turn_of_calls(self, turn: _Turn, results: Sequence[_Turn], form: CallForm, is_last: bool) -> list[_Turn]:
        traits, calls = self._traits, turn["tool_calls"]
        is_begun = is_last and not results and self._continues
        if len(calls) > 1 and not is_begun and traits.two_calls == "text":
            names = {call.get("id"): name_of(call) for call in calls}
            self._note("messages.tool_calls")
            return [self._without_calls(turn, names), *(self._result_as_text(one) for one in results)]
        as_text, takes_text = form.arguments == "text", form.arguments == "mapping" and traits.takes_text_arguments
        calls = [with_arguments(call, as_text=as_text, takes_text=takes_text) for call in calls]
        made: list[_Turn] = []
        text = _text(turn)
        if text and form.text_field != "content":
            turn = {**turn, form.text_field: text, "content": form.content}
        elif text and not is_begun and not traits.keeps_text_beside_calls:
            self._note("messages.tool_calls")
            made.append({key: value for key, value in turn.items() if key != "tool_calls"})
            turn = {"role": "assistant", "content": form.content}
        elif not text and _is_joinable(turn):
            turn = {**turn, "content": form.content}
        if len(calls) == 1 or is_begun or traits.two_calls == "keep":
            return [*made, {**turn, "tool_calls": calls}, *results]
        self._note("messages.tool_calls")
        return [*made, *_one_by_one(turn, calls, results, form)]

    # System and developer turns.

    def systems(self, turns: Sequence[_Turn]) -> list[_Turn]:
        """System and developer turns where the template keeps them, others as text of the user's turns."""
        turns = [self._known_role(turn) for turn in turns]
        beginning = list(takewhile(lambda turn: _kind(turn) in "SD", turns))
        rest = turns[len(beginning) :]
        made: list[_Turn] = []
        pending: list[str] = []  # texts for the next turn that takes some
        if beginning:
            made, pending = self._beginning(beginning, rest)
        is_awaited = False  # a call's result is to come
        for at, turn in enumerate(rest):
            kind = _kind(turn)
            is_between = is_awaited and kind in "SDU" and self._is_between(rest, at)
            kept = self._kept(turn, is_between)
            if kept is None:
                self._note("messages.user" if kind == "U" else "messages.system")
                if not pending and not is_between and made and _kind(made[-1]) == "U" and _is_joinable(made[-1]):
                    made[-1] = _with_text(made[-1], _text(turn))
                else:
                    pending.append(_text(turn))
                continue
            if pending and _is_joinable(kept) and (kind == "U" or (kind == "T" and is_awaited)):
                kept, pending = {**kept, "content": _joined_text(*pending, _text(kept))}, []
            if pending:
                made.append({"role": "user", "content": _joined_text(*pending)})
                pending = []
            is_awaited = kind == "C" or (is_awaited and kind != "A")
            made.append(kept)
        return [*made, {"role": "user", "content": _joined_text(*pending)}] if pending else made

    def _kept(self, turn: _Turn, is_between: bool) -> _Turn | None:
        """The turn in the role in which it is kept where it stands; None where it is not."""
        kind = _kind(turn)
        if kind not in "SDU" or not _is_joinable(turn):
            return turn
        if kind == "U":
            return turn if not is_between or self._traits.keeps_between_results else None
        if self._traits.keeps_late(kind, between=is_between):
            return turn
        is_system = kind == "D" and self._traits.keeps_late("S", between=is_between)
        return {**turn, "role": "system"} if is_system else None

    def _known_role(self, turn: _Turn) -> _Turn:
        """`developer` is OpenAI's newer word for system; most models have never seen it."""
        is_other = _kind(turn) == "D" and not self._traits.knows_developer
        return {**turn, "role": "system"} if is_other else turn

    def _is_between(self, turns: Sequence[_Turn], start: int) -> bool:
        """Whether, behind a call, its result is still to come: before the next of the assistant's turns."""
        while self._looked_at <= start or (self._looked_at < len(turns) and _kind(turns[self._looked_at]) not in "ACT"):
            self._looked_at += 1  # on from where the last look ended: each turn is looked at once
        return self._looked_at < len(turns) and _kind(turns[self._looked_at]) == "T"

    def _beginning(self, turns: Sequence[_Turn], rest: Sequence[_Turn]) -> tuple[list[_Turn], list[str]]:
        """The turns that the conversation begins with, and texts of theirs that the first of the user's turns takes."""
        letters, kinds = "".join(map(_kind, turns)), [_kind(turn) for turn in rest]
        has = {"has_calls": "C" in kinds or "T" in kinds, "has_answer": kinds[-1:] == ["A"]}
        kept = [letter for letter in "DS" if self._traits.keeps_first(letter, **has)]
        is_kept = letters in kept if len(letters) == 1 else letters[0] in kept and self._traits.keeps_beginning(letters)
        if is_kept or not all(map(_is_joinable, turns)):
            return list(turns), []
        text = _joined_text(*map(_text, turns))
        if len(turns) > 1 or not kept:
            self._note("messages.system")
        if not kept:
            return [], [text]
        return [{**turns[0], "role": _ROLES[kept[-1]], "content": text}], []

    # Neighbours.

    def neighbours(self, turns: Sequence[_Turn]) -> list[_Turn]:
        """Neighbours that the template keeps beside each other."""
        made: list[list[_Turn]] = []  # turns that become one
        num_first = len(list(takewhile(lambda turn: _kind(turn) in "SD", turns)))
        is_awaited = False  # a call's result is to come
        for turn in turns:
            kind, before = _kind(turn), _kind_of_all(made[-1]) if made else "0"
            if before in "SD" and len(made) == num_first:
                before = "0"
            if kind == "T" and is_awaited:
                before = "C"
            is_awaited = kind == "C" or (is_awaited and kind != "A")
            self._append(made, turn, before, has_system=num_first > 0)
        return self._with_user([_joined(group) for group in made])

    def _append(self, made: list[list[_Turn]], turn: _Turn, before: str, has_system: bool) -> None:
        remedy = self._traits.remedy(before, _kind(turn), has_system=has_system)
        if remedy == "text":
            self._append(made, self._result_as_text(turn), before, has_system)
            return
        if remedy == "join" and all(map(_is_joinable, (made[-1][-1], turn))):
            self._note("messages.assistant" if _kind(turn) in "AC" else "messages.user")
            made[-1].append(turn)
            return
        if remedy in ("V", "E"):
            self._note("messages.empty")
            made.append([{"role": "user" if remedy == "V" else "assistant", "content": self._traits.empty}])
        made.append([turn])

    def _with_user(self, turns: list[_Turn]) -> list[_Turn]:
        """With a turn of the user, where the template wants one at least."""
        kinds = [_kind(turn) for turn in turns]
        if "U" in kinds or "?" in kinds or not turns:
            return turns
        num_first = len(list(takewhile(lambda kind: kind in "SD", kinds)))
        if not self._traits.needs_user(kinds[num_first] if num_first < len(kinds) else ""):
            return turns
        self._note("messages.empty")
        return [*turns[:num_first], {"role": "user", "content": self._traits.empty}, *turns[num_first:]]


def _one_by_one(
    turn: _Turn, calls: Iterable[Mapping[str, Any]], results: Sequence[_Turn], form: CallForm
) -> Iterable[_Turn]:
    """A turn for each call, its results right behind it; a result that names no call belongs to the next one."""
    by_id: dict[Any, list[_Turn]] = {}
    for result in results:
        by_id.setdefault(result.get("tool_call_id"), []).append(result)
    nameless = deque(by_id.pop(None, ()))
    for index, call in enumerate(calls):
        first = turn if index == 0 else {"role": "assistant", "content": form.content}
        yield {**first, "tool_calls": [call]}
        own = by_id.pop(call["id"], []) if call.get("id") is not None else []
        yield from own or ([nameless.popleft()] if nameless else [])
    for left in by_id.values():
        yield from left
    yield from nameless


def _kind_of_all(group: Sequence[_Turn]) -> str:
    """The kind of the turn that these become."""
    return _kind(group[-1] if group[0].get("role") == "assistant" else group[0])


def _joined(group: Sequence[_Turn]) -> _Turn:
    if len(group) == 1 and not isinstance(group[0].get("content"), _Texts):
        return group[0]
    made = {**group[0], "content": _joined_text(*map(_text, group))}
    thoughts = [turn["reasoning_content"] for turn in group if turn.get("reasoning_content")]
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    calls = [call for turn in group for call in turn.get("tool_calls") or ()]
    return made | ({"tool_calls": calls} if calls else {})

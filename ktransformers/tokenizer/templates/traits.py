"""The traits of a chat template: which turns of each role and place it keeps, drops, moves or refuses.

Found by rendering sample conversations (probe.py), each when it is first needed, a fifth of a millisecond each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

from ktransformers.tokenizer.templates.probe import ARGUMENT, CallForm, Prober, is_kept, sample

__all__ = ["PlainTraits", "Traits"]

_LATE = ("U?", "U?A", "UA?", "UA?U", "UA?UA")
_PATHS = {"0": "", "U": "U", "A": "UA", "C": "UC", "T": "UCT"}
_ENDINGS = {"U": ("", "A", "AU"), "A": ("", "U"), "C": ("T", "TA", "TAU"), "T": ("", "A", "AU")}
_FIRST_ENDINGS = {"U": ("",), "A": ("U", "UA"), "C": ("TU", "TAU"), "T": ("U", "AU")}
"""What may come after a pair, at the beginning with a user in it: see needs_user."""

_USUAL = frozenset({("0", "U"), ("U", "A"), ("A", "U"), ("U", "C"), ("C", "T"), ("T", "A")})
"""Neighbours that every template keeps whose calls or answers are kept at all."""

_REMEDIES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("U", "U"): ("join",),
    ("A", "A"): ("join",),
    ("0", "A"): ("V",),
    ("0", "C"): ("V",),
    ("T", "U"): ("E", "join"),
    ("C", "U"): ("E",),
    ("A", "C"): ("join", "V"),
    ("T", "C"): ("V", "E"),
    ("C", "A"): ("V",),
    ("C", "C"): ("V",),
    ("A", "T"): ("text",),
    ("U", "T"): ("text",),
    ("0", "T"): ("text",),
}
"""What may be done between two neighbours that a template does not keep: join them, put a user's (V) or an assistant's
(E) turn without text between them, or make the second one a user's text."""


class Traits:
    """The traits of one template, with or without tools. Questions are answered by rendering, each once."""

    def __init__(self, prober: Prober, tools: Sequence[Mapping[str, Any]] | None = None):
        self._prober, self._tools = prober, tools
        self._known: dict[tuple[Any, ...], bool] = {}
        self._late: dict[tuple[str, bool], bool] = {}
        self._remedies: dict[tuple[str, str, bool], str] = {}

    def _keeps(
        self, word: str, form: CallForm, parts: frozenset[str], *, in_order: bool = True, empty: str = ""
    ) -> bool:
        key = (word, form, parts, in_order, empty)
        if key not in self._known:
            made = sample(word, form, parts, empty)
            text = self._prober.render(made.messages, self._tools)
            self._known[key] = self._prober.is_exhausted or (
                text is not None
                and is_kept(text, made.texts, in_order=in_order)
                and is_kept(text, made.names, in_order=False)
                and not (made.names and f"{{'{ARGUMENT}'" in text)  # a mapping as Python writes it
                and not (parts and "[{'type': 'text'" in text)
            )
        return self._known[key]

    def keeps(self, word: str, *, in_order: bool = True) -> bool:
        """Whether the template writes all texts of this conversation, which probe.py spells."""
        form = self.call_form if set(word) & set("CBXT") else None
        empty = self.empty if set(word) & set("VE") else ""
        return self._keeps(word, form or CallForm(), self.parts, in_order=in_order, empty=empty)

    @cached_property
    def is_understood(self) -> bool:
        """Whether the template writes a plain conversation at least. If not, nothing is known or changed."""
        return not self._prober.is_exhausted and self._keeps("UAU", CallForm(), self._plain_parts)

    @cached_property
    def _plain_parts(self) -> frozenset[str]:
        for roles in ((), ("user",), ("user", "assistant")):
            if self._keeps("UAU", CallForm(), frozenset(roles)):
                return frozenset(roles)
        return frozenset()

    @cached_property
    def parts(self) -> frozenset[str]:
        """The roles whose text the template wants as a list of parts."""
        found = self._plain_parts
        if found and not self._keeps("SU", CallForm(), found, in_order=False):
            found |= {"system"} if self._keeps("SU", CallForm(), found | {"system"}, in_order=False) else set()
        if found and not self._keeps("UAT", CallForm(), found):
            found |= {"tool"} if self._keeps("UAT", CallForm(), found | {"tool"}) else set()
        return found

    def takes_parts(self, role: str) -> bool:
        """Whether the template writes the text of this role when it comes as a list of parts."""
        word = {"system": "SU", "user": "U", "assistant": "UA", "tool": "UCT"}.get(role, "U")
        return self._keeps(word, self.call_form or CallForm(), self.parts | {role}, in_order=False)

    @cached_property
    def empty(self) -> str:
        """The text of a turn that only stands between two others."""
        return "" if self._keeps("VAU", CallForm(), self._plain_parts) else "..."

    # Calls and results.

    @cached_property
    def call_form(self) -> CallForm | None:
        """The form in which the template wants past calls; None when it drops or refuses them in every form."""
        choices = product(("mapping", "text"), ("given", "nine", "functions"), ("", None), (False, True))
        for arguments, ids, content, has_names in choices:
            form = CallForm(arguments, ids, content, has_names=has_names)
            if all(self._keeps(word, form, self.parts) for word in ("UCT", "UCTAU")):
                return self._with_text_field(self._with_numbered_ids(form))
        return None

    def _with_numbered_ids(self, form: CallForm) -> CallForm:
        """Kimi's templates may write a call's id themselves, and its result's as it is given: both have to agree."""
        for ids in ("functions", "functions_turn"):
            numbered = replace(form, ids=ids)
            made = sample("UCTAUCT", numbered, self.parts)
            text = self._prober.render(made.messages, self._tools) or ""
            given = [message["tool_call_id"] for message in made.messages if "tool_call_id" in message]
            if not all(f"functions.f{name}:" in text for name in made.names):
                return form
            is_theirs = form.ids != "given" or self._writes_own_ids(form)
            if is_theirs and all(text.count(one) > 1 for one in given):
                return numbered
        return form

    def _writes_own_ids(self, form: CallForm) -> bool:
        made = sample("UCTAUCT", form, self.parts)
        text = self._prober.render(made.messages, self._tools) or ""
        return any(f"functions.f{name}:" in text for name in made.names)

    def _with_text_field(self, form: CallForm) -> CallForm:
        """Cohere's templates have a field of its own for the text beside a call."""
        named = replace(form, text_field="tool_plan")
        is_named = not self._keeps("UXTAU", form, self.parts) and self._keeps("UXTAU", named, self.parts)
        return named if is_named else form

    @cached_property
    def takes_text_arguments(self) -> bool:
        """Whether the template writes arguments that are text already as they are."""
        form = replace(self.call_form or CallForm(), arguments="text")
        made = sample("UCT", form)
        text = self._prober.render(made.messages, self._tools) or ""
        return made.messages[1]["tool_calls"][0]["function"]["arguments"] in text

    @cached_property
    def takes_missing_ids(self) -> bool:
        """Whether the template keeps calls and results without ids."""
        made = sample("UCT", self.call_form or CallForm(), self.parts)
        for message in made.messages:
            message.pop("tool_call_id", None)
            for call in message.get("tool_calls", ()):
                del call["id"]
        text = self._prober.render(made.messages, self._tools)
        return text is not None and is_kept(text, made.texts) and is_kept(text, made.names, in_order=False)

    @cached_property
    def two_calls(self) -> str:
        """The template's way with two calls in one turn: "keep", "split" into two turns, or "text"."""
        if all(map(self.keeps, ("UBTT", "UBTTAU"))):
            return "keep"
        return "split" if all(map(self.keeps, ("UCTCT", "UCTCTAU"))) else "text"

    @cached_property
    def keeps_text_beside_calls(self) -> bool:
        """Whether a turn may have a text and a call."""
        return all(map(self.keeps, ("UXT", "UXTAU")))

    @cached_property
    def keeps_between_results(self) -> bool:
        """Whether a user's or a system's text may stand between a call and its result."""
        return self.keeps("UCUTA")

    # System and developer turns.

    @cached_property
    def system_first(self) -> bool:
        """Whether the first system turn is kept. Where it is written is the template's own business."""
        return all(self.keeps(word, in_order=False) for word in ("SU", "SUAU"))

    @cached_property
    def developer_first(self) -> bool:
        """Whether a first developer turn is kept."""
        return all(self.keeps(word, in_order=False) for word in ("DU", "DUAU"))

    @cached_property
    def knows_developer(self) -> bool:
        """Whether the template does more with a developer's role than write its name, as it would any role's."""
        made, other = sample("DU", parts=self.parts).messages, "moderator"
        text = self._prober.render(made, self._tools)
        other_text = self._prober.render([{**made[0], "role": other}, *made[1:]], self._tools)
        return text is not None and (other_text is None or text != other_text.replace(other, "developer"))

    def keeps_first(self, letter: str, *, has_calls: bool, has_answer: bool) -> bool:
        """Whether the first turn, of the system (S) or the developer (D), is kept.

        Some templates write it into the last turn if that is the user's, and nowhere else. has_calls: the conversation
        calls tools. has_answer: it ends with a turn of the assistant.
        """
        words = ["UA"] if has_answer else []
        if has_calls and self.call_form is not None:
            words += ["UCT", "UCTAU"]
        is_first = self.system_first if letter == "S" else self.developer_first
        return is_first and all(self.keeps(letter + word, in_order=False) for word in words)

    def keeps_beginning(self, letters: str) -> bool:
        """Whether a conversation may begin with these turns of the system (S) and the developer (D), two or more."""
        pairs = {letters[at : at + 2] for at in range(len(letters) - 1)}
        words = {pair * 2 + "U" if pair[0] == pair[1] else pair + "U" for pair in pairs}
        return all(map(self.keeps, words))

    def keeps_late(self, letter: str, *, between: bool = False) -> bool:
        """Whether a system (S) or developer (D) turn is kept behind others. between: a call and its result."""
        key = (letter, between)
        if key not in self._late:
            self._late[key] = self._keeps_late(letter, between)
        return self._late[key]

    def _keeps_late(self, letter: str, between: bool) -> bool:
        words = [word.replace("?", letter) for word in _LATE]
        if self.system_first:
            words += [f"S{word}" for word in words]
        if self.call_form is not None:
            words += [f"UCT{letter}", f"UCT{letter}A"]
        if between:
            words.append(f"UC{letter}TA")
        return all(map(self.keeps, words))

    # Neighbours.

    def remedy(self, before: str, after: str, *, has_system: bool = False) -> str:
        """Return what to do between two turns; "" for nothing. before: "0" at the beginning.

        has_system: after its turn.
        """
        if (before, after) in _USUAL or before not in _PATHS or after not in _PATHS:
            return ""
        key = (before, after, has_system)
        if key not in self._remedies:
            self._remedies[key] = self._remedy(before, after, has_system)
        return self._remedies[key]

    def _remedy(self, before: str, after: str, has_system: bool) -> str:
        if self._keeps_pair(before, after, "", has_system):
            return ""
        for one in _REMEDIES.get((before, after), ()):
            if self._helps(one, before, after, has_system):
                return one
        return ""

    def _helps(self, remedy: str, before: str, after: str, has_system: bool) -> bool:
        if remedy == "join" and (before, after) == ("A", "C"):
            return self.keeps_text_beside_calls
        return remedy in ("join", "text") or self._keeps_pair(before, after, remedy, has_system)

    def _keeps_pair(self, before: str, after: str, between: str, has_system: bool) -> bool:
        path = _PATHS[before]
        if before == "T" and self.call_form is None:
            path = "UAT"
        endings = _FIRST_ENDINGS if before == "0" else _ENDINGS
        words = [path + between + after + end for end in endings[after]]
        if before == "0" and has_system and self.system_first:
            words += [f"S{word}" for word in words]
        return all(self.keeps(word, in_order=before != "0") for word in words)

    def needs_user(self, first: str) -> bool:
        """Whether a conversation without a user is refused. first: the turn behind the system's; "" for none."""
        return not self.keeps({"A": "A", "C": "CT", "T": "T"}.get(first, "S"), in_order=False)


class PlainTraits(Traits):
    """Traits of a template that keeps nothing but one system turn and turns of user and assistant that alternate."""

    def __init__(self, like: Traits):
        super().__init__(like._prober, like._tools)
        self.__dict__["parts"], self.__dict__["empty"] = like.parts, like.empty
        self.__dict__["call_form"] = None
        self.__dict__["system_first"] = like.keeps_first("S", has_calls=True, has_answer=True)

    def keeps(self, word: str, *, in_order: bool = True) -> bool:
        """Return False: the template is taken to keep no other conversation."""
        return False

    def keeps_first(self, letter: str, *, has_calls: bool, has_answer: bool) -> bool:
        """Whether the first turn is kept: only one of the system (S) can be."""
        return letter == "S" and self.system_first

    def _helps(self, remedy: str, before: str, after: str, has_system: bool) -> bool:
        return True

"""The turns of conversations through one chat template: the place through which all prompts go.

messages ── tools in words, where it knows none ──> fold ──> what the template keeps ── guard, render ──> text
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ktransformers.errors import ConversationError
from ktransformers.tokenizer.reasoning import close_reasoning, open_reasoning
from ktransformers.tokenizer.templates.calls import SpellCalls
from ktransformers.tokenizer.templates.described import completed, with_described_tools
from ktransformers.tokenizer.templates.effort import EFFORT_VARIABLES, nearest_effort
from ktransformers.tokenizer.templates.fold import WHY, Folded, fold
from ktransformers.tokenizer.templates.probe import PROBE_TOOLS, Prober, is_kept, sample
from ktransformers.tokenizer.templates.rendering import Message, Render
from ktransformers.tokenizer.templates.traits import PlainTraits, Traits
from ktransformers.tokenizer.verbatim import Guard

__all__ = ["Ending", "Rendered", "Rendering", "TemplateTurns"]

_log = logging.getLogger(__name__)

_WHY = {
    **WHY,
    "tools": "it does not write these tools: a system turn describes them, and how to call them",
}


@dataclass(frozen=True, slots=True)
class Ending:
    """The way a prompt ends: with the header of an answer (opens), or inside the last message (continues).

    behind: what the answer has thought so far; the prompt goes on there. tags: around the model's reasoning. is_apart:
    the last message is not shown to the template, but written behind the header of an answer.
    """

    opens: bool = True
    continues: bool = False
    behind: str | None = None
    tags: tuple[str, str] | None = None
    is_apart: bool = False


def _no_guard(_: Any) -> Guard | None:
    """Texts of this JSON-like value are read as they are."""
    return None


@dataclass(frozen=True, slots=True)
class Rendering:
    """The request for a prompt: a conversation and all that it is rendered with.

    messages: the conversation, one turn at least. tools: in the form of chat completions, or None. variables: of the
    template. ending: how the prompt ends. guard_of: what keeps texts of a JSON-like value from being read as tokens.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    ending: Ending = Ending()
    guard_of: Callable[[Any], Guard | None] = _no_guard


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation. text: of the conversation. guard: whose marks are in it.

    changes: names of what was folded, see fold.WHY.
    """

    text: str
    guard: Guard | None = None
    changes: tuple[str, ...] = ()


class TemplateTurns:
    """Renders conversations through one chat template. render: through the template as it is.

    spell: writes calls as the model does, for templates that drop them.
    """

    def __init__(self, render: Render, spell: SpellCalls):
        self.prober = Prober(render)
        self._render, self._spell = render, spell
        self._traits = {False: Traits(self.prober), True: Traits(self.prober, PROBE_TOOLS)}
        self._logged: set[str] = set()
        self._takes_effort: dict[tuple[str, str], bool] = {}
        self._keeps_beginnings: bool | None = None

    def traits(self, has_tools: bool) -> Traits:
        """Return what the template does with turns when it is given tools, or none."""
        return self._traits[has_tools]

    def rendered(self, asked: Rendering) -> Rendered:
        """Return the text of a conversation. Tools that the template would not write are described in a system turn.

        Raises ConversationError when the template refuses it, folded or in the plainest form that there is.
        """
        asked = replace(asked, variables=self._variables(asked.variables))
        refused: ConversationError | None = None
        for shown, change in self._shown(asked):
            for folded in self._folded(shown):
                for end in self._endings(folded.messages, asked.ending):
                    try:
                        made = self._rendered(replace(shown, messages=folded.messages, ending=end))
                    except ConversationError as error:
                        refused = refused or error
                    else:
                        changes = (*change, *folded.changes)
                        self._say(changes)
                        return replace(made, changes=changes)
        assert refused is not None
        raise refused

    def _shown(self, asked: Rendering) -> Iterator[tuple[Rendering, tuple[str, ...]]]:
        """The request as it is, with the fields that tools may lack, and with tools in words; and the names of what
        changes."""
        tools = asked.tools
        if not tools or self.shows_tools:
            yield asked, ()
        if not tools:
            return
        if self.shows_tools and (whole := completed(tools)) != list(tools):
            yield replace(asked, tools=whole), ()
        yield replace(asked, messages=with_described_tools(asked.messages, tools, self._spell), tools=None), ("tools",)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template itself writes the tools that it is given, with a system turn or without one."""
        name = PROBE_TOOLS[0]["function"]["name"]
        for word in ("U", "SU"):
            made = sample(word, parts=self._traits[False].parts)
            text, plain = (self.prober.render(made.messages, tools) for tools in (PROBE_TOOLS, None))
            if (text or "").count(name) > (plain or "").count(name):
                return True
        return self.prober.is_exhausted

    def _endings(self, messages: Sequence[Message], ending: Ending) -> Iterator[Ending]:
        """How the prompt may end: as asked, or with an unfinished answer behind what the template writes."""
        last = messages[-1]
        is_text = isinstance(last.get("content"), str) and not last.get("tool_calls")
        can_be_apart = ending.continues and is_text and len(messages) > 1
        if not can_be_apart or self.keeps_beginnings:
            yield ending
        if can_be_apart:
            yield replace(ending, continues=False, is_apart=True)

    def _folded(self, asked: Rendering) -> Iterator[Folded]:
        traits, continues = self._traits[bool(asked.tools)], asked.ending.continues
        first = fold(asked.messages, traits, self._spell, continues=continues)
        yield first
        if traits.is_understood:
            plain = fold(asked.messages, PlainTraits(traits), self._spell, continues=continues)
            if plain.messages != first.messages:
                yield plain

    def _rendered(self, asked: Rendering) -> Rendered:
        messages, tools, variables, ending = asked.messages, asked.tools, asked.variables, asked.ending
        behind, opens = ending.behind, ending.opens and not ending.continues
        if ending.is_apart:
            messages, behind, opens = messages[:-1], str(messages[-1]["content"]), True
        guard = asked.guard_of((messages, tools, variables, behind))
        if guard is not None:
            messages, tools, variables, behind = (guard.marked(one) for one in (messages, tools, variables, behind))
        text = self._render(
            messages, tools, add_generation_prompt=opens, continue_final_message=ending.continues, **variables
        )
        if behind is not None:
            text = (close_reasoning if ending.is_apart else open_reasoning)(text, ending.tags) + behind
        return Rendered(text, guard)

    def _variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The variables with the word for the effort of reasoning that the template takes."""
        made = dict(given)
        for name in EFFORT_VARIABLES:
            word = made.get(name)
            if isinstance(word, str):
                made[name] = nearest_effort(word, lambda one, name=name: self._is_effort(name, one))  # type: ignore[misc]
                if made[name] != word:
                    self._log_once(name, f"{name} {word[:32]!r} is {made[name]!r}, the nearest word that it takes")
        return made

    def _is_effort(self, variable: str, word: str) -> bool:
        key = (variable, word)
        if key not in self._takes_effort:
            made = sample("U").messages
            text = self.prober.render(made, None, **{variable: word})
            self._takes_effort[key] = text is not None or self.prober.is_exhausted
        return self._takes_effort[key]

    @property
    def keeps_beginnings(self) -> bool:
        """Whether the text of a last, unfinished turn of the assistant can be the end of what the template writes."""
        if self._keeps_beginnings is None:
            made = sample("UA")
            text = self.prober.render(made.messages, add_generation_prompt=False, continue_final_message=True)
            self._keeps_beginnings = self.prober.is_exhausted or (
                text is not None and is_kept(text, made.texts) and text.endswith(made.texts[-1])
            )
        return self._keeps_beginnings

    def _say(self, changes: Sequence[str]) -> None:
        for name in changes:
            self._log_once(name, f"{_WHY[name]} ({name})")

    def _log_once(self, key: str, text: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            _log.info("the chat template: %s", text)

"""The form of a model's answers: as asked for, as its template writes it, by its tags and tokens.

Each is asked only where the one before has no answer. Does not decode anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.reasoning import HARMONY_REASONING, NO_REASONING, REASONING_FORMATS, REASONING_TAGS
from ktransformers.tokenizer.recognition.calls import recognize_calls
from ktransformers.tokenizer.recognition.probe import Probe
from ktransformers.tokenizer.recognition.turns import TurnMarks, recognize_turns
from ktransformers.tokenizer.tools.formats import (
    AUTO,
    HARMONY,
    JSON,
    TOOL_FORMATS,
    ToolFormat,
    marked_formats,
    tool_format_named,
)

__all__ = ["NO_REASONING", "REASONING_FORMATS", "AnswerFormat", "Source", "check_reasoning_format", "recognize"]

_log = logging.getLogger(__name__)

_ALIASES = {"deepseek": AUTO}
"""What llama.cpp calls it: reasoning apart from the text, whatever the model's marks are."""

_TOOL_CALL_TAGS = ("<tool_call>", "</tool_call>")


@dataclass(frozen=True, slots=True)
class Source:
    """The facts about a model's files from which the form of its answers is found.

    token_id: of exactly this token, or None. probe: None without a template.
    """

    template: str
    knows_tools: bool
    token_id: Callable[[str], int | None]
    probe: Probe | None

    def has_tags(self, tags: tuple[str, ...]) -> bool:
        """Whether all of `tags` are tokens of their own."""
        return bool(tags) and all(self.token_id(tag) is not None for tag in tags)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The form of a model's answers.

    tools: how calls are written, None without a chat template or with --tool_format none. marks: around reasoning and
    text.
    The reasoning's marks are those of `marks`, which may be known otherwise than by rendering.
    """

    tools: ToolFormat | None = None
    marks: TurnMarks = TurnMarks()  # noqa: RUF009 - frozen

    @property
    def wrapper(self) -> tuple[str, str] | None:
        """The marks that may stand around an answer's text."""
        return self.marks.wrapper or (None if self.tools is None else self.tools.wrapper)

    @property
    def texts(self) -> tuple[str, ...]:
        """The marks that parsers look for: those of them that are special tokens have to be seen in decoded text."""
        marks = [*(self.marks.reasoning or ()), *(self.wrapper or ())]
        if self.tools is not None:
            marks += [*self.tools.tokens, *(self.tools.shape.texts if self.tools.shape else ())]
        return tuple(marks)


def check_reasoning_format(name: str) -> None:
    """Raise ConfigError, with all names, for a name of --reasoning_format that there is not."""
    if _ALIASES.get(name, name) != AUTO and name not in REASONING_FORMATS:
        raise ConfigError(f"--reasoning_format {name[:100]!r} is not one of {', '.join((AUTO, *REASONING_FORMATS))}")


def recognize(source: Source, tools: str = AUTO, reasoning: str = AUTO) -> AnswerFormat:
    """Find out how a model's answers are read. tools, reasoning: names of formats, or "auto".

    Raises ConfigError for unknown names.
    """
    check_reasoning_format(reasoning)
    marks = recognize_turns(source.probe) if source.probe is not None else TurnMarks()
    form = _told_format(source) if tools == AUTO else tool_format_named(tools)
    if _ALIASES.get(reasoning, reasoning) != AUTO:
        found = REASONING_FORMATS[reasoning]
    elif form is not None and form.name == HARMONY:
        found = HARMONY_REASONING
    else:
        found = _as_known(marks.reasoning) or _known_reasoning(source)
    if form is not None and form.name == HARMONY:  # whose parser reads all marks itself
        return AnswerFormat(form, replace(marks, reasoning=found, wrapper=None, end=""))
    return AnswerFormat(form, replace(marks, reasoning=found))


def _as_known(marks: tuple[str, str] | None) -> tuple[str, str] | None:
    """The same marks with the line breaks that are known to belong to them."""
    for known in REASONING_TAGS:
        if marks is not None and marks == (known[0].strip(), known[1].strip()):
            return known
    return marks


def _known_reasoning(source: Source) -> tuple[str, str] | None:
    """Tags that the template's source has, or else that are tokens."""
    written = (tags for tags in REASONING_TAGS if tags[1] in source.template)
    known = (tags for tags in REASONING_TAGS if source.has_tags(tags))
    return next(written, None) or next(known, None)


def _told_format(source: Source) -> ToolFormat | None:
    """By what is written of past calls, by tags in the source, by tokens; JSON where nothing tells.

    None without a chat template.
    """
    marked = marked_formats(source.template)
    if source.probe is not None:
        found = recognize_calls(source.probe, [*marked, *(one for one in _READABLE if one not in marked)])
        if found is not None:
            return found
    if marked:
        return marked[0]
    found = next((one for one in _READABLE if one.shape is not None and source.has_tags(_sure_tags(one))), None)
    if found is not None:
        return found
    if all(source.token_id(tag) is not None for tag in _TOOL_CALL_TAGS) or _TOOL_CALL_TAGS[1] in source.template:
        return TOOL_FORMATS["hermes"]
    if source.knows_tools:
        _log.warning(
            "the chat template knows tools but writes calls in no form that is recognized: a call is read where an "
            "answer is a JSON object with name and arguments; --tool_format NAME sets another form"
        )
    # Tools that a template does not write are described to the model, with the form in which it is to call them.
    return TOOL_FORMATS[JSON] if source.probe is not None else None


_READABLE = [one for one in TOOL_FORMATS.values() if one.name != JSON]


def _sure_tags(form: ToolFormat) -> tuple[str, ...]:
    """Tags that are tokens of one family only."""
    return tuple(
        tag for tag in form.tokens if tag.startswith(("<|tool", "<|START_ACTION", "<seed:tool", "<tool_call:"))
    )

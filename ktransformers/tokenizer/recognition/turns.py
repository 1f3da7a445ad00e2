"""The marks around the reasoning and around the text of an answer, found in what a template writes of past ones."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ktransformers.tokenizer.reasoning import REASONING_TAGS
from ktransformers.tokenizer.recognition.probe import CONTENT, THOUGHTS, Probe
from ktransformers.tokenizer.recognition.segments import Splitter, shared_end, shared_start

__all__ = ["TurnMarks", "recognize_turns", "turn_frame"]

_MAX_MARK = 120
"""Characters; a longer text in front of reasoning is an instruction, no mark."""
_DUMPED = re.compile(r"""["']type["']""")
"""Shows that a template wrote a list of parts as it came, because it knows texts only."""


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """The marks of a turn. reasoning: opening and closing mark; the template, or the model, writes the opening one.

    wrapper: marks around the text of an answer. end: what a turn ends with. opening: the end of a prompt, behind the
    question; before: the beginning of one.
    """

    reasoning: tuple[str, str] | None = None
    wrapper: tuple[str, str] | None = None
    end: str = ""
    opening: str = ""
    before: str = ""


def turn_frame(marks: TurnMarks) -> str:
    """Return the texts around a question, the marks of the reasoning left out."""
    frame = marks.opening
    opens, closes = marks.reasoning or ("", "")
    # A closing mark of several tokens is the beginning of the next message.
    for mark in filter(None, (closes if closes.count("<") < 2 else "", opens)):
        before, found, after = frame.rpartition(mark)
        frame = before if found and not after.strip() else frame
    return marks.before + frame


def recognize_turns(probe: Probe) -> TurnMarks:
    """Find the marks that the template writes; nothing where it refuses or drops everything."""
    opening, question = probe.opening() or "", probe.before
    plain = probe.answer(CONTENT)
    splitter = probe.splitter
    before, after = _around(plain, CONTENT) if plain and CONTENT in plain else ("", "")
    own = _beyond(splitter, before, opening) if plain else ""
    reasoning = None
    for text, following in probe.thoughtful_answers():
        reasoning = _reasoning_marks(splitter, text, following, opening, before)
        if reasoning:
            break
    if plain is None or CONTENT not in plain:
        return TurnMarks(reasoning, opening=opening, before=question)
    wrapper = _wrapper(splitter, own, after, reasoning)
    end = after.removeprefix(wrapper[1]) if wrapper else after
    return TurnMarks(reasoning, wrapper, end, opening, question)


def _around(text: str, word: str) -> tuple[str, str]:
    before, _, after = text.partition(word)
    return before, after


def _beyond(splitter: Splitter, text: str, other: str) -> str:
    """What `text` has behind the beginning that both share."""
    parts = splitter.split(text)
    return "".join(parts[shared_start(parts, splitter.split(other)) :])


def _reasoning_marks(
    splitter: Splitter, text: str, following: str, opening: str, before_plain: str
) -> tuple[str, str] | None:
    """text: an answer with reasoning and `following` behind. before_plain: what is in front of an answer without."""
    head, rest = _around(text, THOUGHTS)
    between = rest.partition(following)[0]
    parts = splitter.split(head)
    # The prompt may have opened the reasoning already; an answer without reasoning then tells where it begins.
    start = min(shared_start(parts, splitter.split(opening)), shared_start(parts, splitter.split(before_plain)))
    opens = "".join(parts[start:])
    if not opens.strip() and opening.startswith(head):  # perhaps a sentence with which only prompts begin it
        opens = opening[len(head) :]
        if between.strip().startswith(opens.strip()):  # or what closes it, because it is turned off
            opens = ""
    if not opens.strip():
        opens = _distinct_end(splitter, head)
    own = _beyond(splitter, before_plain, opening) if following == CONTENT else ""
    closes = _closing(splitter, between, opens, own)
    marks = (opens.strip(), closes.strip())
    return marks if all(map(_is_mark, marks)) else None


def _is_mark(text: str) -> bool:
    """Whether a model would write this around its reasoning. A bracket or a star is how a template shows it: answers
    begin with them, too."""
    return len(text) <= _MAX_MARK and any(map(str.isalpha, text)) and not _DUMPED.search(text)


def _distinct_end(splitter: Splitter, head: str) -> str:
    """The tags at the end of `head`, as many as make a text that stands there once."""
    parts = splitter.split(head.rstrip())
    if not parts or len(parts[-1]) == 1:
        return ""
    for start in range(len(parts) - 1, -1, -1):
        mark = "".join(parts[start:])
        if len(parts[start]) > 1 and head.count(mark) == 1:
            return mark
    return ""


def _closing(splitter: Splitter, between: str, opens: str, own: str) -> str:
    """What ends the reasoning, out of what stands between it and the text."""
    tags, parts = splitter.tags(between), splitter.split(between)
    if not tags:
        return between.strip()
    if own.strip() and tags[0] not in own:  # the marks around the text follow
        shared = shared_end(parts, splitter.split(own))
        return "".join(parts[: len(parts) - shared])
    # Marks of several tokens come in pairs of the same build: `<|open|>think<|sep|>` and `<|close|>think<|sep|>`.
    wanted, taken = max(1, len(splitter.tags(opens))), list[str]()
    for part in parts:
        taken.append(part)
        wanted -= len(part) > 1
        if not wanted:
            break
    return "".join(taken)


def _wrapper(splitter: Splitter, own: str, after: str, reasoning: tuple[str, str] | None) -> tuple[str, str] | None:
    """The marks around an answer's text, of which the second may be the end of the turn."""
    if reasoning is not None:
        own = own.strip().removeprefix(reasoning[0]).strip().removeprefix(reasoning[1])
    if not splitter.tags(own) or len(own) > _MAX_MARK:
        return None
    if any(tag in own for tags in (*REASONING_TAGS, reasoning or ()) for tag in tags):
        return None
    tags = splitter.tags(after)
    if not tags:
        return None
    closing = _closing(splitter, after, own, "")
    return own.strip(), closing.strip()

"""The shape of calls, found in what a template writes of past ones, and which of the known formats reads that.

What is found is tried: a format is taken only if its parser reads the very calls back that were rendered.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ktransformers.tokenizer.recognition.probe import CONTENT, Call, Probe
from ktransformers.tokenizer.recognition.segments import Splitter, shared_end, shared_start
from ktransformers.tokenizer.tools.base import ToolParser
from ktransformers.tokenizer.tools.events import ArgumentsPiece, CallStarted, TextPiece
from ktransformers.tokenizer.tools.formats import ToolFormat
from ktransformers.tokenizer.tools.shape_parser import ShapeParser, tags_of
from ktransformers.tokenizer.tools.shapes import CallShape, Spelling

__all__ = ["LEARNED", "recognize_calls"]

LEARNED = "template"
"""The name of a format that was found by rendering alone."""

_FIRST = Call("qzfirst", {"qzkeya": "qzvaluea", "qzkeyb": "qzvalueb"})
_SECOND = Call("qzsecond", {"qzkeya": "qzvaluec", "qzkeyb": "qzvalued"})
_TYPED: dict[str, Any] = {"number": 17, "boolean": True, "array": ["qz"], "object": {"qz": "qz"}, "null": None}
_TRIED: tuple[Call, ...] = (
    Call("qzfirst", {"qzkeya": "qz value, (a)", "qzkeyb": "qzvalueb"}),
    Call("qzsecond", {"qzkeya": "qz\nvalue", "qzkeyb": "7"}),
)
_STRING = {"type": "string"}
_SCHEMAS = {
    name: {"type": "object", "properties": {"qzkeya": _STRING, "qzkeyb": _STRING}} for name in ("qzfirst", "qzsecond")
}
_MARKUP = "qzvaluea <&>\nqzvalueb"
"""A string that templates put in quotes, if they do so with any."""
_OBJECT = re.compile(r'\{\s*"qzkeya"\s*:\s*"(qzvalue[ac])"\s*,\s*"qzkeyb"\s*:\s*"(qzvalue[bd])"\s*\}', re.DOTALL)
_ID = re.compile(r"qzid0000[01]|\b[0-9]{1,2}\b")


@dataclass(frozen=True, slots=True)
class _Region:
    """What a template writes of calls and of nothing else. is_cut: the end of the turn is not known."""

    text: str
    is_cut: bool


def recognize_calls(probe: Probe, formats: Sequence[ToolFormat]) -> ToolFormat | None:
    """Return the first of `formats` that reads the past calls of the template, else their shape as a format.

    None where the template writes no calls, or writes them in a way that is nothing of this.
    """
    frame = _frame(probe)
    tries = [(region.text, _TRIED) for region in _regions(probe, _TRIED)]
    tries = tries or [(region.text, _TRIED[:1]) for region in _regions(probe, _TRIED[:1])]
    for form in formats:
        if any(_reads(form.parser(_SCHEMAS), text, calls, frame) for text, calls in tries):
            return form
    shape = _learn(probe)
    if shape is None:
        return None
    parser = functools.partial(ShapeParser, shape)
    tries += [(region.text, _TRIED[:1]) for region in _regions(probe, _TRIED[:1])]
    if not any(_reads(parser(_SCHEMAS), text, calls, frame) for text, calls in tries):
        return None
    return ToolFormat(LEARNED, parser, (), _tags(probe.splitter, shape), shape=shape)


def _frame(probe: Probe) -> Callable[[str], bool]:
    """Whether a text is nothing but what turns are made of, and one tag more at most: the end of a turn with calls."""
    texts = [probe.opening(has_tools=True), probe.answer(CONTENT, has_tools=True)]
    texts += [text for text, _ in probe.thoughtful_answers()]
    known = "\n".join(text for text in texts if text)
    tags = set(probe.splitter.tags(known))

    def is_frame(text: str) -> bool:
        parts = [part for part in probe.splitter.split(text.replace(CONTENT, "").strip()) if part not in tags]
        if parts and len(parts[-1]) > 1:
            parts.pop()
        rest = "".join(parts).strip()
        return not rest or (rest in known and not any(len(part) > 1 for part in parts))

    return is_frame


def _tags(splitter: Splitter, shape: CallShape) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*tags_of(shape), *(tag for text in shape.texts for tag in splitter.tags(text))]))


def _regions(probe: Probe, calls: Sequence[Call]) -> list[_Region]:
    """What is written of these calls, in the ways in which the template takes them."""
    found = list[_Region]()
    opening = probe.opening(has_tools=True)
    for content in ("", CONTENT):
        plain = probe.answer(content, has_tools=True)
        for text in probe.calls(calls, content):
            ends = plain if plain is not None else opening
            # A turn of text may begin as one with calls does: ` to=user` and ` to=NAME`.
            found += [_region(probe.splitter, text, begins, ends) for begins in (ends, opening)]
    return list(dict.fromkeys(found))


def _region(splitter: Splitter, text: str, begins: str | None, ends: str | None) -> _Region:
    """`text` without what it begins with as `begins` does, and ends with as `ends` does."""
    parts = splitter.split(text)
    start = shared_start(parts, splitter.split(begins or ""))
    end = min(shared_end(parts, splitter.split(ends or "")), len(parts) - start)
    return _Region("".join(parts[start : len(parts) - end]), not end)


def _reads(parser: ToolParser, text: str, calls: Sequence[Call], is_frame: Callable[[str], bool]) -> bool:
    """Whether the parser finds exactly these calls, and no text beside them but the frame of turns."""
    names, arguments, shown = list[str](), list[str](), ""
    for event in [*parser.feed(text), *parser.flush()]:
        match event:
            case CallStarted(name):
                names.append(name)
                arguments.append("")
            case ArgumentsPiece(piece):
                arguments[-1] += piece
            case TextPiece(piece):
                shown += piece
    if names != [call.name for call in calls] or not is_frame(shown):
        return False
    try:
        return [json.loads(one) for one in arguments] == [dict(call.arguments) for call in calls]
    except ValueError:
        return False


def _learn(probe: Probe) -> CallShape | None:
    """The shape of calls with arguments as JSON, between tags, or as keywords; None when it is none of these."""
    for one in _regions(probe, [_FIRST]):
        for two in [*_regions(probe, [_FIRST, _SECOND]), None]:
            shape = _Learner(probe.splitter, one, two).shape()
            if shape is not None:
                return _with_quotes(probe, _with_kinds(probe, shape))
    return None


class _Learner:
    """Compares one call with two. two None: the template writes no more than one."""

    def __init__(self, splitter: Splitter, one: _Region, two: _Region | None):
        self._splitter, self._one, self._two = splitter, one, two

    def shape(self) -> CallShape | None:
        """What both tell."""
        for read in (self._json, self._keywords, self._tagged):
            shape = read()
            if shape is not None:
                return shape
        return None

    def _parts(self, pattern: re.Pattern[str]) -> tuple[str, str, str] | None:
        """What stands before the arguments of a call, between those of two, and after the last."""
        one = pattern.search(self._one.text)
        if one is None:
            return None
        before, after = self._one.text[: one.start()], self._one.text[one.end() :]
        found = list(pattern.finditer(self._two.text)) if self._two else []
        if len(found) != 2 or self._two is None:
            return before, "", after
        return before, self._two.text[found[0].end() : found[1].start()], after

    def _framed(self, before: str, between: str, after: str, **more: Any) -> CallShape | None:
        """The shape around arguments. before: with the first call's name in it; between: with the second one's."""
        split = self._splitter.split
        head, middle = _holes(before, _FIRST.name), _holes(between, _SECOND.name)
        if "NAME" not in head:
            return None
        after = after.rstrip() if self._one.is_cut else after
        if not between:
            begin = _last_head(head)
            if "NAME" in head[:begin]:
                return None
            return CallShape(open=head[:begin], head=head[begin:], foot=after, sep=None, number=_number(before), **more)
        if "NAME" not in middle:
            return None
        shared = shared_end(split(head), split(middle))
        own = "".join(split(middle)[len(split(middle)) - shared :])
        if "NAME" not in own or "NAME" in head[: len(head) - len(own)]:
            return None
        own = own.lstrip()
        rest = middle[: len(middle) - len(own)]
        foot = "".join(split(rest)[: shared_start(split(rest), split(after))])
        return CallShape(
            open=head[: len(head) - len(own)].lstrip(),
            head=own,
            foot=foot.rstrip() if foot.strip() else foot,
            sep=rest[len(foot.rstrip()) if foot.strip() else len(foot) :],
            close=after[len(foot.rstrip() if foot.strip() else foot) :].rstrip(),
            number=_number(before),
            **more,
        )

    def _json(self) -> CallShape | None:
        parts = self._parts(_OBJECT)
        return None if parts is None else self._framed(*parts)

    def _keywords(self) -> CallShape | None:
        value = r"""(?:"[^"]*"|'[^']*')"""
        found = self._parts(re.compile(rf"qzkeya\s*=\s*{value}\s*,\s*qzkeyb\s*=\s*{value}"))
        if found is None or not found[0].endswith("(") or not found[2].startswith(")"):
            return None
        return self._framed(*found, spelling=Spelling.PYTHON)

    def _tagged(self) -> CallShape | None:
        """Each parameter between tags; both have the same, so what is between two values tells where they begin."""
        found = self._parts(re.compile("qzkeya.*?qzvalue[ac].*?qzkeyb.*?qzvalue[bd]", re.DOTALL))
        inner = re.search("qzkeya(.*?)qzvaluea(.*?)qzkeyb(.*?)qzvalueb", self._one.text, re.DOTALL)
        if found is None or inner is None:
            return None
        before, between, after = found
        name_at = before.rfind(_FIRST.name) + len(_FIRST.name)
        if name_at < len(_FIRST.name):
            return None
        behind_key, middle, again = (part.replace("qzkeya", "KEY").replace("qzkeyb", "KEY") for part in inner.groups())
        split = self._splitter.split
        # A key may be a tag itself, whose closing one is KEY, too.
        rest, other = split(before[name_at:] + "KEY" + behind_key), split(middle + "KEY" + behind_key)
        shared = shared_end(rest, other)
        head = "".join(other[len(other) - shared :]).lstrip()
        value_end = "".join(other[: len(other) - shared]) or ""
        tail = (middle + "KEY" + behind_key)[: -len(head)] if head else value_end
        if "KEY" not in head or not tail.strip() or behind_key != again:
            return None
        start = len(before[name_at:] + "KEY" + behind_key) - len(head)
        call_head = before[:name_at] + before[name_at:][: max(start, 0)]
        closes = tail.strip().replace("KEY", "qzkeyb")
        cut = [part.find(closes) + len(closes) if closes in part else -1 for part in (between, after)]
        if cut[1] < 0 or (between and cut[0] < 0):
            return None
        blank, key_head = tail[len(tail.rstrip()) :], head.partition("KEY")[0]
        between = between.removesuffix(key_head)
        between, after = between[cut[0] :].removeprefix(blank) if between else "", after[cut[1] :].removeprefix(blank)
        return self._framed(call_head, between, after, spelling=Spelling.TAGS, parameter=(head, tail))


def _holes(text: str, name: str) -> str:
    """`text` with what differs from call to call as Shape has it."""
    return _ID.sub("#", text.replace(name, "NAME"))


def _number(before: str) -> str:
    """What an id can be: a number where the template counts, else letters and digits."""
    return "[A-Za-z0-9_-]{1,40}" if "qzid" in before else "[0-9]{1,4}"


def _last_head(head: str) -> int:
    """Where the one call begins in what stands in front of its arguments: at the tag, or the bracket, before NAME."""
    at = head.rfind("NAME")
    line = head[:at].rstrip().rfind("\n") + 1
    return 0 if not head[:line].strip() else line


def _with_kinds(probe: Probe, shape: CallShape) -> CallShape:
    """The same with KIND, where the text in front of a value says its type."""
    if shape.spelling is not Spelling.TAGS or '"' not in shape.parameter[0].partition("KEY")[2]:
        return shape
    pattern = re.compile(re.escape(shape.parameter[0]).replace("KEY", "qzkeya").replace("string", "(\\w+)"), re.DOTALL)
    told: dict[str, str] = {}
    before, found, after = shape.parameter[0].rpartition("string")
    if not found:
        return shape
    for kind, value in _TYPED.items():
        text = next(iter(probe.calls([Call("qzfirst", {"qzkeya": value})])), "")
        word = pattern.search(text)
        if word is not None:
            told[kind] = word[1]
    if len(told) != len(_TYPED) or len(set(told.values())) == 1:
        return shape
    kinds = {**told, "string": "string", "integer": told["number"]}
    return replace(shape, parameter=(f"{before}KIND{after}", shape.parameter[1]), kinds=kinds)


def _with_quotes(probe: Probe, shape: CallShape) -> CallShape:
    """The same with what the template writes around a string that holds a tag's characters."""
    if shape.spelling is not Spelling.TAGS:
        return shape
    head, tail = (text.replace("KEY", "qzkeya") for text in shape.parameter)
    head = head.replace("KIND", shape.kinds.get("string", "true"))
    text = next(iter(probe.calls([Call("qzfirst", {"qzkeya": _MARKUP})])), "")
    before, _, after = text.partition(_MARKUP)
    quotes = before.rpartition(head)[2].strip(), after.partition(tail.strip())[0].strip()
    return replace(shape, quotes=quotes) if all(quotes) and head in before else shape

"""Decides what becomes of the fields of a request, by one table per dialect. Knows no dialect and no model.

    null, a neutral value ──> as if absent          honour, hint: the field's own meaning, or none
    another program's name ─> the field that means it    refuse: 400 that names the nearest field
    any other name ─────────> taken, logged once, named in the response's header (--strict_requests: 400)

A table maps each name that is known to its rule; `sort_fields` runs it over a body before its values are checked:

    TABLE = {"temperature": honour(), "repeat_penalty": mapped("repetition_penalty"), "store": hint(),
             "mirostat": refuse("temperature and min_p", 0), "options": inside({"num_predict": mapped("max_tokens")}),
             "text": within({"format": honour(), "verbosity": hint()})}
    honoured, ignored = sort_fields(body, TABLE)

Routes do it by `APIRouter(route_class=body_route(TABLE))` (bodies.py), which sets the header, too. What turns out later
to have no effect goes through `note_unused` (service.py). What has another form in the prompt, since the model's chat
template does not keep it as it is (`messages.system`), is named in the header too, and never refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ktransformers.errors import FieldError

__all__ = [
    "DROPPED_HEADER",
    "IGNORED_HEADER",
    "FieldRule",
    "FieldTable",
    "LoggedNames",
    "SortedFields",
    "hint",
    "honour",
    "ignored_header",
    "inside",
    "is_unwanted",
    "mapped",
    "note_dropped",
    "note_ignored",
    "note_said_names",
    "noted_names",
    "refuse",
    "said_names",
    "schema_place",
    "sort_fields",
    "within",
    "without_effect",
]

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-ktransformers-ignored"
"""Of responses: names of the request's fields that had no effect, or another form in the prompt, between commas."""

DROPPED_HEADER = "x-ktransformers-dropped-messages"
"""Of responses: how many of the conversation's oldest messages were left out, as it is longer than the context."""

_MAX_FIELDS = 256
_MAX_SHOWN = 32
_SCOPE_KEY = "ktransformers.ignored"
_DROPPED_KEY = "ktransformers.dropped"
_SAID_KEY = "ktransformers.said"
_ODD = "?"  # stands for names that no header could carry
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_PLACE = re.compile(r"[A-Za-z0-9_.\-*]{1,80}#(?:/[A-Za-z0-9_.\-$*]{1,64}){1,16}")
"""Of a schema's keyword: the field that has the schema, and a JSON pointer in it."""

_USERS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords below which a schema has names of the user's."""

_MAX_STEPS = 12


@dataclass(frozen=True, slots=True)
class FieldRule:
    """Rule for what becomes of a field whose value is neither null nor among `neutral`.

    to: the fields that a value means, in their own names; they are sorted in turn. nearest: refuse the value, and say
    what to use instead. is_ignored: it has no effect here, and the response says so. Neither: the field itself stays,
    unless is_hint. inner: of a field that is an object, the table of its own fields. code: of the refusal.
    """

    neutral: tuple[Any, ...] = ()
    to: Callable[[Any], Mapping[str, Any]] | None = None
    nearest: str | None = None
    is_hint: bool = False
    is_ignored: bool = False
    inner: Mapping[str, FieldRule] | None = None
    code: str | None = None


FieldTable = Mapping[str, FieldRule]
"""The names that a dialect knows."""


class SortedFields(NamedTuple):
    """The fields of a body, sorted by a dialect's table. honoured: fields for the dialect's model. ignored: names that
    have no meaning here.
    """

    honoured: dict[str, Any]
    ignored: tuple[str, ...]


def honour(*neutral: Any) -> FieldRule:
    """Make the rule for a field that the dialect reads under this name."""
    return FieldRule(neutral)


def hint() -> FieldRule:
    """Make the rule for a field about speed, storage, billing or tracing, which is taken: the answer is the same
    whatever it says.
    """
    return FieldRule(is_hint=True)


def mapped(to: str | Callable[[Any], Mapping[str, Any]], *neutral: Any) -> FieldRule:
    """Make the rule for another name of the field `to`, or for a value that a function turns into fields, or raises
    FieldError.
    """
    if callable(to):
        return FieldRule(neutral, to)
    return FieldRule(neutral, lambda value: {to: value})


def refuse(nearest: str, *neutral: Any, code: str | None = None) -> FieldRule:
    """Make the rule for a field that would change the answer and cannot be honoured. nearest: what to do instead, as in
    "use nearest".
    """
    return FieldRule(neutral, nearest=nearest, code=code)


def without_effect(*neutral: Any) -> FieldRule:
    """Make the rule for a known name whose other values are set when the server starts, or not at all: ignored like an
    unknown one.
    """
    return FieldRule(neutral, is_ignored=True)


def inside(table: FieldTable, *neutral: Any) -> FieldRule:
    """Make the rule for an object whose fields mean what `table` says, and else what they mean beside it."""

    def spread(value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise FieldError("it must be an object", "")
        made: dict[str, Any] = {}
        for name, one in value.items():
            rule = table.get(name)
            if rule is None:
                made[name] = one
            else:
                _merge(made, dict(_apply(name, one, rule)), name)
        return made

    return FieldRule(({}, *neutral), spread)


def within(table: FieldTable, *neutral: Any) -> FieldRule:
    """Make the rule for an object that the dialect reads under this name; `table` says what becomes of its fields,
    NAME.FIELD.
    """
    return FieldRule(({}, *neutral), inner=table)


def is_unwanted(name: str) -> FieldError:
    """Return the error for a field without effect where the operator wants none of them."""
    return FieldError(f"{name[:200]!r} has no effect here, and --strict_requests refuses such fields", name)


def sort_fields(body: Mapping[str, Any], table: FieldTable, *, is_strict: bool = False) -> SortedFields:
    """Sort the body's fields by the table. is_strict: what has no meaning here is refused.

    Raises FieldError for a field that cannot be honoured, and for two names of one field that say different things.
    """
    made = _sorted(body, table)
    if made.ignored and is_strict:
        raise is_unwanted(made.ignored[0])
    return made


def said_names(body: Mapping[str, Any], table: FieldTable) -> dict[str, str]:
    """Return the names by which a body calls sorted fields otherwise than by their own. Of fields within others both
    names begin with the outer one's."""
    made: dict[str, str] = {}
    for name, value in body.items():
        rule = table.get(name)
        if rule is not None and rule.inner is not None and isinstance(value, dict):
            within_it = said_names(value, rule.inner)
            made |= {f"{name}.{inner}": f"{name}.{said}" for inner, said in within_it.items()}
        if rule is None or rule.to is None:
            continue
        for inner, _ in _meaning(name, value, table):
            is_own = inner in body or (isinstance(value, dict) and inner in value)
            if not is_own:
                made.setdefault(inner, name)
    return made


def _sorted(body: Mapping[str, Any], table: FieldTable) -> SortedFields:
    if len(body) > _MAX_FIELDS:
        raise FieldError(f"{len(body)} fields are more than any request has", "")
    honoured: dict[str, Any] = {}
    ignored: dict[str, None] = {}
    said_by: dict[str, str] = {}
    for name, value in body.items():
        for made, one in _meaning(name, value, table):
            if made in table and not table[made].is_ignored:
                _merge(honoured, {made: one}, name, said_by.setdefault(made, name))
            else:
                ignored[made] = None
    for name in list(honoured):
        inner = table[name].inner
        if inner is not None and isinstance(honoured[name], dict):
            honoured[name], more = _sorted_within(name, honoured[name], inner)
            ignored |= dict.fromkeys(f"{name}.{one}" for one in more)
    return SortedFields(honoured, tuple(ignored))


def _sorted_within(name: str, value: Mapping[str, Any], table: FieldTable) -> SortedFields:
    try:
        return _sorted(value, table)
    except FieldError as error:
        param = f"{name}.{error.param}" if error.param else name
        raise FieldError(f"{name}.{error}" if error.param else f"{name}: {error}", param, error.code) from error


def _meaning(name: str, value: Any, table: FieldTable, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The field as the dialect's model knows it, or as several, or as none."""
    rule = table.get(name)
    if rule is None:
        if value is not None:
            yield name, value
        return
    for made, one in _apply(name, value, rule):
        if made == name or depth > 4:
            yield made, one
        else:
            yield from _meaning(made, one, table, depth + 1)


def _apply(name: str, value: Any, rule: FieldRule) -> Iterator[tuple[str, Any]]:
    if value is None or rule.is_hint or any(_is_same(value, neutral) for neutral in rule.neutral):
        return
    if rule.nearest is not None:
        raise FieldError(f"{name}: this server does not support it; use {rule.nearest}", name, rule.code)
    if rule.to is None:
        yield name, value
        return
    try:
        made = rule.to(value)
    except FieldError as error:
        raise FieldError(f"{name}: {error}", error.param or name) from error
    yield from made.items()


def _merge(into: dict[str, Any], made: Mapping[str, Any], name: str, other: str = "") -> None:
    """Two names of one object may each say a part of it. name, other: who says it, and who did before."""
    for key, value in made.items():
        said = into.get(key)
        if key not in into or _is_same(said, value):
            into[key] = value
        elif isinstance(said, dict) and isinstance(value, dict) and _agree(said, value):
            into[key] = said | value
        else:
            raise FieldError(f"{name} says something else than {other or key} does; send one of them", name)


def _agree(value: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(_is_same(value[key], other[key]) for key in value.keys() & other.keys())


def _is_same(value: Any, other: Any) -> bool:
    """Equal, and true is no 1."""
    if isinstance(value, bool) != isinstance(other, bool):
        return False
    return bool(value == other)


def schema_place(name: str, at: str, keyword: str) -> str:
    """Return the place of a schema's keyword as a header may carry it. name: of the field that has the schema. at: a
    JSON pointer.
    """
    steps = [*at.split("/")[1:], keyword]
    if len(steps) > _MAX_STEPS:
        steps = [*steps[:2], "*", *steps[3 - _MAX_STEPS :]]
    shown = [one if re.fullmatch(r"[A-Za-z0-9_.\-$]{1,64}", one) else "*" for one in steps]
    field_name = ".".join(one if _NAME.fullmatch(one) else "*" for one in name.split(".", 1))
    return f"{field_name}#/{'/'.join(shown)}"


def _without_names(place: str) -> str:
    """The same without any word of the user's, for the log."""
    name, _, pointer = place.partition("#")
    shown, is_name = list[str](), False
    for one in pointer.split("/")[1:]:
        shown.append("*" if is_name else one)
        is_name = not is_name and one in _USERS
    return f"{'tools' if name.startswith('tools.') else name}#/{'/'.join(shown)}"


def _shown(names: Iterable[str]) -> list[str]:
    """Names as a header and a log may carry them."""
    shown = (name if _NAME.fullmatch(name) or _PLACE.fullmatch(name) else _ODD for name in names)
    return list(dict.fromkeys(shown))[:_MAX_SHOWN]


def note_ignored(scope: MutableMapping[str, Any], names: Iterable[str]) -> None:
    """Note that these fields of the request had no effect or another form, for its response's header."""
    scope.setdefault(_SCOPE_KEY, []).extend(names)


def note_said_names(scope: MutableMapping[str, Any], names: Mapping[str, str]) -> None:
    """Note what the request calls these fields, for its response. names: see `said_names`."""
    scope[_SAID_KEY] = names


def noted_names(scope: Mapping[str, Any]) -> Mapping[str, str]:
    """Return what was noted, see `note_said_names`."""
    found: Mapping[str, str] = scope.get(_SAID_KEY, {})
    return found


def note_dropped(scope: MutableMapping[str, Any], num_messages: int) -> None:
    """Note that `num_messages` of the oldest messages were left out, for the response's header."""
    scope[_DROPPED_KEY] = num_messages


def ignored_header(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers that name what of a request was not taken, empty when all was."""
    said = noted_names(scope)
    names = _shown(
        name if "#" in name else said.get(name.partition(".")[0], name)  # a place in a schema is one of the field's own
        for name in scope.get(_SCOPE_KEY, ())
    )
    headers = {IGNORED_HEADER: ", ".join(names)} if names else {}
    if scope.get(_DROPPED_KEY):
        headers[DROPPED_HEADER] = str(scope[_DROPPED_KEY])
    return headers


@dataclass(slots=True)
class LoggedNames:
    """Logs each name once, and no more than `limit`: whoever sends others all the time does not fill the log.

    words: what is said, with %s for the name.
    """

    limit: int = 200
    words: str = "requests carry %s, which has no effect here (--strict_requests refuses it)"
    _said: set[str] = field(default_factory=set)

    def say(self, names: Iterable[str]) -> None:
        """Log the names that were not logged before."""
        for name in dict.fromkeys(_without_names(one) if "#" in one else one for one in _shown(names)):
            if name not in self._said and len(self._said) < self.limit:
                self._said.add(name)
                if "#" in name:
                    logger.warning("requests have schemas with %s, which answers are not held to", name)
                    continue
                shown = "a field with an odd name" if name == _ODD else name
                logger.warning(self.words, shown)

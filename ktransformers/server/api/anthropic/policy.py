"""What becomes of the top-level fields of a body, by a table: name -> rule. Knows no dialect.

null, a neutral value ──> as if absent          honour, hint: the field's own meaning, or none
another program's name ─> the field that means it    refuse: 400 that names the nearest field
any other name ─────────> taken, logged once, named in the response's header (--strict_requests: 400)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "IGNORED_HEADER",
    "LoggedNames",
    "Rule",
    "SortedFields",
    "hint",
    "honour",
    "mapped",
    "refuse",
    "shown_names",
    "sort_fields",
]

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-ktransformers-ignored"
"""Of responses: names of the request's fields that had no effect, separated by commas."""

_MAX_FIELDS = 256
_MAX_SHOWN = 32
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of a field whose value is neither null nor among `neutral`.

    to: the fields that a value means. nearest: refuse the value, and say what to use instead. Neither: the field stays,
    unless is_hint.
    """

    neutral: tuple[Any, ...] = ()
    to: Callable[[Any], Mapping[str, Any]] | None = None
    nearest: str | None = None
    is_hint: bool = False


class SortedFields(NamedTuple):
    """honoured: fields for the dialect's model. ignored: names that have no meaning here."""

    honoured: dict[str, Any]
    ignored: tuple[str, ...]


def honour(*neutral: Any) -> Rule:
    """The dialect reads the field under this name."""
    return Rule(neutral)


def hint() -> Rule:
    """About speed, storage, billing or tracing: whatever it says, the answer is the same. Taken."""
    return Rule(is_hint=True)


def mapped(to: Callable[[Any], Mapping[str, Any]], *neutral: Any) -> Rule:
    """Another program's name: a function from its value to fields of this table."""
    return Rule(neutral, to)


def refuse(nearest: str, *neutral: Any) -> Rule:
    """It would change the answer and cannot be honoured. nearest: what to do instead, as in "use nearest"."""
    return Rule(neutral, nearest=nearest)


def sort_fields(body: Mapping[str, Any], table: Mapping[str, Rule]) -> SortedFields:
    """The body's fields by the table.

    Raises ValueError for a field that cannot be honoured, and for two names of one field that say different things.
    """
    if len(body) > _MAX_FIELDS:
        raise ValueError(f"{len(body)} fields are more than any request has")
    honoured: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        rule = table.get(name)
        if value is None or (rule is not None and any(_is_same(value, neutral) for neutral in rule.neutral)):
            continue
        if rule is None:
            ignored.append(name)
            continue
        for made, one in _meaning(name, value, rule).items():
            if made in honoured and not _is_same(honoured[made], one):
                raise ValueError(f"{name} says something else than {made} does; send one of them")
            honoured[made] = one
    return SortedFields(honoured, tuple(ignored))


def _meaning(name: str, value: Any, rule: Rule) -> Mapping[str, Any]:
    if rule.nearest is not None:
        raise ValueError(f"{name}: this server does not support it; use {rule.nearest}")
    if rule.is_hint:
        return {}
    return {name: value} if rule.to is None else rule.to(value)


def _is_same(value: Any, other: Any) -> bool:
    """Equal, and true is no 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def shown_names(names: Iterable[str]) -> list[str]:
    """Names as a header and a log may carry them."""
    return list(dict.fromkeys(name if _NAME.fullmatch(name) else "?" for name in names))[:_MAX_SHOWN]


@dataclass(slots=True)
class LoggedNames:
    """Says each name once, and no more than `limit`: whoever sends others all the time does not fill the log."""

    limit: int = 200
    _said: set[str] = field(default_factory=set)

    def say(self, names: Iterable[str]) -> None:
        """Log the new ones among them."""
        for name in shown_names(names):
            if name not in self._said and len(self._said) < self.limit:
                self._said.add(name)
                logger.warning("requests carry %s, which has no effect here (--strict_requests refuses it)", name)

"""What becomes of fields that the dialect's model does not have, by a table. Knows no dialect.

null, a neutral value, a hint: as if absent. Another name for a field: that field. What would change the answer and
cannot be honoured: an error that names the nearest field. Everything else is taken, logged once and named in a header.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ktransformers.errors import UnsupportedError

__all__ = ["IGNORED_HEADER", "Ignored", "LoggedNames", "Rule", "hint", "mapped", "refuse", "sort_fields"]

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-ktransformers-ignored"
"""Of responses: names of the request's fields that had no effect, separated by commas."""

_MAX_SHOWN = 32
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


@dataclass(frozen=True, slots=True)
class Rule:
    """to: the field that means the same. nearest: refuse it unless it is neutral. Neither: a hint."""

    neutral: tuple[Any, ...] = ()
    to: str | None = None
    nearest: str | None = None


def hint() -> Rule:
    """Whatever it says, the answer is the same."""
    return Rule()


def mapped(to: str, *neutral: Any) -> Rule:
    """Another name for the field `to`."""
    return Rule(neutral, to=to)


def refuse(nearest: str, *neutral: Any) -> Rule:
    """Any value but the neutral ones is an error. nearest: what to do instead."""
    return Rule(neutral, nearest=nearest)


def sort_fields(body: Mapping[str, Any], table: Mapping[str, Rule]) -> dict[str, Any]:
    """The fields that have a meaning, and those that nobody knows. Raises UnsupportedError."""
    kept: dict[str, Any] = {}
    for name, value in body.items():
        rule = table.get(name)
        if value is None or (rule is not None and any(type(value) is type(n) and value == n for n in rule.neutral)):
            continue
        if rule is None:
            kept[name] = value
        elif rule.nearest is not None:
            raise UnsupportedError(f"{name}: this server does not support it; {rule.nearest}")
        elif rule.to is not None:
            if body.get(rule.to, value) not in (None, value):
                raise UnsupportedError(f"{name} says something else than {rule.to} does; send one of them")
            kept[rule.to] = value
    return kept


@dataclass(slots=True)
class LoggedNames:
    """Says each name once, and no more than `limit`: whoever sends others all the time does not fill the log."""

    limit: int = 200
    _said: set[str] = field(default_factory=set)

    def say(self, name: str) -> None:
        """Log a name that was not said before."""
        if name not in self._said and len(self._said) < self.limit:
            self._said.add(name)
            logger.warning("requests carry %s, which has no effect here (--strict_requests refuses it)", name)


@dataclass(slots=True)
class Ignored:
    """What one request says in vain. is_strict: refuse it instead."""

    is_strict: bool
    logged: LoggedNames
    names: dict[str, None] = field(default_factory=dict)

    def note(self, names: Iterable[str]) -> None:
        """Raises UnsupportedError for the first of them when the server is strict."""
        for name in names:
            shown = name if _NAME.fullmatch(name) else "?"
            if self.is_strict:
                raise UnsupportedError(f"{name[:64]!r} has no effect here, and --strict_requests refuses such fields")
            self.names[shown] = None
            self.logged.say(shown)

    def headers(self) -> dict[str, str]:
        """For the response; empty when nothing was ignored."""
        return {IGNORED_HEADER: ", ".join(list(self.names)[:_MAX_SHOWN])} if self.names else {}

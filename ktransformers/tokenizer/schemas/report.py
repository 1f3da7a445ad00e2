"""Reports about a schema: where it was widened, and why it is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from ktransformers.errors import ConfigError

__all__ = ["SchemaError", "Widened", "WideningReport", "refuse", "step"]

_MAX_NAMED = 100


class Widened(NamedTuple):
    """A keyword that answers are not held to, and where it stands: a JSON pointer, as in #/properties/tags."""

    at: str
    keyword: str

    def __str__(self) -> str:
        return f"{self.at}/{self.keyword}"


class SchemaError(ConfigError):
    """A schema that no grammar can follow. at, keyword: as of Widened. whose: the beginning of the message."""

    def __init__(self, at: str, keyword: str, reason: str, whose: str = ""):
        super().__init__(f"{whose}{at[:300]}: {keyword}: {reason}")
        self.at, self.keyword, self.reason = at, keyword, reason


@dataclass(slots=True)
class WideningReport:
    """The places where a schema was widened so far, in order, each once."""

    _found: dict[Widened, None] = field(default_factory=dict)

    def widen(self, at: str, keyword: str) -> None:
        """Note that answers are not held to this keyword."""
        if len(self._found) < _MAX_NAMED:
            self._found[Widened(at, keyword)] = None

    @property
    def widened(self) -> tuple[Widened, ...]:
        """All places where the schema was widened, up to a hundred."""
        return tuple(self._found)


def refuse(at: str, keyword: str, reason: str) -> NoReturn:
    """Raise SchemaError for a keyword and its place."""
    raise SchemaError(at, keyword, reason)


def step(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")

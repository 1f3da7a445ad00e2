"""A schema as a document: where its parts stand, and what references within it lead to.

Source: JSON Schema, draft 2020-12, 8.2 (`$id`, `$anchor`, `$ref`, `$dynamicRef`); RFC 6901.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urljoin

from ktransformers.tokenizer.schemas.report import refuse, step

__all__ = ["Document", "SubSchema"]

_MAPS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies", "dependentRequired")
)
"""Keywords whose object has names of the user's, and below each a schema."""

_VALUES = frozenset(("enum", "const", "default", "examples", "example"))
"""Keywords that hold values, in which nothing is a schema."""


@dataclass(frozen=True, slots=True, eq=False)
class SubSchema:
    """A schema within the document. chain: those that it holds at the same place as, from the outermost on, by id.

    is_option: it, or one of the chain, is one of several that may hold.
    """

    schema: Any
    at: str
    chain: tuple[int, ...] = ()
    is_option: bool = False

    def get(self, keyword: str) -> Any:
        """Return the keyword's value; None where there is none, and for null, which says nothing."""
        return self.schema.get(keyword) if isinstance(self.schema, dict) else None

    @property
    def has_conditions(self) -> bool:
        """Whether more schemas may hold at the schema's place than those that its alternatives name."""
        return any(self.get(key) is not None for key in ("if", "dependentSchemas", "dependencies", "$dynamicRef"))

    def below(self, schema: Any, *names: str | int) -> SubSchema:
        """Return a schema for a value within this one's."""
        return SubSchema(schema, "/".join((self.at, *(step(str(name)) for name in names))))

    def beside(self, schema: Any, *names: str | int, is_option: bool = False) -> SubSchema:
        """Return a schema for the same value."""
        at = "/".join((self.at, *(step(str(name)) for name in names)))
        return SubSchema(schema, at, (*self.chain, id(self.schema)), self.is_option or is_option)


class Document:
    """A schema document. root: plain JSON, in which no object is the same as another."""

    def __init__(self, root: Any):
        self.root = root
        self._bases: dict[int, str] = {}
        self._places: dict[int, str] = {}
        self._resources: dict[str, Any] = {}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._dynamic: dict[str, list[Any]] = {}
        self._read(root)

    def _read(self, root: Any) -> None:
        """Notes of all objects where they stand and what they are called."""
        waiting: list[tuple[Any, str, str, bool]] = [(root, "#", "", False)]
        while waiting:
            value, at, base, is_map = waiting.pop()
            if isinstance(value, list):
                waiting += [(one, f"{at}/{number}", base, False) for number, one in enumerate(value)]
            if not isinstance(value, dict):
                continue
            if not is_map:
                base = self._note_names(value, base)
            self._bases[id(value)], self._places[id(value)] = base, at
            waiting += [
                (one, f"{at}/{step(name)}", base, not is_map and name in _MAPS)
                for name, one in value.items()
                if is_map or name not in _VALUES
            ]
        self._resources.setdefault("", root)

    def _note_names(self, schema: dict[str, Any], base: str) -> str:
        """The base of what is within."""
        name = schema.get("$id")
        if isinstance(name, str) and not name.startswith("#"):
            base = urljoin(base, name).partition("#")[0]
            self._resources.setdefault(base, schema)
        elif isinstance(name, str):  # as up to draft 7
            self._anchors.setdefault((base, name[1:]), schema)
        for keyword in ("$anchor", "$dynamicAnchor"):
            anchor = schema.get(keyword)
            if isinstance(anchor, str):
                self._anchors.setdefault((base, anchor), schema)
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(anchor, []).append(schema)
        return base

    def follow(self, part: SubSchema, keyword: str) -> SubSchema:
        """Return the schema that a part's reference leads to.

        Raises SchemaError for one that leads nowhere, or out of the document.
        """
        name = part.schema[keyword]
        if not isinstance(name, str):
            refuse(part.at, keyword, "it must be text")
        if keyword == "$recursiveRef":
            name = "#"
        base = self._bases.get(id(part.schema), "")
        where, _, fragment = (base + name if name.startswith("#") else urljoin(base, name)).partition("#")
        fragment = unquote(fragment)
        if where not in self._resources and not name.startswith("#"):
            refuse(part.at, keyword, f"{name[:100]!r} leads out of the schema")
        for home in (self._resources.get(where, self.root), self.root):
            found = self._within(home, where, fragment)
            if found is not None:
                return part.beside(found, keyword) if found is True or found is False else self._at_home(part, found)
        return refuse(part.at, keyword, f"{name[:100]!r} leads nowhere")

    def _at_home(self, part: SubSchema, found: Any) -> SubSchema:
        return SubSchema(found, self._places.get(id(found), part.at), (*part.chain, id(part.schema)), part.is_option)

    def is_static(self, part: SubSchema) -> bool:
        """Whether a $dynamicRef can lead to one place only."""
        anchor = str(part.schema["$dynamicRef"]).rpartition("#")[2]
        return len(self._dynamic.get(anchor, ())) <= 1

    def _within(self, home: Any, where: str, fragment: str) -> Any:
        if not fragment:
            return home
        if not fragment.startswith("/"):
            return self._anchors.get((where, fragment))
        found = home
        for name in fragment.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                return None
        return found if isinstance(found, dict | bool) else None

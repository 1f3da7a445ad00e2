"""Reads YAML text as plain values that remember their lines. Knows YAML; knows nothing of rules.

Values are built by hand from the nodes that PyYAML composes, so that nothing but null, bools, numbers, strings,
lists and mappings can come out of a file, duplicate keys are seen, and every error carries a line. Size, depth,
aliases and the number of values are bounded before anything is built from them ("billion laughs").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import yaml

from ktransformers.errors import RuleError, reason_of
from ktransformers.system.user_files import read_named

__all__ = ["Item", "Scalar", "parse_yaml", "read_yaml"]

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_ALIASES = 200
MAX_VALUES = 50_000

Scalar: TypeAlias = bool | int | float | str | None

_SCALAR_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str"))
_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Item:
    """Value of the document and the line (1-based) it starts on.

    value is a Scalar, a list of Items, or a dict from key to Item; key_lines says where each key stands.
    """

    value: Scalar | list[Item] | dict[Scalar, Item]
    line: int
    key_lines: dict[Scalar, int] = field(default_factory=dict)

    def plain(self) -> object:
        """Return the value without lines."""
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return self.value

    def kind(self) -> str:
        """Name of the value's type, for messages."""
        names = {dict: "a mapping", list: "a list", str: "text", bool: "true/false", int: "a number", float: "a number"}
        return names.get(type(self.value), "empty")


def read_yaml(path: Path) -> Item | None:
    """Parse the file at `path`; None when it holds no document. Raises RuleError."""
    try:
        data = read_named(path, MAX_BYTES + 1)
    except OSError as error:
        raise RuleError(f"cannot be read: {reason_of(error)}", file=str(path)) from error
    if len(data) > MAX_BYTES:
        raise RuleError(f"is larger than {MAX_BYTES} bytes; a rule file never needs that", file=str(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise RuleError("is not UTF-8 text", file=str(path), line=line) from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, file: str) -> Item | None:
    """Parse `text`; `file` names it in errors. None when it holds no document. Raises RuleError."""
    try:
        _check_bounds(text, file)
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            return None if node is None else _Builder(loader, file).build(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise RuleError(f"is not valid YAML: {reason}", file=file, line=mark.line + 1 if mark else None) from error
    except yaml.YAMLError as error:
        raise RuleError(f"is not valid YAML: {error}", file=file) from error


def _check_bounds(text: str, file: str) -> None:
    """Refuse, from the flat event stream, what would be costly to compose. PyYAML's composer recurses on depth."""
    depth = aliases = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > MAX_DEPTH or aliases > MAX_ALIASES:
            limit = (
                f"is nested deeper than {MAX_DEPTH}" if depth > MAX_DEPTH else f"has more than {MAX_ALIASES} aliases"
            )
            mark = event.start_mark
            raise RuleError(limit, file=file, line=None if mark is None else mark.line + 1)


class _Builder:
    """Turns composed nodes into Items, counting them: an alias is expanded, so a node can be met many times."""

    def __init__(self, loader: yaml.SafeLoader, file: str):
        self.loader, self.file = loader, file
        self.num_values = 0
        self.open_nodes: set[int] = set()
        self.entry: int | None = None  # which entry of the top-level list is being built, from 1

    def fail(self, message: str, node: yaml.Node) -> RuleError:
        return RuleError(message, file=self.file, line=node.start_mark.line + 1, rule=self.entry)

    def build(self, node: yaml.Node) -> Item:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise self.fail(f"expands to more than {MAX_VALUES} values", node)
        line = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode):
            return Item(self.scalar(node), line)
        if id(node) in self.open_nodes:
            raise self.fail("an alias contains itself", node)
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
                return Item(self.entries(node.value), line)
            if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
                return self.mapping(node, line)
        finally:
            self.open_nodes.discard(id(node))
        raise self.fail(f"the YAML tag {node.tag!r} is not allowed here", node)

    def entries(self, nodes: list[yaml.Node]) -> list[Item]:
        if len(self.open_nodes) > 1:
            return [self.build(node) for node in nodes]
        items = []
        for number, node in enumerate(nodes, start=1):
            self.entry = number
            items.append(self.build(node))
        self.entry = None
        return items

    def scalar(self, node: yaml.ScalarNode) -> Scalar:
        if node.tag == "tag:yaml.org,2002:timestamp":  # an unquoted date is text in a rule file
            return str(node.value)
        if node.tag not in _SCALAR_TAGS:
            raise self.fail(f"the YAML tag {node.tag!r} is not allowed here", node)
        try:
            value: Scalar = self.loader.construct_object(node)
        except (ValueError, KeyError, IndexError) as error:  # what PyYAML raises for `!!int x`, `!!bool x`, `!!int ''`
            raise self.fail(f"{node.value!r} is not a valid {node.tag.rsplit(':', 1)[-1]}", node) from error
        return value

    def mapping(self, node: yaml.MappingNode, line: int) -> Item:
        values: dict[Scalar, Item] = {}
        merged: dict[Scalar, Item] = {}
        lines: dict[Scalar, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                merged = {**self.merged(value_node), **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.fail("a key must be a single value", key_node)
            key = self.scalar(key_node)
            if key in values:
                raise self.fail(f"the key {key!r} stands here twice (first in line {lines[key]})", key_node)
            values[key] = self.build(value_node)
            lines[key] = key_node.start_mark.line + 1
        for key, item in merged.items():
            if key not in values:
                values[key], lines[key] = item, item.line
        return Item(values, line, lines)

    def merged(self, node: yaml.Node) -> dict[Scalar, Item]:
        """Entries that `<<: *anchor` or `<<: [*a, *b]` brings in; of two anchors the first wins."""
        result: dict[Scalar, Item] = {}
        for part in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            item = self.build(part)
            if not isinstance(item.value, dict):
                raise self.fail("`<<` needs a mapping", part)
            result = {**item.value, **result}
        return result

"""Reads the entries of a rule file, with those of the files that it includes in their places.

    - match: {...}                first match wins, so what stands above an include goes before the rules in it
      replace: {...}
    - include: default-moe.yaml   beside the including file, else a shipped file of that name

Knows files and the key `include`, and of a rule only that it is another entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ktransformers.errors import RuleError, reason_of
from ktransformers.optimize.aliases import nearest
from ktransformers.optimize.document import Item, read_yaml
from ktransformers.system.shipped_rules import find_shipped_rules, is_shipped, shipped_names, shipped_path

__all__ = ["RuleEntry", "RuleFile", "read_entries"]

MAX_INCLUDES = 100
"""Include entries of a file and of all that it includes: files that include each other twice double with each level."""

_KEY = "include"


@dataclass(frozen=True, slots=True, eq=False)
class RuleFile:
    """A rule file at the place where it is read: one that is included twice is two of these.

    name: as messages spell it. path: None for rules that are in no file. parent: the file whose entry in line
    parent_line includes it; None and 0 for the one that was asked for.
    """

    name: str
    path: Path | None = None
    parent: RuleFile | None = None
    parent_line: int = 0

    @property
    def is_generic(self) -> bool:
        """Whether the file's rules are for many models: a shipped file that another one includes, or that is a
        default.
        """
        if self.path is None or not is_shipped(self.path):
            return False
        return self.parent is not None or self.path.name.startswith("default-")

    @property
    def short_name(self) -> str:
        """Name of the file, without the folder that a shipped file is installed in."""
        return self.path.name if self.path is not None and is_shipped(self.path) else self.name

    def lineage(self) -> Iterator[RuleFile]:
        """Yield the file itself, the one that includes it, and so on."""
        file: RuleFile | None = self
        while file is not None:
            yield file
            file = file.parent

    def holds(self, other: RuleFile) -> bool:
        """Whether `other` is this file, or is included in it, at whatever depth."""
        return any(file is self for file in other.lineage())

    def error(self, message: str, line: int | None = None, rule: int | None = None) -> RuleError:
        """Return a RuleError that points into this file and names the includes that lead to it."""
        chain = [f"{file.parent.name}:{file.parent_line}" for file in self.lineage() if file.parent is not None]
        via = f" (included from {', from '.join(chain)})" if chain else ""
        return RuleError(f"{message}{via}", file=self.name, line=line, rule=rule)


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """Rule as it is written. number: of the entry in its file, from 1; includes count."""

    item: Item
    file: RuleFile
    number: int


@dataclass(slots=True)
class _Reader:
    """Collects entries. num_includes: entries of `include` so far."""

    entries: list[RuleEntry] = field(default_factory=list)
    num_includes: int = 0

    def read(self, document: Item | None, file: RuleFile) -> None:
        if document is None:
            raise file.error("holds no rules; write [] to keep every module as it is")
        if not isinstance(document.value, list):
            raise file.error(f"must be a list of rules (`- match: ...`), not {document.kind()}", document.line)
        for number, item in enumerate(document.value, start=1):
            if isinstance(item.value, dict) and _KEY in item.value:
                self._include(item, file, number)
            else:
                self.entries.append(RuleEntry(item, file, number))

    def _include(self, item: Item, file: RuleFile, number: int) -> None:
        assert isinstance(item.value, dict)
        line = item.key_lines.get(_KEY, item.line)
        others = [str(key) for key in item.value if key != _KEY]
        if others:
            raise file.error(f"{_KEY} stands alone in its entry; move {', '.join(others)} to another one", line, number)
        name = item.value[_KEY].value
        if not isinstance(name, str) or not name:
            raise file.error(f"{_KEY} must be the path of a rule file, not {item.value[_KEY].kind()}", line, number)
        self.num_includes += 1
        if self.num_includes > MAX_INCLUDES:
            raise file.error(f"more than {MAX_INCLUDES} files are included", line, number)
        try:
            path = _find(name, file)
        except (OSError, ValueError) as problem:  # a name too long, a folder that may not be entered, a NUL
            raise file.error(f"{_KEY}: {name!a:.120} cannot be read: {reason_of(problem)}", line, number) from problem
        if path is None:
            raise file.error(_unknown(name, file), line, number)
        circle = [one for one in file.lineage() if one.path is not None and one.path.resolve() == path.resolve()]
        if circle:
            hint = f"; it hides the shipped {name}: give it another name" if shipped_path(path.name).is_file() else ""
            raise file.error(f"{_KEY}: {name} includes itself{hint}", line, number)
        included = RuleFile(str(path), path, file, line)
        try:
            document = read_yaml(path)
        except RuleError as problem:
            raise included.error(problem.message, problem.line, problem.rule) from problem
        self.read(document, included)


def _find(name: str, file: RuleFile) -> Path | None:
    """The file that `include: name` means in `file`."""
    if file.path is not None:
        beside = file.path.parent / name
        if beside.exists():
            return beside
    shipped = shipped_path(name)
    return shipped if Path(name).name == name and shipped.is_file() else None


def _unknown(name: str, file: RuleFile) -> str:
    """What is wrong with a name that means no file."""
    where = "" if file.path is None else f"{file.path.parent / name} does not exist, and "
    message = f"{_KEY}: {where}no shipped file is called {name}"
    meant = find_shipped_rules(Path(name))
    if meant is not None:
        return f"{message}; the shipped file of that family is {meant.path.name}"
    return message + (nearest(Path(name).name, shipped_names()) or f"; shipped are {', '.join(shipped_names())}")


def read_entries(document: Item | None, file: RuleFile) -> list[RuleEntry]:
    """Return the rules of `document`, which was read from `file`, and of all that it includes, in the order that
    decides.

    Raises RuleError for a document that is no list, and for an include that names no file, a file that cannot be read
    or one that includes itself.
    """
    reader = _Reader()
    reader.read(document, file)
    return reader.entries

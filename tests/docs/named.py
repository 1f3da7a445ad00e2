"""What docs, comments and docstrings name: files of this repository and dotted names of the package."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["ROOT", "Files", "dotted_names", "file_names", "missing_dotted", "pages", "prose_of", "sources"]

ROOT = Path(__file__).parents[2]
_FILE = re.compile(
    r"(?<![\w/.*{<$-])((?:[\w-]+/)*[\w.-]*\w\.(?:py|pyi|inl|cpp|h|md|yaml|yml|sh|toml))(?![\w(/*])(?!\.\w)"
)
_DOTTED = re.compile(r"(?<![\w.])ktransformers(?:\.[A-Za-z_]\w*)+")


def _tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def pages() -> list[Path]:
    """Markdown that is about this repository."""
    return [ROOT / name for name in _tracked("*.md", "docs/**/*.md")]


def sources() -> list[Path]:
    """Files with comments: Python, C++, their build and tests."""
    return [ROOT / name for name in _tracked("ktransformers/*.py", "csrc/*", "tests/*.py", "benchmarks/*.py")]


@cache
def prose_of(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, text) of all of a page, of the comments of C++, and of the comments and docstrings of Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return tuple(enumerate(text.splitlines(), 1))
    comments = _comments(text, "#" if path.suffix == ".py" else "//")
    return (*comments, *_docstrings(text)) if path.suffix == ".py" else tuple(comments)


def _comments(text: str, mark: str) -> Iterator[tuple[int, str]]:
    """Also what looks like a comment within a string: few do, and none names a file."""
    pattern = re.compile(rf"(?:^|\s){mark}:?\s(.*)")
    for number, line in enumerate(text.splitlines(), 1):
        found = pattern.search(line) if mark in line else None
        if found:
            yield number, found[1]


def _docstrings(text: str) -> Iterator[tuple[int, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        docstring = ast.get_docstring(node, clean=False) if isinstance(node, kinds) else None
        if docstring:
            first = node.body[0].lineno  # type: ignore[attr-defined]
            yield from enumerate(docstring.splitlines(), first)


def file_names(text: str) -> list[str]:
    """Names of files with a suffix of sources, as a line spells them; of web addresses none."""
    if "." not in text:
        return []
    return _FILE.findall(re.sub(r"\w+://\S+", " ", text))


def dotted_names(text: str) -> list[str]:
    """Names that begin with `ktransformers.`; what ends like a file is none."""
    if "ktransformers." not in text:
        return []
    return [name for name in _DOTTED.findall(text) if not re.search(r"\.(py|yaml|md|service|svg)$", name)]


@dataclass(frozen=True, slots=True)
class Files:
    """The repository's files by every ending of their paths: `load/builder.py` and `builder.py` are both found."""

    endings: frozenset[str]

    @classmethod
    def of_repository(cls) -> Files:
        endings = set()
        for name in _tracked():
            parts = name.split("/")
            endings |= {"/".join(parts[first:]) for first in range(len(parts))}
        return cls(frozenset(endings))

    def has(self, name: str) -> bool:
        return name.removeprefix("./") in self.endings


@cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def missing_dotted(name: str) -> bool:
    """Whether no module is called so, nor has what follows the module's name."""
    place, parts = ROOT / "ktransformers", name.split(".")[1:]
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    file = place / "__init__.py"
    if parts and (place / f"{parts[0]}.py").exists():
        file = place / f"{parts.pop(0)}.py"
    if not parts:
        return not place.is_dir() and not file.exists()
    return not file.exists() or not re.search(rf"\b{parts[0]}\b", _source(file))

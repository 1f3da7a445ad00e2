"""Public docstrings stand without the signature: a hover box and a page of the API show no more than their first line.

What can be held by a test is how they begin. A bare preposition or pronoun ("Of one model.", "As it is now.", "It, as
far as it got.") needs the name above it; so do one or two words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "ktransformers"
OPENERS = frozenset(
    re.findall(
        r"\w+",
        """
        about above after also and another as at before behind below beside between but by empty errors for from here in
        it its like none not of on one only or over per raises same see so such than that their then there these they
        this those through to under until with within without
        """,
    )
)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of a module, and of its public classes, functions and methods."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            name, text = getattr(node, "name", "module"), ast.get_docstring(node)
            if text and (not name.startswith("_") or name == "__init__"):
                yield getattr(node, "lineno", 1), text


def needs_its_signature(text: str) -> bool:
    words = re.split(r"(?<=[.!?])\s", text.strip())[0].split()
    return len(words) < 3 or words[0].rstrip(",:.;").lower() in OPENERS


def test_what_needs_its_signature() -> None:
    needing = ["Of one model.", "As it is now.", "It, as far as it got.", "None: all of them.", "R.", "See Writer."]
    assert all(map(needs_its_signature, needing))
    standing = ["Whether the cache is full.", "Return the rows of a step.", "The state of one bridge: what it wrote."]
    assert not any(map(needs_its_signature, standing))


def test_public_docstrings_stand_without_the_signature() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text.splitlines()[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if needs_its_signature(text)
    ]
    assert found == []

"""docs/structure.md stays an architect's page, and has every package."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest

from tests.docs.named import ROOT

PAGE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "ktransformers"
PACKAGES = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")}


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_it_is_short() -> None:
    assert len(PAGE.split()) <= 2_500


def test_it_draws_three_ways_through_the_rooms() -> None:
    for title in ("A token", "A request", "A weight"):
        assert re.search(r"(?m)^    .*──", section(title)), title


def test_every_package_is_named_once() -> None:
    named = re.findall(r"(?m)^\| `([\w/]+)/` \|", section("Packages"))
    assert sorted(named) == sorted("ktransformers" if package == "." else package for package in PACKAGES)


def test_every_room_of_the_chat_page_is_named_once() -> None:
    named = re.findall(r"`(\w+)/`", section("The chat page"))
    assert sorted(named) == sorted(path.name for path in (ROOT / "web" / "src").iterdir() if path.is_dir())


def test_a_row_of_a_table_is_no_paragraph() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert [row for row in rows if len(row) > 160] == []


def test_the_order_of_imports_is_the_linter_s() -> None:
    """`a` < `b`, `c` < `d`: what stands behind imports what stands before."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = [one["layers"] for one in contracts if one["name"] == "imports point one way"]
    held = [set(layer.split(" | ")) for layer in reversed(layers)]
    said = section("Packages").partition("(`make lint`):")[2].partition(". ")[0]
    order = [set(re.findall(r"`(\w+)`", part)) for part in said.split("<")]
    assert order == [layer for layer in held if not layer & {"local_chat", "__main__"}]


HALLS = sorted(package for package in PACKAGES if "/" not in package and package != ".")


@pytest.mark.parametrize("hall", HALLS)
def test_a_hall_says_what_it_is_its_rooms_and_what_it_does_not_know(hall: str) -> None:
    """In its docstring, whole sentences; every sub-package is named."""
    source = (PACKAGE / hall / "__init__.py").read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source)) or ""
    rooms = {path.parent.name for path in (PACKAGE / hall).glob("*/__init__.py")}
    assert {room for room in rooms if not re.search(rf"\b{room}\b", text)} == set()
    assert re.search(r"(?i)\b(?:not know|knows? no|not tensors|no model)\b", text), hall
    assert len(text.split()) > 40

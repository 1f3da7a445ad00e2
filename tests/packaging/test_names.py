"""A public class name stands for one thing, and every package has an order of imports."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ktransformers"

SHARED_NAMES = {
    "ChatBody": "the bodies of two dialects, each the schema that its API documents",
}
"""Names of more than one class, and why. The list may only become shorter."""


def test_no_public_class_name_is_used_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    shared = {name: where for name, where in places.items() if len(where) > 1}
    new = {name: where for name, where in shared.items() if name not in SHARED_NAMES}
    assert not new, f"give all but one of these a name that says more: {new}"
    assert SHARED_NAMES.keys() <= shared.keys(), f"take off the list: {SHARED_NAMES.keys() - shared.keys()}"


def test_every_package_has_an_order_of_imports() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    ordered = {name for one in settings["contracts"] for name in one.get("containers", ())}
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    packages = {name for name in packages if len(list((PACKAGE / name).glob("*.py"))) > 2}
    missing = {name for name in packages if f"ktransformers.{name}" not in ordered}
    assert not missing, f"add a contract to [tool.importlinter] for {missing}"
    layers = settings["contracts"][0]
    assert layers["containers"] == ["ktransformers"]
    named = {name.strip() for layer in layers["layers"] for name in layer.split("|")}
    assert packages <= named, f"say where these stand among the packages: {packages - named}"

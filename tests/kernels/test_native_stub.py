"""`ktransformers/_native.pyi` says what the extension exports: names, kinds, and the names of parameters in order."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

from ktransformers.kernels.extension import extension

STUB = Path(__file__).resolve().parents[2] / "ktransformers" / "_native.pyi"

Names = dict[str, str]  # a name, and what it is


def shown(function: ast.FunctionDef) -> str:
    """A function or method as its parameters, without their types, which nanobind writes in another way."""
    arguments = function.args
    return "(" + ", ".join(one.arg for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) + ")"


def in_stub(body: list[ast.stmt]) -> Names:
    names: Names = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            is_property = any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list)
            names[node.name] = "property" if is_property else shown(node)
        elif isinstance(node, ast.ClassDef):
            names[node.name] = "class"
            names |= {f"{node.name}.{name}": kind for name, kind in in_stub(node.body).items()}
        elif isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            names[node.target.id] = "value"
    return names


def signature(function: object) -> str:
    (overload, *others) = function.__nb_signature__  # type: ignore[attr-defined]
    assert not others, f"{function} has overloads, which this test does not know"
    text = re.sub(r"= \\\d+", "= ...", overload[0])  # default values are apart
    (node,) = ast.parse(text + ": ...").body
    assert isinstance(node, ast.FunctionDef)
    return shown(node)


def in_extension(owner: ModuleType | type) -> Names:
    names: Names = {}
    for name, value in vars(owner).items():
        if hasattr(value, "__nb_signature__"):
            names[name] = signature(value)
        elif name.startswith("__"):
            continue
        elif isinstance(value, type):
            names[name] = "class"
            names |= {f"{name}.{inner}": kind for inner, kind in in_extension(value).items()}
        else:  # nanobind has a subclass of property for those of a class
            names[name] = "property" if type(value) is property else "value"
    return names


def test_the_stub_says_what_the_extension_exports() -> None:
    written, exported = in_stub(ast.parse(STUB.read_text(encoding="utf-8")).body), in_extension(extension)
    assert len(exported) > 100
    assert {name: kind for name, kind in exported.items() if written.get(name) != kind} == {}, "the stub lags behind"
    assert sorted(set(written) - set(exported)) == [], "the stub names what there is not"


def test_a_stub_that_lags_behind_is_seen() -> None:
    text = (
        "class A:\n    def f(self, x: int) -> None: ...\n    @property\n    def n(self) -> int: ...\nB: int\n_T = int\n"
    )
    assert in_stub(ast.parse(text).body) == {"A": "class", "A.f": "(self, x)", "A.n": "property", "B": "value"}
    assert in_stub(ast.parse(text.replace("x: int", "y: int")).body)["A.f"] == "(self, y)"

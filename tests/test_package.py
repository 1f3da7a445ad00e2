"""The package's front page and the rules that hold for every module."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
import subprocess
import sys

import pytest

import ktransformers
from ktransformers import errors

MODULES = sorted(
    m.name for m in pkgutil.walk_packages(ktransformers.__path__, "ktransformers.") if "__main__" not in m.name
)


OF_RAY = {f"ktransformers.cluster.{name}" for name in ("deployments", "handles", "router", "running", "stages")}
"""What imports Ray, an extra that warns of itself."""


def test_public_names_resolve() -> None:
    for name in ktransformers.__all__:
        assert getattr(ktransformers, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ktransformers.nonsense


def test_versions_agree() -> None:
    assert importlib.metadata.version("ktransformers-engine") == ktransformers.__version__


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.filterwarnings("ignore")) if name in OF_RAY else name for name in MODULES],
)
def test_module_says_what_it_is_and_exports_what_exists(name: str) -> None:
    if name in OF_RAY:
        pytest.importorskip("ray", reason="needs Ray: pip install 'ray[serve]'")
    module = importlib.import_module(name)
    if not name.endswith("_native"):
        assert module.__doc__, f"{name} has no docstring"
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public), f"{name}.__all__ names {public}"


def test_every_error_is_in_the_tree() -> None:
    for name in set(errors.__all__) - {"MODULE_FAILURES", "named_reason", "reason_of"}:
        error = getattr(errors, name)
        assert issubclass(error, errors.KTransformersError)
        assert inspect.getdoc(error)
        assert name in (errors.__doc__ or "")


def test_importing_the_package_is_light() -> None:
    code = "import sys, ktransformers, ktransformers.cli; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

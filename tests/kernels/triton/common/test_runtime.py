"""Every module of the package imports without Triton, and says what is missing."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import pytest

import ktransformers.kernels.triton as package


@pytest.fixture
def without_triton(monkeypatch):
    """The package's modules, imported anew where Triton cannot be; the real ones are back afterwards."""
    for name in list(sys.modules):
        if name == "triton" or name.startswith((package.__name__ + ".", "triton.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    prefix, real = f"{package.__name__}.", dict(vars(package))
    names = [info.name for info in pkgutil.walk_packages(package.__path__, prefix)]
    yield {name.removeprefix(prefix): importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)
        vars(package).pop(name.removeprefix(prefix), None)
    vars(package).update(real)


def test_imports_without_triton(without_triton):
    assert without_triton["common.runtime"].available() == "triton is not installed"
    assert not without_triton["common.runtime"].is_interpreted()
    assert len(without_triton) >= 50


def test_available_here(device):
    from ktransformers.kernels.triton.common import runtime

    assert runtime.available() is None
    assert runtime.is_interpreted() == (device.type == "cpu")

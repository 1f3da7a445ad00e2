"""What the package promises: its Pythons, one name, an extension that brings its own C++ library."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ktransformers.kernels.extension import extension

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
OFFERED = [minor for minor in range(30) if SpecifierSet(PROJECT["requires-python"]).contains(f"3.{minor}.0")]


def test_classifiers_and_wheels_are_for_the_pythons_that_are_offered() -> None:
    named = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert named == {f"3.{minor}" for minor in OFFERED}
    wheels = PYPROJECT["tool"]["cibuildwheel"]
    assert wheels["build"] == [f"cp3{minor}-*" for minor in OFFERED]
    assert wheels["manylinux-x86_64-image"] == "manylinux_2_28"


def test_nobody_is_told_to_install_the_other_distribution() -> None:
    """`pip install ktransformers` would bring another project's program."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("ktransformers/**/*.py"), ROOT / "Makefile"]
    assert len(files) > 100
    for file in files:
        found = re.search(r"pip install [^`\n]*\bktransformers(?!-engine)\b(?!/)", file.read_text(encoding="utf-8"))
        assert not found, f"{file}: {found and found[0]}"


def test_ci_pins_the_triton_that_the_pinned_torch_asks_for() -> None:
    """By what is installed; test_resolves.py asks the index."""
    lines = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    installed = Version(metadata.version("torch"))
    asked = [one for one in map(Requirement, metadata.requires("torch") or ()) if one.name == "triton"]
    if installed.public != pins["torch"] or not asked:
        pytest.skip(f"torch {installed} is not the pinned one for CUDA")
    assert all(one.specifier.contains(pins["triton"]) for one in asked)


def test_ci_pins_are_not_what_users_get() -> None:
    asked = subprocess.run(
        ["make", "-n", "VENV=/no/such/folder", "chat"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "tools/install.sh /no/such/folder" in asked.stdout
    assert "constraints" not in asked.stdout


def test_ci_runs_the_tests_as_readme_says() -> None:
    """Variables that CI alone sets have hidden what a stranger gets."""
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "make test" in lines
    assert not any(re.match(r"\s*(export|declare|set -a)\b", line) for line in lines)


def has_static_library() -> bool:
    """Whether the compiler has libstdc++.a; Fedora, for one, has it in a package of its own."""
    compiler = shutil.which("c++")
    if compiler is None:
        return False
    asked = [compiler, "-print-file-name=libstdc++.a"]
    return Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()).is_absolute()


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) is not installed")
@pytest.mark.skipif(not has_static_library(), reason="the compiler has no static libstdc++")
def test_the_extension_brings_its_own_cxx_library() -> None:
    listed = subprocess.run(["readelf", "-dW", extension.__file__], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", listed)
    assert "libc.so.6" in needed
    assert not [name for name in needed if name.startswith("libstdc++")]

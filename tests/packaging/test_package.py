"""What the package promises: its Pythons, one name, an extension that brings its own C++ library."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ktransformers import __version__
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
    assert wheels["manylinux-x86_64-image"] == wheels["manylinux-aarch64-image"] == "manylinux_2_28"


def test_nobody_is_told_to_install_the_other_distribution() -> None:
    """`pip install ktransformers` would bring another project's program."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("ktransformers/**/*.py"), ROOT / "Makefile"]
    assert len(files) > 100
    for file in files:
        found = re.search(r"pip install [^`\n]*\bktransformers(?!-engine)\b(?!/)", file.read_text(encoding="utf-8"))
        assert not found, f"{file}: {found and found[0]}"


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a wheel holds, built without the extension, which is not looked at."""
    pytest.importorskip("scikit_build_core")
    folder = tmp_path_factory.mktemp("wheel")
    code = "import sys, scikit_build_core.build as b; b.build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_has_no_more_than_the_package(wheel_files: list[str]) -> None:
    """Benchmarks, tests and tools of developers stay in the repository."""
    folders = {name.partition("/")[0] for name in wheel_files}
    assert folders == {"ktransformers", f"ktransformers_engine-{__version__}.dist-info"}
    names = {name for name in wheel_files if name.endswith(".py")}
    tracked = subprocess.run(["git", "ls-files", "ktransformers"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert names >= {name for name in tracked.stdout.split() if name.endswith(".py") and (ROOT / name).exists()}
    assert "ktransformers/bench/offline/measure.py" in names


@pytest.mark.parametrize("words", ["from benchmarks", "import benchmarks"])
def test_the_package_imports_no_benchmark(words: str) -> None:
    """Lint says so too (importlinter), but not of imports within strings or of code that no module imports."""
    using = [path for path in (ROOT / "ktransformers").rglob("*.py") if words in path.read_text(encoding="utf-8")]
    assert using == []


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

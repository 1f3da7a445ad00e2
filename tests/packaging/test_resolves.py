"""What `pip install` would choose on the public index, for every Python that is offered. Nothing is installed.

uv resolves from metadata alone, so no wheel is downloaded. pip's configuration, links to local wheels and other indexes
are switched off: what a stranger's machine has. `--only-binary` makes a package without a wheel an error.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

uv = pytest.importorskip("uv", reason="resolving without downloads is uv's; pip install uv")

ROOT = Path(__file__).resolve().parents[2]
INDEX = "https://pypi.org/simple"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OFFERED = tuple(
    f"3.{minor}" for minor in range(30) if SpecifierSet(PROJECT["requires-python"]).contains(f"3.{minor}.0")
)


pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # the index answers within a minute


@pytest.fixture(scope="module", autouse=True)
def _index_is_reachable() -> None:
    request = urllib.request.Request(f"{INDEX}/gguf/", method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=15).close()
    except (urllib.error.URLError, TimeoutError) as error:
        pytest.skip(f"{INDEX} is not reachable: {error}")


def resolve(python: str, *arguments: str) -> tuple[dict[str, str], str]:
    """Versions by package that an install takes on `python`, and what uv said; none where there is no solution."""
    environment = {name: value for name, value in os.environ.items() if not re.match(r"PIP_|UV_(?!CACHE_DIR)", name)}
    command = [uv.find_uv_bin(), "pip", "compile", "--no-config", "--system-certs", "--index-url", INDEX]
    command += ["--only-binary", ":all:", "--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    command += ["--no-header", "--no-annotate", "--quiet", "pyproject.toml", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and "No solution found" not in done.stderr:
        pytest.skip(f"the index did not answer: {done.stderr[-300:]}")
    return dict(line.split("==") for line in done.stdout.split() if "==" in line), done.stderr


PINS = ("--constraints", ".ci/constraints.txt")
QUESTIONS = [
    *((python, "--extra", "dev") for python in OFFERED),
    *((python, "--extra", "dev", *PINS) for python in (OFFERED[0], OFFERED[-1])),
    (OFFERED[-1], "--extra", "flashinfer"),
]
Answers = dict[tuple[str, ...], Future[tuple[dict[str, str], str]]]


@pytest.fixture(scope="module")
def answers(_index_is_reachable: None) -> Answers:
    """All questions at once: each waits for the index, not for this machine."""
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        return {question: threads.submit(resolve, *question) for question in QUESTIONS}


def test_the_pythons_that_are_offered() -> None:
    assert OFFERED == ("3.11", "3.12", "3.13", "3.14")


@pytest.mark.parametrize("python", OFFERED)
def test_users_get_a_set_that_fits(python: str, answers: Answers) -> None:
    versions, said = answers[python, "--extra", "dev"].result()
    assert not said
    assert Version(versions["torch"]) >= Version("2.11")
    for requirement in PROJECT["dependencies"]:
        assert re.split(r"[<>=!~]", requirement)[0].lower().replace("_", "-") in versions


@pytest.mark.parametrize("python", [OFFERED[0], OFFERED[-1]])
def test_what_ci_pins_can_be_had_by_everyone(python: str, answers: Answers) -> None:
    versions, said = answers[python, "--extra", "dev", *PINS].result()
    assert not said
    for line in (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            assert versions[name] == version


def test_flashinfer_fits_beside_it(answers: Answers) -> None:
    versions, said = answers[OFFERED[-1], "--extra", "flashinfer"].result()
    assert not said
    assert "flashinfer-python" in versions


def test_a_pair_that_excludes_each_other_is_found(tmp_path: Path) -> None:
    """The pins that made every install fail once: this file's other tests can fail."""
    pins = tmp_path / "constraints.txt"
    pins.write_text("torch==2.13.0\ntriton==3.9.0\n")
    versions, said = resolve(OFFERED[0], "--constraints", str(pins))
    assert not versions
    assert "triton" in said

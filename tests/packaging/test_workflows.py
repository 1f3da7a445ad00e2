"""The nightly workflow tests the newest versions, on a clean checkout and without a pin."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
NIGHTLY = ROOT / ".github" / "workflows" / "nightly.yml"


@pytest.fixture(scope="module")
def nightly() -> dict[Any, Any]:
    return yaml.safe_load(NIGHTLY.read_text(encoding="utf-8"))


def commands(workflow: dict[Any, Any]) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def test_it_runs_every_night_and_changes_nothing(nightly: dict[Any, Any]) -> None:
    (when,) = nightly[True]["schedule"]  # YAML 1.1 reads `on` as true
    assert re.fullmatch(r"\d+ \d+ \* \* \*", when["cron"])
    assert nightly["permissions"] == {"contents": "read"}


def test_it_tests_the_newest_versions(nightly: dict[Any, Any]) -> None:
    """As `make` would run it: pins in no command, and the tests of everything."""
    (command,) = [one for one in commands(nightly) if one.startswith("make ")]
    words = shlex.split(command)
    assert words[:4] == ["make", "lint", "test", "CONSTRAINTS="]
    asked = subprocess.run(
        ["make", "-n", "VENV=/no/such/folder", *words[1:4]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "tools/install.sh /no/such/folder dev" in asked.stdout
    assert "-m pytest" in asked.stdout
    assert "bin/ruff check" in asked.stdout
    environment = [nightly.get("env") or {}, *(job.get("env") or {} for job in nightly["jobs"].values())]
    assert not any("CONSTRAINTS" in names for names in environment)


def test_it_has_pythons_that_are_offered(nightly: dict[Any, Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    offered = SpecifierSet(project["requires-python"])
    for job in nightly["jobs"].values():
        for python in job["strategy"]["matrix"]["python"]:
            assert offered.contains(f"{python}.0")

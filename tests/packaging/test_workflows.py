"""Workflows: what they run exists and is what everybody runs, with no more rights than each needs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github" / "workflows"
Workflow = dict[Any, Any]


def workflow(name: str) -> Workflow:
    return yaml.safe_load((FOLDER / f"{name}.yml").read_text(encoding="utf-8"))


WORKFLOWS = {path.stem: workflow(path.stem) for path in sorted(FOLDER.glob("*.yml"))}
NAMES = sorted(WORKFLOWS)


def steps(name: str) -> Iterator[dict[str, Any]]:
    for job in WORKFLOWS[name]["jobs"].values():
        yield from job["steps"]


def commands(name: str) -> list[str]:
    return [step["run"] for step in steps(name) if "run" in step]


def dry_run(*words: str) -> str:
    """What make would run."""
    asked = ["make", "-n", "VENV=/no/such/folder", *words]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_there_is_one_for_each_occasion() -> None:
    assert NAMES == ["ci", "nightly", "release"]


@pytest.mark.parametrize("name", NAMES)
def test_it_follows_the_schema(name: str) -> None:
    schema = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "github-workflows.json"
    document = {
        key if key is not True else "on": value for key, value in WORKFLOWS[name].items()
    }  # YAML 1.1: on is true
    errors = Draft7Validator(json.loads(schema.read_text())).iter_errors(document)
    assert [f"{error.json_path}: {error.message}" for error in errors] == []


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_pinned_by_their_major_version(name: str) -> None:
    used = [step["uses"] for step in steps(name) if "uses" in step]
    assert used
    assert [one for one in used if not re.fullmatch(r"[\w-]+/[\w-]+@(?:v\d+|release/v\d+)", one)] == []


@pytest.mark.parametrize("name", NAMES)
def test_one_action_has_one_version_everywhere(name: str) -> None:
    versions = dict(step["uses"].split("@") for other in NAMES for step in steps(other) if "uses" in step)
    assert {one for one in (step.get("uses") for step in steps(name)) if one} <= {
        f"{action}@{version}" for action, version in versions.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_rights_are_the_least(name: str) -> None:
    """Reading, but for a job that publishes, and then one right to write; a checkout keeps no credentials."""
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    for job in WORKFLOWS[name]["jobs"].values():
        rights = job.get("permissions", {})
        assert [right for right, level in rights.items() if level == "write"] == list(rights)[-1:]
        assert name == "release" or not rights
        assert job["timeout-minutes"] <= 240
    checkouts = [step for step in steps(name) if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_others_reach_no_shell(name: str) -> None:
    """A tag or a title in `run` would be code: they come as variables."""
    allowed = "matrix."
    for command in commands(name):
        assert all(one.strip().startswith(allowed) for one in re.findall(r"\$\{\{(.*?)\}\}", command)), command


@pytest.mark.parametrize("name", NAMES)
def test_commands_exist(name: str) -> None:
    """Targets of make, scripts of this repository, files of docker."""
    for command in commands(name):
        first, *words = shlex.split(command)
        if first == "make":
            assert dry_run(*(word for word in words if "=" not in word))
        elif first in ("python3", ".ci/run"):
            assert (ROOT / ([first, *words][first == "python3"])).is_file()
        else:
            assert first in {".venv/bin/python", "pipx", "gh"}, command
    for kind in (job.get("strategy", {}).get("matrix", {}).get("kind", []) for job in WORKFLOWS[name]["jobs"].values()):
        assert all((ROOT / "docker" / f"Dockerfile.{one}").is_file() for one in kind)


def test_ci_is_what_everybody_runs_for_a_push_and_a_request() -> None:
    assert commands("ci") == [".ci/run"]
    assert WORKFLOWS["ci"][True] == {"push": {"branches": ["main"]}, "pull_request": None}  # YAML 1.1: on is true
    environment = [WORKFLOWS["ci"].get("env"), *(job.get("env") for job in WORKFLOWS["ci"]["jobs"].values())]
    assert environment == [None, None]


def test_nights_run_what_is_too_long_for_a_push() -> None:
    (when,) = WORKFLOWS["nightly"][True]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \*", when["cron"])
    assert {"make test-all", "make sanitize"} <= set(commands("nightly"))
    assert "--exhaustive" in dry_run("test-all")
    assert {"address", "thread"} <= set(dry_run("sanitize").split())


def test_nights_test_the_newest_versions() -> None:
    """As `make` would run it: pins in no command, and the tests of everything."""
    (command,) = [one for one in commands("nightly") if "CONSTRAINTS=" in one]
    words = shlex.split(command)
    assert words[:4] == ["make", "lint", "test", "CONSTRAINTS="]
    said = dry_run(*words[1:4])
    assert "tools/install.sh /no/such/folder dev" in said
    assert "-m pytest" in said
    assert "bin/ruff check" in said
    nightly = WORKFLOWS["nightly"]
    environment = [nightly.get("env") or {}, *(job.get("env") or {} for job in nightly["jobs"].values())]
    assert not any("CONSTRAINTS" in names for names in environment)


@pytest.mark.parametrize("name", NAMES)
def test_pythons_are_offered(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    offered = SpecifierSet(project["requires-python"])
    for job in WORKFLOWS[name]["jobs"].values():
        for python in job.get("strategy", {}).get("matrix", {}).get("python", []):
            assert offered.contains(f"{python}.0")
    for step in steps(name):
        python = step.get("with", {}).get("python-version", "")
        assert "matrix" in python or not python or offered.contains(f"{python}.0")


def test_a_release_publishes_only_what_was_built_and_tested() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    before: dict[str, set[str]] = {}
    for name, job in jobs.items():  # in the order of the file, so that nothing waits for what comes later
        needs = job.get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        before[name] = direct.union(*(before[one] for one in direct))
    assert before["wheels"] == {"version"}
    assert before["index"] >= {"version", "wheels", "images"}
    assert before["release"] >= {"index"}
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}

"""The small tools that workflows and make call: notes of a release, coverage by package."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ktransformers

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_changelog_has_a_dated_section_of_this_version() -> None:
    notes = tool("release_notes").notes_of(f"v{ktransformers.__version__}")
    assert set(re.findall(r"(?m)^### (.+)$", notes)) <= {
        "Added",
        "Changed",
        "Deprecated",
        "Removed",
        "Fixed",
        "Security",
    }
    assert "### Added" in notes


def test_the_changelog_keeps_its_form() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    headings = [line for line in lines if line.startswith("## ")]
    assert headings[0] == "## [Unreleased]"
    assert all(re.fullmatch(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", heading) for heading in headings[1:])
    dates = [heading[-10:] for heading in headings[1:]]
    assert dates == sorted(dates, reverse=True)
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("tag", ["0.2.0", "v9.9.9", "v", ""])
def test_a_tag_that_is_not_the_version_is_refused(tag: str) -> None:
    ran = subprocess.run(
        [sys.executable, "tools/release_notes.py", tag], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert (
        ran.stderr == f"error: the tag is {tag}, and ktransformers/__init__.py says {ktransformers.__version__}: "
        f"call the tag v{ktransformers.__version__}\n"
    )


@pytest.mark.parametrize(
    ("changelog", "message"),
    [
        ("# C\n\n## [Unreleased]\n\n- a\n", "needs one heading"),
        ("## [1.2.3] - 2026-01-01\n\n## [1.2.2] - 2025-01-01\n\n- a\n", "says nothing of 1.2.3"),
        ("## [1.2.3] - 2026-01-01\n- a\n## [1.2.3] - 2026-01-02\n- b\n", "and has 2"),
    ],
)
def test_a_version_without_notes_is_refused(changelog: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tool("release_notes").section(changelog, "1.2.3")


def test_the_notes_end_where_the_next_version_begins() -> None:
    changelog = "# C\n\n## [Unreleased]\n\n## [1.2.3] - 2026-01-01\n\n- a\n\n## [1.2.2] - 2025-01-01\n\n- b\n"
    assert tool("release_notes").section(changelog, "1.2.3") == "- a"


def test_coverage_is_summed_by_package_the_thinnest_first() -> None:
    def file(ran: int, lines: int) -> dict[str, dict[str, int]]:
        return {"summary": {"covered_lines": ran, "num_statements": lines}}

    files = {
        "ktransformers/a/one.py": file(3, 4),
        "ktransformers/a/two.py": file(3, 4),
        "ktransformers/a/b/three.py": file(0, 1_000),
        "ktransformers/a/b/__init__.py": file(0, 0),
        "ktransformers/c/__init__.py": file(0, 0),
    }
    coverage = tool("coverage_by_package")
    packages = coverage.by_package({"files": files})
    assert packages == {"ktransformers.a": (6, 8), "ktransformers.a.b": (0, 1_000)}
    assert [line.split() for line in coverage.table(packages).splitlines()] == [
        ["package", "lines", "ran"],
        ["ktransformers.a.b", "1,000", "0%"],
        ["ktransformers.a", "8", "75%"],
        ["all", "1,008", "1%"],
    ]
    with pytest.raises(ValueError, match="no file of the package"):
        coverage.table({})


def test_make_coverage_runs_the_tests_of_make_test() -> None:
    """Its status is that of the tests, its table is printed in any case."""
    # `make test` hands its own flags and the number of its level to every make below it.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}

    def said(target: str) -> str:
        asked = ["make", "-n", "--no-print-directory", "VENV=/no/such/folder", target]
        return subprocess.run(asked, cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout

    (tests,) = re.findall(r"(?m)^.*-m pytest.*(?:\\\n.*)*", said("test"))
    ran = said("coverage")
    assert " ".join(tests.split()) in " ".join(ran.split())
    assert "--cov-report=json" in ran
    assert ran.rstrip().endswith("exit $status")

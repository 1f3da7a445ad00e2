"""The JSON Schema Test Suite, out of the source distribution of jsonschema, fetched once into pytest's cache."""

from __future__ import annotations

import fcntl
import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.client_environments import environment, is_unreachable

__all__ = ["Case", "suite"]

PINS = Path(__file__).resolve().parents[2] / "clients" / "schema_suite.txt"
SOURCE = "jsonschema==4.26.0 --hash=sha256:0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326\n"
FETCH_SECONDS = 120.0


@dataclass(frozen=True)
class Case:
    """A schema of the suite, and instances with whether they are valid."""

    name: str
    schema: Any
    instances: tuple[tuple[Any, bool], ...]


def suite(cache: Path, draft: str = "draft2020-12") -> list[Case]:
    """What every implementation of `draft` has to do. Skips the test where the registry is not reachable."""
    with tarfile.open(_archive(cache)) as archive:
        cases = []
        for member in archive.getmembers():
            path = Path(member.name)
            if path.parts[1:-1] != ("json", "tests", draft) or path.suffix != ".json":
                continue
            content = archive.extractfile(member)
            assert content is not None
            cases += [
                Case(
                    f"{path.stem}: {group['description']}",
                    group["schema"],
                    tuple((test["data"], test["valid"]) for test in group["tests"]),
                )
                for group in json.load(content)
            ]
    return cases


def _archive(cache: Path) -> Path:
    """By pip, the one client that hands out source distributions; building nothing but their metadata."""
    interpreter = environment(PINS, cache)
    with (cache / "fetching").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(cache.glob("*.tar.gz")):
            wanted = cache / "wanted.txt"
            wanted.write_text(SOURCE, encoding="utf-8")
            command = [
                str(interpreter),
                "-m",
                "pip",
                "download",
                "--require-hashes",
                "--no-deps",
                "--no-binary",
                ":all:",
            ]
            command += ["--no-build-isolation", "--dest", str(cache), "--requirement", str(wanted)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
            if is_unreachable(done):
                pytest.skip(f"the package registry is not reachable: {done.stderr[-300:]}")
            assert done.returncode == 0, done.stderr
    (archive,) = cache.glob("*.tar.gz")
    return archive

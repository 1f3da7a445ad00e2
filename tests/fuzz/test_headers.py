"""Mutated headers, 10,000 of each format by `make test-all`: no crash, no hang, no allocation that no file explains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

SCRIPT = "tests.support.fuzz.headers"


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_mutated_headers_parse_or_are_refused(kind: str, random_cases: Callable[[int, int], int]) -> None:
    count = random_cases(1500, 5000)
    # The child gets this process's import path, so that it tests the same package, installed or not.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", SCRIPT, kind, str(count), "1"],
        capture_output=True,
        text=True,
        timeout=3600,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    counts = json.loads(result.stdout)
    assert counts["parsed"] + counts["refused"] == count
    # Both ways must be well travelled, or the mutations test nothing.
    assert counts["refused"] > count // 4
    assert counts["parsed"] > count // 50

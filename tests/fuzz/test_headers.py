"""10,000 mutated headers of each format: no crash, no hang, no allocation beyond what the file's size explains."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = "tests.support.fuzz.headers"
COUNT = 10_000


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_mutated_headers_parse_or_are_refused(kind: str) -> None:
    # The child gets this process's import path, so that it tests the same package, installed or not.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", SCRIPT, kind, str(COUNT), "1"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    counts = json.loads(result.stdout)
    assert counts["parsed"] + counts["refused"] == COUNT
    # Both ways must be well travelled, or the mutations test nothing.
    assert counts["refused"] > COUNT // 4
    assert counts["parsed"] > COUNT // 50

"""Mutated models are planned or refused: no traceback, no hang, no allocation that a number in a file asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

SCRIPT = "tests.support.fuzz.models"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "few", "many"), [("gguf", 150, 5000), ("folder", 75, 1000)])
def test_mutated_models_are_planned_or_refused(
    kind: str, few: int, many: int, random_cases: Callable[[int, int], int]
) -> None:
    count = random_cases(few, many)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-m", SCRIPT, kind, str(count), "1"],
        capture_output=True,
        text=True,
        timeout=3600,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    counts = json.loads(result.stdout.splitlines()[-1])  # transformers prints about what it does not know
    assert counts["failed"] == []
    assert counts["planned"] > count // 20
    assert counts["refused"] > count // 4

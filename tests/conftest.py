"""Triton interprets its kernels where there is no GPU: decided when a kernel is defined, so set before any import."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _cpu_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of the tests are on the CPU on every machine, unless a test hands them other hardware."""
    monkeypatch.setattr("ktransformers.optimize.machine.cuda_memory", dict)

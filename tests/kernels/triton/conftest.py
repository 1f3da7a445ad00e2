"""The device of the Triton tests: a GPU when there is one, else the CPU through Triton's interpreter.

The variable must be set before Triton is imported anywhere, which is why it is set at import.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

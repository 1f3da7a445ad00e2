"""The one place that imports Triton.

Knows whether Triton is installed; the modules beside it take `triton`, `tl` and `jit` from here, so that they import
without it. Does not know any kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["available", "constant", "jit", "tl", "triton"]

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the function itself where Triton is missing (it cannot be launched then)."""
    return function if triton is None else triton.jit(function)


def constant(value: int) -> Any:
    """A global that kernels may read: they take no other than a constexpr."""
    return value if tl is None else tl.constexpr(value)


def available() -> str | None:
    """Why no kernel of this package can run here, or None (there is a CUDA device, or Triton's interpreter is on)."""
    if triton is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
        return None
    return "no CUDA device"

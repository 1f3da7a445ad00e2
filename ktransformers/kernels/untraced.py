"""Wraps functions so that no TorchFunctionMode looks into them.

While a mode is active (operators/exact.py has one around a whole step), every look at a tensor, at its type, its shape,
its address, goes through the mode's Python: microseconds each, and a kernel's checks look some forty times. Kernels
have nothing that a mode could want to see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["untraced"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function with torch function modes out of the way while it runs."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call

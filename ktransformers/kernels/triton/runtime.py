"""Whether Triton can be used; the only module that imports it. Knows nothing of kernels.

Kernels take `jit`, `constant` and `tl` from here, so that their modules import where Triton is not installed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    triton = tl = TensorDescriptor = None

__all__ = ["TensorDescriptor", "available", "constant", "is_interpreted", "jit", "num_multiprocessors", "tl", "triton"]

_DEFAULT_MULTIPROCESSORS = 132  # of an H100; for the interpreter, which has none


def available() -> str | None:
    """Why the kernels cannot run here, or None when they can: on a CUDA device, or on the CPU when interpreted."""
    if triton is None:
        return "triton is not installed"
    if is_interpreted() or torch.cuda.is_available():
        return None
    return "there is no CUDA device"


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when Triton was first imported)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def jit(function: Any = None, **options: Any) -> Any:
    """`triton.jit`, or the function itself where Triton is missing."""
    if function is None:
        return functools.partial(jit, **options)
    return function if triton is None else triton.jit(function, **options)


def constant(value: int) -> Any:
    """A global that kernels may read: they take no other than a constexpr."""
    return value if tl is None else tl.constexpr(value)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; those of an H100 for any other device."""
    if device.type != "cuda":
        return _DEFAULT_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

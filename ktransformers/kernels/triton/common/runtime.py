"""Whether Triton can be used; the only module that imports it. Knows nothing of kernels.

Kernels take `jit`, `constant` and `tl` from here, so that their modules import where Triton is not installed.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = [
    "available",
    "constant",
    "is_interpreted",
    "jit",
    "kernels",
    "num_multiprocessors",
    "power_of_two",
    "shared_bytes",
    "static",
    "tl",
    "triton",
]

# Of an H100; for the interpreter, which has none.
_DEFAULT_MULTIPROCESSORS = 132
default_shared_bytes = 227 << 10


def available() -> str | None:
    """Return why the kernels cannot run here, or None when they can: on a CUDA device, or on the CPU when
    interpreted.
    """
    if triton is None:
        return "triton is not installed"
    if is_interpreted() or torch.cuda.is_available():
        return None
    return "there is no CUDA device"


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when Triton was first imported)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Triton kernel and how it is specialized. function: as `triton.jit` made it. constants: names of its constexprs;
    plain, unaligned: of arguments that it is not specialized on, at all or for multiples of 16.
    """

    function: Any
    constants: frozenset[str]
    plain: frozenset[str]
    unaligned: frozenset[str]

    @classmethod
    def of(cls, function: Any, options: dict[str, Any]) -> Kernel:
        parameters = inspect.signature(function.fn).parameters.values()
        plain = frozenset(options.get("do_not_specialize", ()))
        unaligned = plain | frozenset(options.get("do_not_specialize_on_alignment", ()))
        named = frozenset(each.name for each in parameters)
        if not unaligned <= named:
            raise ValueError(f"{function.fn.__name__} has no argument {', '.join(sorted(unaligned - named))}")
        constants = frozenset(each.name for each in parameters if "constexpr" in str(each.annotation))
        return cls(function, constants, plain, unaligned)


#: All that `jit` made.
kernels: list[Kernel] = []


def jit(function: Any = None, **options: Any) -> Any:
    """Return `triton.jit` of a function, or the function itself where Triton is missing."""
    if function is None:
        return functools.partial(jit, **options)
    if triton is None:
        return function
    made = triton.jit(function, **options)
    kernels.append(Kernel.of(made, options))
    return made


def static(function: Any) -> Any:
    """Return `triton.constexpr_function` of a function: what kernels compute from constants while they are compiled
    (jit gives tensors).
    """
    return function if triton is None else triton.constexpr_function(function)


def constant(value: int) -> Any:
    """Make a global that kernels may read: they take no other than a constexpr."""
    return value if tl is None else tl.constexpr(value)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device; that of an H100 for any other device."""
    if device.type != "cuda":
        return _DEFAULT_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that one program can have on a CUDA device; those of an H100 for any other
    device.

    99 KiB on the GPUs of workstations (compute capability 8.6, 8.9, 12.0), 163 to 227 KiB on those of data centers.
    """
    if device.type != "cuda":
        return default_shared_bytes
    return _shared_bytes(device)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)  # builds for the CPU do not declare all of them
    return int(properties.shared_memory_per_block_optin)


def power_of_two(value: int) -> int:
    """Return the least power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()

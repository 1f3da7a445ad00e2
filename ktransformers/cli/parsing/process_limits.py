"""Limits of the operating system on this process, checked before the large imports, which die of too little."""

from __future__ import annotations

import resource

from ktransformers.core import format_bytes
from ktransformers.errors import CapacityError

__all__ = ["check_process_limits"]

MIN_FILES = 256
MIN_ADDRESS_SPACE = 4 << 30
"""Code of the libraries, and stacks of threads that are reserved and not used; a model comes on top of it."""


def check_process_limits() -> None:
    """Raise CapacityError when the limits on open files or on the address space let no server start."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files != resource.RLIM_INFINITY and num_files < MIN_FILES:
        raise CapacityError(f"this process may open {num_files} files; a server needs {MIN_FILES}: raise `ulimit -n`")
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and space < MIN_ADDRESS_SPACE:
        raise CapacityError(
            f"this process may have {format_bytes(space)} of address space (not memory); a server needs "
            f"{format_bytes(MIN_ADDRESS_SPACE)} and the size of the model: raise `ulimit -v`"
        )

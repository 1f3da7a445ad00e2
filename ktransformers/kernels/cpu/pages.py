"""Pages of mapped files: read ahead of their use, given back after it. Knows addresses, not what lies there.

Everything here is a hint to the system, and nothing where it has no such hint (others than Linux).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from ktransformers.kernels.extension import extension

__all__ = [
    "PAGE",
    "advise_huge_pages",
    "few_bytes",
    "is_cache_dropped",
    "is_mapped",
    "note_mapping",
    "page_out",
    "read_ahead",
    "trim_heap",
    "without_cache",
]

logger = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE  # on aarch64 also 16 or 64 KiB
_HUGE_PAGE = 2 << 20
_MADV_NORMAL, _MADV_RANDOM, _MADV_DONTNEED, _MADV_HUGEPAGE = 0, 1, 4, 14

_drops_cache: ContextVar[bool] = ContextVar("drops_cache", default=False)

_mappings: dict[int, int] = {}
"""Address and bytes of every file that is mapped."""


def note_mapping(data: Tensor, owner: object, fd: int) -> None:
    """Register the storage of `data` as the open file `fd` mapped read-only, for as long as `owner` lives.

    What is packed or copied is read from the file then, not through the map. Raises OSError when the system has no
    descriptor left, of which the file keeps one.
    """
    start = data.untyped_storage().data_ptr()
    try:
        extension.note_file(start, data.untyped_storage().nbytes(), fd)
    except RuntimeError as error:
        raise OSError(str(error)) from error
    _mappings[start] = data.untyped_storage().nbytes()
    weakref.finalize(owner, _forget, start)


def _forget(start: int) -> None:
    _mappings.pop(start, None)
    extension.forget_file(start)


def is_mapped(data: Tensor) -> bool:
    """Whether `data` is a view of a mapped file."""
    # A view keeps its storage alive, so an entry that fits is no left-over; and heap memory never begins on a page.
    storage = data.untyped_storage()
    return _mappings.get(storage.data_ptr()) == storage.nbytes()


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


def _advise(first: int, end: int, advice: int) -> None:
    """A refusal is no error, for the advice is only a wish."""
    if first < end and _madvise()(first, end - first, advice):
        logger.debug("madvise(%d) refused for %d bytes: errno %d", advice, end - first, ctypes.get_errno())


def advise_huge_pages(data: Tensor) -> None:
    """Ask the system for huge pages under a new tensor, where it covers whole ones."""
    start = data.data_ptr()
    _advise(-(-start // _HUGE_PAGE) * _HUGE_PAGE, (start + data.numel()) // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)


@contextmanager
def without_cache(is_dropped: bool = True) -> Iterator[None]:
    """Context in which what this thread pages out leaves the system's cache too, if is_dropped.

    For weights that RAM cannot hold beside their file: short of memory, the system would rather let go of parts of the
    file that are still to be read, for what was read twice looks as if it were needed again.
    """
    before = _drops_cache.set(is_dropped)
    try:
        yield
    finally:
        _drops_cache.reset(before)


def is_cache_dropped() -> bool:
    """Whether this thread is inside `without_cache`, and what it pages out leaves the system's cache."""
    return _drops_cache.get()


def page_out(parts: Iterable[Tensor]) -> None:
    """Take the pages under views of mapped files out of this process's memory, because they are not needed any more.

    They stay readable, and in the system's cache of the file as long as it has room, so that the next start finds them
    there; see `without_cache`. Tensors that are in no file are left alone.
    """
    ranges = sorted(
        (part.data_ptr() // PAGE * PAGE, -(-(part.data_ptr() + part.nbytes) // PAGE) * PAGE)
        for part in parts
        if part.numel() and is_mapped(part)
    )
    while ranges:  # one call for all that are neighbours, as experts are
        first, end = ranges.pop(0)
        while ranges and ranges[0][0] <= end:
            end = max(end, ranges.pop(0)[1])
        _advise(first, end, _MADV_DONTNEED)
        if is_cache_dropped() and end - first > 2 * PAGE:  # small neighbours in the first and last page are needed yet
            extension.drop_cached(first + PAGE, end - first - 2 * PAGE)


def read_ahead(part: Tensor) -> None:
    """Ask the system to read the pages under a view of a mapped file, without waiting for them."""
    if part.numel() and is_mapped(part):
        extension.read_ahead(part.data_ptr(), part.nbytes)


def few_bytes(part: Tensor) -> bytes:
    """Return the bytes under a small view of a mapped file, for which its pages alone are read.

    Elsewhere a page that is not there has the system read what lies around it, too: megabytes on some disks.
    """
    is_alone = is_mapped(part)
    first, end = part.data_ptr() // PAGE * PAGE, -(-(part.data_ptr() + part.nbytes) // PAGE) * PAGE
    if is_alone:
        _advise(first, end, _MADV_RANDOM)
    try:
        return bytes(part.numpy().tobytes())
    finally:
        if is_alone:
            _advise(first, end, _MADV_NORMAL)


def trim_heap() -> None:
    """Return freed memory that the C library holds to the system."""
    extension.trim_heap()

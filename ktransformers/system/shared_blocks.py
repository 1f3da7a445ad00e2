"""Blocks of bytes that a process hands to others of its machine through memory: one writes, up to 16 read.

    control   a line of 64 bytes for each reader    its semaphore; the number of blocks that it is through with
              a line for each slot                  four numbers of its block
    slot 0    bytes of blocks 0, 2, 4, ...          from the next page on
    slot 1    bytes of blocks 1, 3, 5, ...

    writer, block n                                 reader r
      begin: waits until all readers are
        through with block n - 2      <───────────    wait: says that it is through with blocks before n,
      writes slot n % 2, and its numbers              polls its semaphore for a while, then sleeps in it
      publish: posts every semaphore  ───────────>    reads slot n % 2, and its numbers

A semaphore counts blocks that its reader has not taken: none is lost or read twice, and what was written before a post
is seen behind the wait. What a reader says is one store of 8 bytes, which the writer may see late, and then waits
longer. So a writer is two blocks ahead at most.

The memory has no name in any file system: readers open it through the writer's descriptor in /proc, and it is gone with
the last process that has it. Linux only. Ends of processes are noticed elsewhere (process_group.py, child.py); a writer
that waits asks whether there were any.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable, Sequence

from ktransformers.errors import EngineError, reason_of

__all__ = ["NUM_SLOTS", "SharedBlocks"]

NUM_SLOTS = 2

_MOST_READERS = 16
_NUMBERS = 4
_LINE = 64
"""Bytes that a processor has to itself: sem_t takes 32 of them."""
_WORDS = _LINE // 8
_THROUGH_AT = 4
"""Word of a reader's line behind its semaphore."""
_CONTROL = mmap.ALLOCATIONGRANULARITY
_SPIN_SECONDS = 0.002
"""To be woken takes longer than to see that a block is there. Between two steps of a model hardly more passes."""
_BEHIND_SECONDS = 0.0001
"""Between two looks at readers that are behind."""


class SharedBlocks:
    """Memory for two blocks. `create` makes the writer's, `open` a reader's; both reserve as many bytes."""

    def __init__(self, file: int, reader: int | None, num_readers: int) -> None:
        self._file, self._reader = file, reader
        self._control = mmap.mmap(file, _CONTROL)
        self._count = 0  # blocks that were written, or read
        self._data: mmap.mmap | None = None
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._control))
        self._semaphores = [ctypes.c_void_p(address + i * _LINE) for i in range(num_readers)]
        words = memoryview(self._control).cast("q")
        self._through = words[_THROUGH_AT : num_readers * _WORDS : _WORDS]
        slots = words[_MOST_READERS * _WORDS : (_MOST_READERS + NUM_SLOTS) * _WORDS]
        self._numbers = [slots[i * _WORDS : i * _WORDS + _NUMBERS] for i in range(NUM_SLOTS)]
        libc = ctypes.CDLL(None, use_errno=True)
        self._init, self._post, self._try, self._sleep = libc.sem_init, libc.sem_post, libc.sem_trywait, libc.sem_wait

    @classmethod
    def create(cls, num_readers: int) -> SharedBlocks:
        """Make the memory, empty. Raises EngineError where the system has none of this kind, or not for so many."""
        if num_readers > _MOST_READERS:
            raise EngineError(f"{num_readers} processes would read memory that {_MOST_READERS} may share")
        try:
            file = os.memfd_create("kt-steps")
            os.ftruncate(file, _CONTROL)
            made = cls(file, None, num_readers)
        except (AttributeError, OSError) as error:
            why = reason_of(error) if isinstance(error, OSError) else "this is not Linux"
            raise EngineError(f"no memory can be shared with other processes: {why}") from error
        for semaphore in made._semaphores:
            if made._init(semaphore, 1, 0):
                raise EngineError(f"no semaphore can be shared with other processes: {os.strerror(ctypes.get_errno())}")
        return made

    @classmethod
    def open(cls, path: str, reader: int) -> SharedBlocks:
        """Open the memory at another process's `path` as its reader of this number. Raises EngineError."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise EngineError(f"the memory of steps cannot be opened at {path}: {reason_of(error)}") from error
        return cls(file, reader, reader + 1)

    @property
    def path(self) -> str:
        """Where other processes of this user open the memory, as long as it is not closed here."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def reserve(self, nbytes: int) -> list[memoryview]:
        """Return the slots, of nbytes and whole pages each. To be called once in each process, with the same number."""
        assert self._data is None, "the memory has its size"
        stride = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        whole = _CONTROL + NUM_SLOTS * stride
        if os.fstat(self._file).st_size < whole:
            os.ftruncate(self._file, whole)
        self._data = mmap.mmap(self._file, NUM_SLOTS * stride, offset=_CONTROL)
        return [memoryview(self._data)[i * stride : (i + 1) * stride] for i in range(NUM_SLOTS)]

    def begin(self, check: Callable[[], None] = lambda: None) -> int:
        """Wait until the next block can be written, and return its slot. check: called while readers are behind; raises
        when one is gone."""
        while min(self._through) < self._count - 1:
            check()
            time.sleep(_BEHIND_SECONDS)
        return self._count % NUM_SLOTS

    def publish(self, numbers: Sequence[int]) -> None:
        """Let all readers have the block that was begun, with four numbers of 64 bits."""
        for i, number in enumerate(numbers):
            self._numbers[self._count % NUM_SLOTS][i] = number
        self._count += 1
        for semaphore in self._semaphores:
            self._post(semaphore)

    def wait(self) -> tuple[int, tuple[int, ...]]:
        """Wait for the next block: its slot and its numbers. What was in the block before may be overwritten."""
        assert self._reader is not None, "the writer knows its blocks"
        self._through[self._reader] = self._count
        semaphore = self._semaphores[self._reader]
        until = time.monotonic() + _SPIN_SECONDS
        while self._try(semaphore):
            if time.monotonic() > until:
                while self._sleep(semaphore):
                    if ctypes.get_errno() != errno.EINTR:  # else a signal came
                        raise EngineError(f"a block cannot be waited for: {os.strerror(ctypes.get_errno())}")
                break
        slot = self._count % NUM_SLOTS
        self._count += 1
        return slot, tuple(self._numbers[slot])

    def close(self) -> None:
        """Let nobody open the memory any more. It is there as long as a process uses a part of it."""
        os.close(self._file)

"""Blocks in memory that processes share: in order, each once, with what was written before them."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from ktransformers.errors import EngineError
from ktransformers.system.shared_blocks import NUM_SLOTS, SharedBlocks

READER = """
import sys
sys.path[:] = sys.argv[3:]
from ktransformers.system.shared_blocks import SharedBlocks
blocks = SharedBlocks.open(sys.argv[1], int(sys.argv[2]))
slots = blocks.reserve(100)
while True:
    slot, numbers = blocks.wait()
    print(slot, *numbers, slots[slot][:4].tobytes().decode(), flush=True)
"""


def test_other_processes_read_what_was_written() -> None:
    """Each block once, in order, however far behind a reader is."""
    blocks = SharedBlocks.create(2)
    slots = blocks.reserve(100)
    command = [sys.executable, "-c", READER, blocks.path]
    readers = [subprocess.Popen([*command, str(i), *sys.path], stdout=subprocess.PIPE, text=True) for i in range(2)]
    try:
        for n in range(7):
            slot = blocks.begin()
            assert slot == n % NUM_SLOTS
            slots[slot][:4] = b"%04d" % n
            blocks.publish((n, -1, 1 << 40, 0))
        for reader in readers:
            assert reader.stdout is not None
            for n in range(7):
                assert reader.stdout.readline() == f"{n % 2} {n} -1 {1 << 40} 0 {n:04}\n"
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
    blocks.close()


def test_a_reader_that_sleeps_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.system.shared_blocks._SPIN_SECONDS", 0.0)
    writer = SharedBlocks.create(1)
    reader, found = SharedBlocks.open(writer.path, 0), []
    sleep, sleeps = reader._sleep, threading.Event()

    def counted(semaphore: object) -> int:
        sleeps.set()
        return int(sleep(semaphore))

    reader._sleep = counted
    thread = threading.Thread(target=lambda: found.append(reader.wait()))
    thread.start()
    assert sleeps.wait(60)
    writer.publish((1, 2, 3, 4))
    thread.join(60)
    assert found == [(0, (1, 2, 3, 4))]


def gone() -> None:
    raise EngineError("the reader is gone")


def test_blocks_wait_for_their_reader() -> None:
    """As many as there are slots; a writer that waits for a reader hears of its end."""
    writer = SharedBlocks.create(1)
    reader = SharedBlocks.open(writer.path, 0)
    for n in range(2):
        assert writer.begin() == n
        writer.publish((n, 0, 0, 0))
    with pytest.raises(EngineError, match="the reader is gone"):
        writer.begin(gone)
    assert reader.wait() == (0, (0, 0, 0, 0))
    with pytest.raises(EngineError, match="the reader is gone"):  # it may still read block 0
        writer.begin(gone)
    assert reader.wait() == (1, (1, 0, 0, 0))
    assert writer.begin() == 0


def test_memory_that_is_gone() -> None:
    writer = SharedBlocks.create(1)
    path = writer.path
    writer.close()
    with pytest.raises(EngineError, match="cannot be opened at /proc/"):
        SharedBlocks.open(path, 0)
    with pytest.raises(EngineError, match="17 processes"):
        SharedBlocks.create(17)

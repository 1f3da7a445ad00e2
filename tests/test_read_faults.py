"""The fixture `read_faults`: what a program sees of reads that a test makes fail."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.faults.reads import ReadFaults

Faults = Callable[[Path], ReadFaults]

READER = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
room = mmap.mmap(-1, 4096)
for line in sys.stdin:
    call, at = line.split()
    try:
        if call == "pread":
            answer = str(len(os.pread(file, 4096, int(at))))
        else:
            answer = str(os.preadv(file, [room], int(at)))
    except OSError as error:
        answer = f"errno {error.errno}"
    print(answer, flush=True)
"""


@contextmanager
def reader(faults: ReadFaults, path: Path) -> Iterator[Callable[[str], str]]:
    """Asks a program for reads of `path`: `CALL OFFSET` is answered with the bytes read."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", READER, str(path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=faults.environment()) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        sent, answers = child.stdin, child.stdout

        def ask(question: str) -> str:
            sent.write(question + "\n")
            sent.flush()
            return answers.readline().strip()

        yield ask
        sent.close()


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_reads_fail_when_a_test_says(call: str, read_faults: Faults, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 64)
    faults = read_faults(path)
    with reader(faults, path) as ask:
        assert ask(f"{call} 0") == "4096"
        assert (faults.num_reads, faults.num_faults) == (1, 0)
        faults.fail(after=1, times=2)
        assert [ask(f"{call} 0") for _ in range(4)] == ["4096", f"errno {errno.EIO}", f"errno {errno.EIO}", "4096"]
        faults.shorten(times=1)
        assert [ask(f"{call} 4096") for _ in range(2)] == ["2048", "4096"]
        faults.fail(error=errno.ENOENT)
        assert [ask(f"{call} 0") for _ in range(3)] == [f"errno {errno.ENOENT}"] * 3
        path.unlink()  # its descriptor goes on serving, and failing
        assert ask(f"{call} 0") == f"errno {errno.ENOENT}"
        faults.heal()
        assert ask(f"{call} 0") == "4096"
        assert (faults.num_reads, faults.num_faults) == (12, 7)


def test_other_files_are_left_alone(read_faults: Faults, tmp_path: Path) -> None:
    first, second = tmp_path / "weights", tmp_path / "weights.more"
    for path in (first, second):
        path.write_bytes(bytes(4096))
    faults = read_faults(first)
    faults.fail()
    with reader(faults, second) as ask:
        assert ask("pread 0") == "4096"
    assert faults.num_reads == 0

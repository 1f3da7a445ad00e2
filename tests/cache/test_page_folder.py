"""One quota for a folder that several services share: in one process, in two, killed or alive."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ktransformers.cache.page_folder import PageFolder
from ktransformers.cache.tiers import PAGE

NBYTES = 100


def name_of(number: int) -> bytes:
    return PAGE + number.to_bytes(32, "little")


def write(folder: PageFolder, number: int, nbytes: int = NBYTES, at: int | None = None) -> Path:
    """at: when it was used, seconds."""
    path = folder.file(name_of(number), 0)
    with folder.writing(path, nbytes) as fd:
        os.write(fd, b"x" * nbytes)
    if at is not None:
        os.utime(path, (at, at))
    return path


def taken(path: Path) -> int:
    return sum(each.stat().st_size for each in path.glob("[!.]*"))


def counted(folder: PageFolder) -> int | None:
    with folder._locked() as count:
        return count.value


def test_the_least_recently_used_goes_whoever_wrote_it(tmp_path: Path) -> None:
    first, second = PageFolder(tmp_path, 5 * NBYTES), PageFolder(tmp_path, 5 * NBYTES)
    for number in range(5):
        write((first, second)[number % 2], number, at=10_000 * (5 - number))
    write(first, 5, at=100_000)
    assert [one.name for one in second.found()] == [name_of(number) for number in (3, 2, 1, 0, 5)]
    assert counted(first) == taken(tmp_path) == 5 * NBYTES
    first.close()
    second.close()
    assert [path.name for path in tmp_path.glob(".*")] == [".quota"]


def test_the_largest_quota_of_those_who_live_counts(tmp_path: Path) -> None:
    small, large = PageFolder(tmp_path, 2 * NBYTES), PageFolder(tmp_path, 6 * NBYTES)
    for number in range(6):
        write(large, number, at=10_000 * number)
    for number in (6, 7):
        write(small, number, at=10_000 * number)
    assert taken(tmp_path) == 6 * NBYTES
    assert len(small.found()) == 6  # another's files are nobody's to delete while there is room
    large.close()
    assert [one.name for one in small.found()] == [name_of(6), name_of(7)]
    small.close()


def test_what_has_no_room_at_all_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path, 2 * NBYTES)
    write(folder, 0)
    with pytest.raises(OSError, match="have no room within 200 of --kv_disk_size_GB") as raised:
        write(folder, 1, 3 * NBYTES)
    assert raised.value.errno == errno.EDQUOT
    assert not list(tmp_path.glob("writing-*"))
    assert counted(folder) == taken(tmp_path)


def test_a_file_is_written_again_or_not_at_all(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path, 9 * NBYTES)
    write(folder, 0, NBYTES)
    write(folder, 0, 2 * NBYTES)
    assert counted(folder) == taken(tmp_path) == 2 * NBYTES
    during = list[tuple[int | None, int]]()

    def fail() -> None:
        with folder.writing(folder.file(name_of(1), 0), NBYTES):
            during.append((counted(folder), taken(tmp_path)))
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    assert during == [(3 * NBYTES, 3 * NBYTES)], "it counts before it is there"
    assert counted(folder) == taken(tmp_path) == 2 * NBYTES
    folder.remove(folder.file(name_of(0), 0))
    folder.remove(folder.file(name_of(0), 0))
    assert counted(folder) == taken(tmp_path) == 0


def test_a_limit_of_the_system_leaves_nothing(tmp_path: Path) -> None:
    folder, (soft, hard) = PageFolder(tmp_path, 1 << 30), resource.getrlimit(resource.RLIMIT_FSIZE)
    write(folder, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(folder, 1, 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert counted(folder) == taken(tmp_path) == NBYTES
    assert not list(tmp_path.glob("writing-*"))


@pytest.mark.parametrize("harm", ["truncated", "flipped", "gone"])
def test_a_count_that_is_damaged_is_made_anew(tmp_path: Path, harm: str) -> None:
    folder, count = PageFolder(tmp_path, 9 * NBYTES), tmp_path / ".quota"
    write(folder, 0)
    data = bytearray(count.read_bytes())
    for at in range(len(data)):
        if harm == "truncated":
            count.write_bytes(data[:at])
        elif harm == "flipped":
            count.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        else:
            for path in tmp_path.glob(".*"):
                path.unlink()
        assert counted(folder) == NBYTES
    other = PageFolder(tmp_path, NBYTES)
    for number in range(1, 9):
        write(other, number)
    assert taken(tmp_path) == 9 * NBYTES, "the first one lives, and says so again when its file is gone"


def test_files_that_somebody_deletes_make_room(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path, 3 * NBYTES)
    for number in range(3):
        write(folder, number)
    for path in tmp_path.glob("[!.]*"):
        path.unlink()
    for number in range(3, 6):
        write(folder, number)
    assert sorted(one.name for one in folder.found()) == [name_of(number) for number in range(3, 6)]


def test_random_users(tmp_path: Path) -> None:
    """Never more bytes than the largest quota of the living, or than there were when it left; the count is right."""
    rng, folders, most = random.Random(3), list[PageFolder](), 0
    for _ in range(400):
        kind = rng.randrange(20)
        if not folders or (kind == 0 and len(folders) < 4):
            folders.append(PageFolder(tmp_path, rng.choice((4, 9, 20)) * NBYTES))
            folders[-1].found()
        elif kind == 1 and len(folders) > 1:
            folders.pop(rng.randrange(len(folders))).close()
        elif kind < 5:
            folder = rng.choice(folders)
            folder.remove(folder.file(name_of(rng.randrange(40)), 0))
        else:
            write(rng.choice(folders), rng.randrange(40), rng.choice((NBYTES, NBYTES // 2)))
        most = max([folder.max_bytes for folder in folders])
        assert counted(folders[0]) == taken(tmp_path)
        before = taken(tmp_path) if kind == 1 else 0
        assert taken(tmp_path) <= max(most, before)
        if kind == 1:
            folders[0].found()
            assert taken(tmp_path) <= most
    for folder in folders:
        folder.close()


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from tests.cache.test_page_folder import *
folder = PageFolder(Path({folder!r}), 8 * NBYTES)
for number in range({first}, {first} + {count}):
    write(folder, number)
print("done", flush=True)
sys.stdin.read()
"""


def writer(folder: Path, first: int, count: int) -> subprocess.Popen[bytes]:
    code = WRITER.format(path=[str(Path.cwd())], folder=str(folder), first=first, count=count)
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_two_processes_and_this_one_keep_one_quota(tmp_path: Path) -> None:
    small = PageFolder(tmp_path, 4 * NBYTES)
    with writer(tmp_path, 0, 200) as one, writer(tmp_path, 150, 200) as two:
        for child in (one, two):
            assert child.stdout is not None
            while child.poll() is None and not has_said(child):
                assert taken_while_others_write(tmp_path) <= 8 * NBYTES
            assert child.stdout.readline() == b"done\n"
        assert counted(small) == taken(tmp_path) <= 8 * NBYTES
        for child in (one, two):
            os.kill(child.pid, signal.SIGKILL)
    assert len(list(tmp_path.glob(".user-*"))) == 3
    assert len(small.found()) <= 4, "the dead have no quota"
    assert len(list(tmp_path.glob(".user-*"))) == 1
    small.close()


def has_said(child: subprocess.Popen[bytes]) -> bool:
    import select

    return bool(select.select([child.stdout], [], [], 0)[0])


def taken_while_others_write(path: Path) -> int:
    """Under the lock, as files come and go meanwhile."""
    folder = PageFolder(path, 0)
    with folder._locked():
        found = taken(path)
    folder.close()
    return found

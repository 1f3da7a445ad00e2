"""What the system counts of a process and of all others, and the system's cache of a file. Linux."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Use", "drop_cache"]


def drop_cache(path: Path) -> None:
    """Take a file out of the system's cache; what a program has mapped of it stays."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


@dataclass(frozen=True, slots=True)
class Use:
    """What was used until a moment: bytes that a process has had read from disks, by whatever call or page fault, its
    seconds of CPU time, and those of all processes.

    waits: by thread, the seconds it was ready to run and waited for a core.
    """

    bytes_read: int
    seconds: float
    all_seconds: float
    waits: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, pid: int) -> Use:
        """Count now. Raises OSError when the process is gone."""
        process, ticks = Path(f"/proc/{pid}"), os.sysconf("SC_CLK_TCK")
        io = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
        times = (process / "stat").read_text().rpartition(")")[2].split()
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
        return cls(
            int(io["read_bytes"]),
            (int(times[11]) + int(times[12])) / ticks,
            (user + nice + system + irq + softirq) / ticks,
            dict(_waits(process / "task")),
        )

    def since(self, before: Use) -> Use:
        """What was used between two moments."""
        waits = {thread: now - before.waits.get(thread, 0.0) for thread, now in self.waits.items()}
        read, seconds = self.bytes_read - before.bytes_read, self.seconds - before.seconds
        return Use(read, seconds, self.all_seconds - before.all_seconds, waits)

    def queued(self, seconds: float) -> float:
        """The largest share of that many seconds that one of its threads was ready to run and had no core."""
        return max(self.waits.values(), default=0.0) / seconds

    def others(self, seconds: float) -> float:
        """The share of the machine's CPU time, in that many seconds, that other processes had."""
        return max(self.all_seconds - self.seconds, 0.0) / (seconds * (os.cpu_count() or 1))


def _waits(tasks: Path) -> Iterator[tuple[str, float]]:
    """By thread the second number of its schedstat, nanoseconds there. Threads may end meanwhile."""
    for task in tasks.iterdir():
        try:
            yield task.name, int((task / "schedstat").read_text().split()[1]) / 1e9
        except OSError:
            continue

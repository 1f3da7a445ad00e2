"""Notices an engine that hangs while it loads: alive, and neither reading nor reporting. Knows no engines.

A slow disk is no hang: what the process has read counts, and so do pages that mapped files had to come from a disk for.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

__all__ = ["LoadWatch", "read_so_far"]

_LOOKS = 4


class LoadWatch:
    """Finds, asked every `pause` seconds, that nothing has moved for `seconds`; 0 seconds watch nothing.

    Looks are counted rather than time: a machine or a process group that was stopped for an hour has missed one.
    """

    def __init__(self, seconds: float):
        self.seconds, self.pause = seconds, seconds / _LOOKS
        self._last: Hashable = None
        self._unmoved = 0

    def is_stuck(self, progress: Hashable) -> bool:
        """Whether loading has not moved for `seconds`. progress: whatever is different once something has been done. To
        be called after each pause.
        """
        self._unmoved = self._unmoved + 1 if progress == self._last else 0
        self._last = progress
        return self._unmoved >= _LOOKS


def read_so_far(pid: int, root: Path = Path("/proc")) -> tuple[int, int]:
    """Return (bytes that came from disks, page faults that waited for one) of a process; zeros where the system hides
    them.
    """
    try:
        counts = dict(line.split(": ") for line in (root / str(pid) / "io").read_text().splitlines())
        fields = (root / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return int(counts["read_bytes"]), int(fields[9])
    except (OSError, LookupError, ValueError):
        return 0, 0

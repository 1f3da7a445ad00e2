"""A file as a block device, for what the system decides by device: how far it reads ahead. Linux, as root.

What a page fault of a mapped file reads depends on its disk's read-ahead, which is the whole system's to set: 128 KiB
on most machines, megabytes on some, where a program that maps experts reads many times what it needs. A loop device has
a read-ahead of its own. It passes reads on with O_DIRECT, so the file is in the system's cache once, as the device's.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from ktransformers.errors import UnsupportedError

__all__ = ["LoopDevice", "read_ahead_of"]

_SECTOR = 512


def read_ahead_of(path: Path) -> int | None:
    """Return the KiB that the system reads ahead on the disk a file lies on; None where it does not say."""
    device = path.stat().st_dev
    try:
        return int(Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text())
    except OSError:
        return None


class LoopDevice:
    """Context of a device with the bytes of the file at `source`, read only, that reads read_ahead KiB ahead.

    path: of the device. Raises UnsupportedError where none can be made.
    """

    def __init__(self, source: Path, read_ahead: int):
        if source.stat().st_size % _SECTOR:
            raise UnsupportedError(
                f"{source} does not end with a sector of {_SECTOR} bytes: a device would lack its end"
            )
        command = ["losetup", "--read-only", "--direct-io=on", "--show", "--find", str(source)]
        try:
            made = subprocess.run(command, capture_output=True, text=True, check=True)
            self.path = Path(made.stdout.strip())
        except (OSError, subprocess.CalledProcessError) as error:
            raise UnsupportedError(f"no loop device can be made ({error}); run as root") from error
        block = Path("/sys/block") / self.path.name
        try:
            (block / "queue/read_ahead_kb").write_text(str(read_ahead))
            is_direct = (block / "loop/dio").read_text().strip() == "1"
        except OSError:
            self._detach()
            raise
        if not is_direct:
            self._detach()
            raise UnsupportedError(f"the file system of {source} refuses O_DIRECT: the file would be in memory twice")

    def _detach(self) -> None:
        subprocess.run(["losetup", "--detach", str(self.path)], check=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the device. Nobody may use it any more."""
        self._detach()

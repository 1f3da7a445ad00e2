"""A control group with a limit of memory and no swap, which a program is started in. Linux, as root.

Version 1 (a mounted memory controller) and version 2 are both spoken:
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html, https://docs.kernel.org/admin-guide/cgroup-v2.html. What a
program reads of mapped files counts against the limit, unless another group's programs have brought it into memory.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from ktransformers.errors import UnsupportedError

__all__ = ["ControlGroup"]

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_numbers = itertools.count()


class ControlGroup:
    """Context of a new group that may hold `limit` bytes, files in the system's cache included.

    v1, v2: where the hierarchies are mounted. Raises UnsupportedError where none can be made, with the reason.
    """

    def __init__(self, limit: int, v1: Path = V1, v2: Path = V2):
        self.limit = limit
        self._is_v2 = not (v1 / "memory.limit_in_bytes").is_file()
        top = v2 if self._is_v2 else v1
        self.folder = top / f"ktransformers-{os.getpid()}-{next(_numbers)}"
        try:
            if self._is_v2 and "memory" not in (top / "cgroup.subtree_control").read_text().split():
                (top / "cgroup.subtree_control").write_text("+memory")
            self.folder.mkdir()
        except OSError as error:
            raise UnsupportedError(
                f"no control group with a limit of memory can be made ({error}); run as root"
            ) from error
        try:
            for name, value in self._settings().items():
                (self.folder / name).write_text(value)
        except OSError as error:
            self.folder.rmdir()
            raise UnsupportedError(f"this system's control groups do not limit memory and swap ({error})") from error

    def _settings(self) -> Mapping[str, str]:
        if self._is_v2:
            return {"memory.max": str(self.limit), "memory.swap.max": "0"}
        # The limit of both together may not be below that of memory, so it comes behind.
        return {"memory.limit_in_bytes": str(self.limit), "memory.memsw.limit_in_bytes": str(self.limit)}

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs the command `words` in the group."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *words]

    def peak(self) -> int:
        """Return the most bytes that were held at a time, files in the cache included."""
        return int((self.folder / ("memory.peak" if self._is_v2 else "memory.max_usage_in_bytes")).read_text())

    def anonymous(self) -> int:
        """Return the bytes held now that are no file's."""
        return self._stat("memory.stat", "anon" if self._is_v2 else "total_rss")

    def oom_kills(self) -> int:
        """Return how many processes were killed because the limit was reached."""
        return self._stat("memory.events" if self._is_v2 else "memory.oom_control", "oom_kill")

    def _stat(self, file: str, key: str) -> int:
        lines = (line.split() for line in (self.folder / file).read_text().splitlines())
        return next(int(value) for name, value in lines if name == key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the group. Its processes must have ended."""
        self.folder.rmdir()

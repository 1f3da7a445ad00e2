"""Faults of a disk under another process: positioned reads of one file that fail, or return short, when a test says.

reads.c is compiled once and preloaded; see there what is counted. Reads of mapped memory are no calls, so they go on.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ReadFaults", "compile_reads"]

_FIELDS = ("good", "faulty", "error", "reads", "faults")
_ALWAYS = 1 << 62


def compile_reads(folder: Path) -> Path | None:
    """The library to preload, made in `folder`; None where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    out = folder / "reads.so"
    source = Path(__file__).with_name("reads.c")
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Werror"]
    subprocess.run([compiler, *flags, str(source), "-o", str(out), "-ldl"], check=True)
    return out


class ReadFaults:
    """Reads of the file at `path` in processes that are started with `environment`. shared: a new file for both."""

    def __init__(self, library: Path, path: Path, shared: Path):
        shared.write_bytes(bytes(8 * len(_FIELDS)))
        with shared.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._variables = {
            "LD_PRELOAD": str(library),
            "KT_READ_FAULTS": str(shared),
            "KT_READ_FAULTS_PATH": str(path.resolve()),
        }

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables of the process to start: base (default: this process's) and those that preload the faults."""
        return dict(os.environ if base is None else base) | self._variables

    def fail(self, after: int = 0, times: int = _ALWAYS, error: int = errno.EIO) -> None:
        """From now on `after` reads succeed, then so many fail with `error`, then all succeed."""
        self._set(faulty=0)  # nothing between two settings
        self._set(good=after, error=error)
        self._set(faulty=times)

    def shorten(self, after: int = 0, times: int = _ALWAYS) -> None:
        """Like `fail`, but reads end in the middle, at a sector."""
        self.fail(after, times, error=0)

    def heal(self) -> None:
        """All reads succeed from now on."""
        self._set(faulty=0)

    @property
    def num_reads(self) -> int:
        """Reads of the file so far, faults among them."""
        return self._get("reads")

    @property
    def num_faults(self) -> int:
        return self._get("faults")

    def close(self) -> None:
        self._map.close()

    def _set(self, **values: int) -> None:
        for name, value in values.items():
            struct.pack_into("<q", self._map, 8 * _FIELDS.index(name), value)

    def _get(self, name: str) -> int:
        (value,) = struct.unpack_from("<q", self._map, 8 * _FIELDS.index(name))
        return int(value)

"""What every child process does first: leave signals to its parent, follow it into death, read its options.

The parent writes the options to the child's standard input, at once or when a spare is needed, and keeps the pipe
open. End of file there, at any time, means that the parent is gone: the child leaves at once, whatever it is doing.
PR_SET_PDEATHSIG is a second belt for the moments in which nobody reads the pipe.

Signals to the whole process group (systemd's SIGTERM, Ctrl-C) mean the parent: it drains, and needs its children for
that. It starts them with these signals blocked, so that there is no moment in which they could be hit.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import threading
from typing import Any, BinaryIO

from ktransformers.server.balance.messages import decode

__all__ = ["PARENTS_SIGNALS", "become", "follow_parent", "framed", "read_options"]

PARENTS_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_HEADER = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    """The options as `read_options` wants them on standard input."""
    return _HEADER.pack(len(data)) + data


def become(name: str) -> None:
    """The process's name in `ps -o comm` and `top`: at most 15 characters, where the system has such names."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def follow_parent() -> None:
    """Leave signals to the parent and die with it. Comes before anything slow."""
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(pipe: BinaryIO) -> None:
    while pipe.read(1):
        pass
    os._exit(1)


def read_options(kind: Any) -> Any:
    """Wait for the options, of type `kind`, whose parent_pid is checked. Watches the pipe from then on."""
    pipe = sys.stdin.buffer
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        os._exit(1)
    options = decode(pipe.read(_HEADER.unpack(header)[0]), kind)
    if os.getppid() != options.parent_pid:  # it died before prctl could help
        os._exit(1)
    threading.Thread(target=_watch, args=(pipe,), daemon=True, name="follow-parent").start()
    return options

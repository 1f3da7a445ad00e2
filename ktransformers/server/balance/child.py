"""What every child process does first: read its options, follow its parent into death, leave Ctrl-C to it.

The parent writes the options to the child's standard input and keeps the pipe open. End of file there, at any time,
means that the parent is gone: the child leaves at once, whatever it is doing. PR_SET_PDEATHSIG is a second belt for the
moments before the pipe is read.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import struct
import sys
import threading
from typing import Any, BinaryIO

from ktransformers.server.balance.messages import decode

__all__ = ["framed", "read_options"]

_PR_SET_PDEATHSIG = 1
_HEADER = struct.Struct("<I")

logger = logging.getLogger(__name__)


def framed(data: bytes) -> bytes:
    """The options as `read_options` wants them on standard input."""
    return _HEADER.pack(len(data)) + data


def _follow_parent(pipe: BinaryIO) -> None:
    while pipe.read(1):
        pass
    os._exit(1)


def read_options(kind: Any) -> Any:
    """The options that the parent sent, of type `kind`, whose parent_pid is checked. Starts to watch the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pipe = sys.stdin.buffer
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        os._exit(1)
    options = decode(pipe.read(_HEADER.unpack(header)[0]), kind)
    if os.getppid() != options.parent_pid:  # it died before prctl could help
        os._exit(1)
    threading.Thread(target=_follow_parent, args=(pipe,), daemon=True, name="follow-parent").start()
    return options

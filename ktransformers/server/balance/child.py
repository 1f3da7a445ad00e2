"""Reads the options of balance_serve's processes, which leave at once when their parent is gone, whatever they are
doing.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, BinaryIO

from ktransformers.server.balance.messages import decode
from ktransformers.system.child import read_frame

__all__ = ["read_options"]


def _watch(pipe: BinaryIO) -> None:
    while pipe.read(1):
        pass
    os._exit(1)


def read_options(kind: Any) -> Any:
    """Wait for the process's options, of type `kind`, whose parent_pid is checked. Watches the pipe from then on."""
    pipe = sys.stdin.buffer
    data = read_frame(pipe)
    if data is None:
        os._exit(1)
    options = decode(data, kind)
    if os.getppid() != options.parent_pid:  # it died before prctl could help
        os._exit(1)
    threading.Thread(target=_watch, args=(pipe,), daemon=True, name="follow-parent").start()
    return options

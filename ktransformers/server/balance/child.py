"""Reads the options of balance_serve's processes, which leave at once when their parent is gone."""

from __future__ import annotations

import os
import sys
from typing import Any

from ktransformers.server.balance.messages import decode
from ktransformers.system.child import end_with_pipe, read_frame

__all__ = ["read_options"]


def read_options(kind: Any) -> Any:
    """Wait for the process's options, of type `kind`, whose parent_pid is checked. Watches the pipe from then on."""
    pipe = sys.stdin.buffer
    data = read_frame(pipe)
    if data is None:
        os._exit(1)
    options = decode(data, kind)
    end_with_pipe(pipe, options.parent_pid)
    return options

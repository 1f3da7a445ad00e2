"""The first steps of a child process: leave signals to its parent, end with it, read what it is started with.

The parent writes the options to the child's standard input, at once or when a spare is needed, and keeps the pipe
open. End of file there, at any time, means that the parent is gone. PR_SET_PDEATHSIG is a second belt for the moments
in which nobody reads the pipe.

Signals to the whole process group (systemd's SIGTERM, Ctrl-C) mean the parent: it drains, and needs its children for
that. It starts them with these signals blocked, so that there is no moment in which they could be hit.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import queue
import signal
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO, TypeVar

from ktransformers import errors
from ktransformers.errors import EngineError, KTransformersError

__all__ = [
    "FRAME_HEADER",
    "PARENTS_SIGNALS",
    "become",
    "end_with_pipe",
    "ending_with_parent",
    "follow_parent",
    "framed",
    "frames_of",
    "import_aside",
    "leave_signals",
    "read_frame",
    "reported_error",
    "run_aside",
    "spawn_code",
]

PARENTS_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_LOWEST_PRIORITY = 19
FRAME_HEADER = struct.Struct("<I")

_Made = TypeVar("_Made")


def framed(data: bytes) -> bytes:
    """Return the options in the frame that `read_frame` expects on standard input."""
    return FRAME_HEADER.pack(len(data)) + data


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """Wait for the options on standard input and return them; None when the parent is gone."""
    header = pipe.read(FRAME_HEADER.size)
    return pipe.read(FRAME_HEADER.unpack(header)[0]) if len(header) == FRAME_HEADER.size else None


def frames_of(pipe: IO[bytes]) -> queue.SimpleQueue[bytes]:
    """Return a queue of the frames that come, read on a thread; this process ends with the pipe, whatever it is doing
    then."""
    frames = queue.SimpleQueue[bytes]()

    def read() -> None:
        while (frame := read_frame(pipe)) is not None:
            frames.put(frame)
        os._exit(0)

    threading.Thread(target=read, daemon=True, name="read-frames").start()
    return frames


def end_with_pipe(pipe: IO[bytes], parent_pid: int) -> None:
    """End this process as soon as `pipe` ends, whatever it is doing then, and now if its parent is another one: it died
    before `follow_parent` could help."""
    if os.getppid() != parent_pid:
        os._exit(1)

    def watch() -> None:
        while pipe.read(1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="follow-parent").start()


def reported_error(name: str, message: str) -> KTransformersError:
    """Return the error that another process reported by the name of its class; an EngineError where there is no such
    class, or one that takes more than a message."""
    kind = getattr(errors, name) if name in errors.__all__ else EngineError
    if not (isinstance(kind, type) and issubclass(kind, KTransformersError)):
        return EngineError(message)
    try:
        return kind(message)
    except TypeError:
        return EngineError(message)


def spawn_code(module: str, argument: str = "") -> list[str]:
    """Return the arguments of a Python that runs `module.main(argument)` and finds packages where this process does.

    Not -m, which would import the module twice, under two names.
    """
    code = f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; sys.exit(main({argument}))"
    return [sys.executable, "-P", "-c", code, *sys.path]


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` and gets SIGTERM when the process that starts it ends, killed or not.

    For programs that know nothing of their parent. On Linux; elsewhere it is `command` itself.
    """
    if sys.platform != "linux":
        return list(command)
    code = (
        f"import ctypes, os, sys; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)}); "
        f"os.getppid() == {os.getpid()} and os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-I", "-S", "-c", code, *command]


def become(name: str) -> None:
    """Set the process's name in `ps -o comm` and `top`: at most 15 characters, where the system has such names."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def leave_signals() -> None:
    """Leave the signals of a shutdown to the parent process."""
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)


def run_aside(work: Callable[[], _Made], niceness: int = _LOWEST_PRIORITY) -> _Made:
    """Return what `work` does while others compute: at a low priority, so that a model's steps do not wait for it.

    In a thread of its own, since a thread without privileges never gets its priority back. niceness: of that thread,
    unless this one's is higher. Raises what `work` does.
    """

    def run() -> _Made:
        if sys.platform == "linux":  # elsewhere priorities are those of processes
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(own, niceness))
        return work()

    with ThreadPoolExecutor(1, "aside") as thread:
        return thread.submit(run).result()


def import_aside(module: str) -> None:
    """Import a module by `run_aside`. Raises what the import does."""
    run_aside(partial(importlib.import_module, module))


def follow_parent() -> None:
    """Leave signals to the parent process and die with it. Comes before anything slow."""
    leave_signals()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

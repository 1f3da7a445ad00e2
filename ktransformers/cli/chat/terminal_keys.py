"""Keys pressed while the program is busy: not echoed, kept for the next prompt, but for Ctrl-C and Ctrl-Z.

Knows terminals only.
"""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

__all__ = ["drop_keys", "muted_keys"]

_LOCAL = 3  # index of the local modes in what termios calls attributes
_LEAVING = (signal.SIGTSTP, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def muted_keys(fd: int) -> Iterator[None]:
    """Turn echo off inside the block; then restore the terminal, and leave what was typed meanwhile to be read.

    Ctrl-C empties what was typed, as terminals do. The terminal is as it was also while the program is stopped (by
    Ctrl-Z),
    and when a signal ends it. Does nothing when `fd` is no terminal. Only the main thread may enter, because signals
    are handled.
    """
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    muted = termios.tcgetattr(fd)
    muted[_LOCAL] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON)  # ISIG stays: Ctrl-C and Ctrl-Z are signals

    def mute(signum: int = 0, frame: FrameType | None = None) -> None:
        termios.tcsetattr(fd, termios.TCSADRAIN, muted)

    def leave(signum: int, frame: FrameType | None) -> None:
        with suppress(termios.error):  # it may be gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
        mine = signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)  # stops here, or ends
        signal.signal(signum, mine)
        mute()

    handlers = {signal.SIGCONT: signal.signal(signal.SIGCONT, mute)}  # a shell may have changed it while we stopped
    handlers |= {signum: signal.signal(signum, leave) for signum in _LEAVING}
    try:
        mute()
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def drop_keys(fd: int) -> None:
    """Drop what was typed and not read yet: it cannot have been meant for a question that was not asked then."""
    if os.isatty(fd):
        termios.tcflush(fd, termios.TCIFLUSH)

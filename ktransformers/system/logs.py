"""Logging of this program: one line per message on standard error, the same in every process."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

__all__ = ["set_up_logging"]

_LIBRARIES = ("asyncio", "concurrent.futures", "uvicorn")


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is at the moment: a progress bar replaces it to keep lines and bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def set_up_logging(level: str, process: str = "", *, with_time: bool = False) -> None:
    """Log this program's messages to standard error, and in the same form the warnings of the libraries that serve.

    Without that, a library's warning is a bare text on standard error (logging.lastResort), of nobody and of no time.

    process: a name that tells child processes' lines apart. with_time: lines begin with date and time, as those of
    programs that run for long do.
    """
    handler = _StderrHandler()
    origin = f"%(name)s ({process})" if process else "%(name)s"
    time = "%(asctime)s " if with_time else ""
    handler.setFormatter(logging.Formatter(f"{time}%(levelname)s {origin}: %(message)s", "%Y-%m-%d %H:%M:%S"))
    logger = logging.getLogger("ktransformers")
    logger.handlers[:] = [handler]
    logger.propagate = False
    for name in _LIBRARIES:  # their levels stay as they are
        library = logging.getLogger(name)
        library.handlers[:] = [one for one in library.handlers if not isinstance(one, _StderrHandler)] + [handler]
    logger.setLevel(level.upper())

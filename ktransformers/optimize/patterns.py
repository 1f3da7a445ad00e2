"""Regular expressions of rule files, searched with an end: some take longer than the universe on a short name."""

from __future__ import annotations

import re
import time

import regex

__all__ = ["NamePattern", "SlowPattern"]

MAX_SECONDS = 2.0  # of processor time for all names of a model; published rules take milliseconds


class SlowPattern(Exception):
    """Error: searching a model's names for the pattern takes too long."""


class NamePattern:
    """Compiled pattern of names. pattern: its text. Raises re.error, RecursionError or OverflowError for what
    is none.
    """

    def __init__(self, text: str):
        re.compile(text)  # the dialect of rule files, which says what is wrong with a pattern; it cannot be stopped
        try:
            self._compiled = regex.compile(text, regex.VERSION0)
        except regex.error as error:
            raise re.error(str(error)) from error
        self.pattern = text
        self._left = MAX_SECONDS

    def search(self, name: str) -> bool:
        """Whether the pattern is found in `name`. Raises SlowPattern."""
        start = time.thread_time()
        try:
            return self._compiled.search(name, timeout=max(self._left, 0.01)) is not None
        except TimeoutError as error:
            raise SlowPattern(
                f"takes longer than {MAX_SECONDS:g} s, as nested repetitions do; write it simpler"
            ) from error
        finally:
            self._left -= time.thread_time() - start

"""The pauses of a request: times in which it neither waits nor is computed. Nanoseconds; no numpy here."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["MAX_PAUSES", "Pauses"]

MAX_PAUSES = 256
"""Of one request that are listed; the time of more is left out of what its tokens took all the same."""


@dataclass(slots=True)
class Pauses:
    """The pauses of one request, kept while it is there."""

    _ended: list[tuple[int, int | None]] = field(default_factory=list)
    _since: int | None = None
    _untold: int = 0

    def begin(self, now: int) -> None:
        """Begin a pause: the request is suspended. Does nothing if it was."""
        if self._since is None:
            self._since = now

    def end(self, now: int) -> None:
        """End the pause: the request goes on. Does nothing if it was not suspended."""
        if self._since is None:
            return
        self._untold += now - self._since
        if len(self._ended) < MAX_PAUSES:
            self._ended.append((self._since, now))
        self._since = None

    def take(self) -> int:
        """Return the nanoseconds of the pauses that have ended since the last call."""
        taken, self._untold = self._untold, 0
        return taken

    def listed(self) -> list[tuple[int, int | None]]:
        """Return (begin, end) of each pause, in order; the end of one that goes on is None."""
        return self._ended if self._since is None else [*self._ended, (self._since, None)]

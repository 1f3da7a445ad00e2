"""Progress of what is written, as commands show it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Advances"]


class Advances(Protocol):
    """Progress display of bytes."""

    def advance(self, nbytes: int) -> None:
        """Show that so many more bytes are done."""
        ...

"""Watches the files of weights, which stay mapped while they are served: a file that changes under it changes answers.

What is written into a mapped file shows in the engine at once, and bytes that were cut off end it with SIGBUS. A file
that was replaced by another of its name (renamed into place) leaves the mapping as it was; only the next engine would
differ.

A file is what the digests of weights take it for (weights/digests/): a look compares its state, without reading it.
Only where its times or its inode are others are all of its bytes read, once, for a backup, a `chmod` or a `touch`
changes no byte of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ktransformers.errors import WeightError
from ktransformers.weights.digests.files import files_digest
from ktransformers.weights.digests.states import FileState, state_of

__all__ = ["ModelFiles"]

logger = logging.getLogger("ktransformers.server")

_NUM_THREADS = 1
"""That read a file, beside the ones that answer requests."""


@dataclass(slots=True)
class _Known:
    """A file that is watched. state: the last one in which it had the bytes of its first; None: it was not there.

    digest: of these bytes; None: they were not read.
    """

    state: FileState | None
    digest: str | None = None


class ModelFiles:
    """The files of weights as they are when this is made. Methods may be called on any thread; each looks at all
    files.
    """

    def __init__(self, paths: Iterable[Path] = ()):
        self._known = {path: _Known(_state_of(path)) for path in paths}
        self._lock = threading.Lock()
        self._is_closed = threading.Event()

    def close(self) -> None:
        """Stop reading the files, on whatever thread that happens. Later looks find nothing."""
        self._is_closed.set()

    def read(self) -> None:
        """Compute the digests by which a file that was written to differs from one that was only touched.

        They come from records where there are some.

        To be called once the model is loaded: of a large model without a record this reads for minutes. A file that
        changes meanwhile, or before, gets none.
        """
        for known in self._known.values():
            state = known.state
            digest = None if state is None else self._digest(state)  # minutes, in which looks go on
            with self._lock:
                if known.state == state:
                    known.digest = digest

    def written_to(self) -> str | None:
        """Return what was done to a mapped file; None when all are as they were, or another file has the name now."""
        return self._first_change(is_mapped=True)

    def changed(self) -> str | None:
        """Return what differs for whoever opens the files now; None when nothing does, and the same files are
        mapped.
        """
        return self._first_change(is_mapped=False)

    def _first_change(self, *, is_mapped: bool) -> str | None:
        with self._lock:
            for path, known in self._known.items():
                new = _state_of(path)
                if new == known.state or (is_mapped and not _is_same_file(known.state, new)):
                    continue
                if not self._has_same_bytes(path, known, new) and not self._is_closed.is_set():
                    return _described(path, known, new)
        return None

    def _has_same_bytes(self, path: Path, known: _Known, new: FileState | None) -> bool:
        """Whether only times or the inode are new, which is then taken for the file's. Logs it, once."""
        old = known.state
        if old is None or new is None or known.digest is None or old.size != new.size:
            return False
        if self._digest(new) != known.digest:
            return False
        what = "has another time" if _is_same_file(old, new) else "is another file"
        logger.info("%s %s and the same bytes: it is served on", path, what)
        known.state = new
        return True

    def _digest(self, state: FileState) -> str | None:
        """None for a file that is not in that state any more, and once this is closed."""
        try:
            return files_digest([state], num_threads=_NUM_THREADS, is_over=self._is_closed.is_set)
        except WeightError:
            return None


def _state_of(path: Path) -> FileState | None:
    try:
        return state_of(path)
    except WeightError:
        return None


def _is_same_file(old: FileState | None, new: FileState | None) -> bool:
    """Whether what is mapped has the name still."""
    return old is not None and new is not None and (old.path, old.inode) == (new.path, new.inode)


def _described(path: Path, known: _Known, new: FileState | None) -> str:
    old = known.state
    if new is None:
        what = "is gone"
    elif old is not None and new.size < old.size:
        what = f"was cut from {old.size} to {new.size} bytes"
    elif old is not None and new.size == old.size and known.digest is None:
        what = "was written to, replaced or touched before its bytes were read to tell these apart"
    else:
        what = "was written to or replaced"
    return f"{path} {what} while it was served, so answers would change; start the server again on the right file"

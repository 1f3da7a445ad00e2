"""Digests of the weights' files, all bytes of them. Imports no torch.

A digest is computed once for a state of a file (states.py) and recorded, in the user's cache folder and in folders that
outlive the process. A file that was touched, copied or moved has another state and the same digest.

    digest    SHA-256 of the size and of the SHA-256 of each CHUNK_BYTES, so that threads share the work
    record    FOLDER/weights-NAME.json: FileState with its digest. NAME: of the path
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ktransformers.core import format_bytes
from ktransformers.errors import WeightError, reason_of
from ktransformers.system.cores import physical_cores
from ktransformers.system.user_files import read_own, replace_own
from ktransformers.system.user_folders import user_cache_dir
from ktransformers.weights.digests.states import FileState, state_of

__all__ = ["CHUNK_BYTES", "WeightDigest", "exact_fingerprint", "files_digest"]

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
_MOST_THREADS = 16
_SAID_BYTES = 1 << 30
"""Fewer are read in a moment, without a line in the log."""

_VERSION = 1


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was computed once."""

    v: int
    state: FileState
    digest: str


class WeightDigest:
    """The digest of all weight files together, computed when it is asked for first. Any thread may ask.

    states: as the files were before any of their bytes were used. folders: where records are, besides the user's cache.
    """

    def __init__(self, states: Sequence[FileState], folders: Sequence[Path] = ()):
        self.states, self.folders = tuple(states), tuple(folders)
        self._lock = threading.Lock()
        self._digest: str | None = None

    def hex(self) -> str:
        """Return the digest in hexadecimal digits. Raises WeightError for a file that has changed, or cannot be
        read.
        """
        with self._lock:
            if self._digest is None:
                self._digest = files_digest(self.states, self.folders)
            return self._digest


def files_digest(
    states: Sequence[FileState],
    folders: Sequence[Path] = (),
    num_threads: int | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> str:
    """Return the digest of files together, whatever their names and order, in hexadecimal digits.

    Files that a record knows are not read. num_threads: that read; None: as many as pay. is_over: asked before each
    chunk whether nobody wants it any more. Raises WeightError, for that too.
    """
    places = [*folders, user_cache_dir() / "weights"]
    found = [(state, _recorded(state, places)) for state in states]
    unknown = [state for state, digest in found if digest is None]
    nbytes = sum(state.size for state in unknown)
    if nbytes >= _SAID_BYTES:
        logger.info(
            "reading all of the weights' files once, %s, to know them again at the next start", format_bytes(nbytes)
        )
    made = _computed(unknown, num_threads or min(physical_cores(), _MOST_THREADS), is_over)
    for state, digest in made.items():
        _write(state, digest, places)
    parts = sorted(digest or made[state] for state, digest in found)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def exact_fingerprint(sampled: bytes, states: Sequence[FileState], folder: Path) -> bytes:
    """Return 32 bytes of everything that decides a token's keys and values, for a process that has not loaded the
    model.

    sampled: the digest of a ModelIdentity of some bytes. folder: where digests are kept, too. Raises WeightError.
    """
    if not states:  # a model that is made up
        return sampled
    return hashlib.blake2b(sampled + files_digest(states, (folder,)).encode(), digest_size=32).digest()


def _computed(states: Sequence[FileState], num_threads: int, is_over: Callable[[], bool]) -> dict[FileState, str]:
    """By file. All chunks of all files are one queue. Raises WeightError."""

    def chunk(state: FileState, at: int) -> bytes:
        if is_over():
            raise WeightError(f"{state.path} is not read any more")
        return _chunk(state, at)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="kt-digest") as pool:
        chunks = {
            state: [pool.submit(chunk, state, at) for at in range(0, state.size, CHUNK_BYTES)] for state in states
        }
        try:
            digests = {state: [one.result() for one in each] for state, each in chunks.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    made = {}
    for state, each in digests.items():
        if state_of(Path(state.path)) != state:
            raise _changed(state)
        made[state] = hashlib.sha256(state.size.to_bytes(8, "little") + b"".join(each)).hexdigest()
    return made


def _chunk(state: FileState, at: int) -> bytes:
    wanted, made = min(CHUNK_BYTES, state.size - at), hashlib.sha256()
    try:
        fd = os.open(state.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            while wanted:
                data = os.pread(fd, min(wanted, 1 << 20), at)
                if not data:
                    raise _changed(state)
                made.update(data)
                wanted, at = wanted - len(data), at + len(data)
        finally:
            os.close(fd)
    except OSError as error:
        raise WeightError(f"{state.path} cannot be read: {reason_of(error)}") from error
    return made.digest()


def _changed(state: FileState) -> WeightError:
    return WeightError(
        f"{state.path} was changed since the model was loaded: start anew, with files that stay as they are"
    )


# Records.


def _path(folder: Path, state: FileState) -> Path:
    return folder / f"weights-{hashlib.sha256(os.fsencode(state.path)).hexdigest()[:32]}.json"


def _recorded(state: FileState, folders: Sequence[Path]) -> str | None:
    """The digest of a file in this very state, from the first record that has it."""
    for folder in folders:
        path = _path(folder, state)
        try:
            record = msgspec.json.decode(read_own(path), type=_Record)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            logger.warning("%s cannot be used (%s): the file that it is about is read again", path, reason_of(error))
            continue
        if record.v == _VERSION and record.state == state:
            return record.digest
    return None


def _write(state: FileState, digest: str, folders: Sequence[Path]) -> None:
    """Where it can be written: elsewhere the file is read again at the next start."""
    if not state.is_settled():  # it could be changed once more and look the same
        return
    data = msgspec.json.encode(_Record(_VERSION, state, digest))
    for folder in folders:
        path = _path(folder, state)
        try:
            replace_own(path, data)
        except OSError as error:
            logger.info("%s cannot be written (%s)", path, reason_of(error))

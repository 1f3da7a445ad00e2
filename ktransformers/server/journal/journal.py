"""The journal of one server, in a folder that only its user can read: `--state_dir`.

    event loop:  opened, note, suspended, closed ──> queue ──> writer thread: seal, append ──> written
                                                               sync thread:   fdatasync, 20 times a second

What is `written` outlives a kill -9 of every process, and a power loss from the next sync on. A disk that is full ends
the journal with a line in the log, and nothing else: what was to be written down goes on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from ktransformers.core import PastToken
from ktransformers.errors import ConfigError, reason_of
from ktransformers.server.journal.file import KEY_BYTES, JournalFile, WrongJournalError, contents_of
from ktransformers.server.journal.records import (
    Closed,
    JournalState,
    Kept,
    Noted,
    Opened,
    Record,
    Tokens,
    decoded,
    encoded,
)
from ktransformers.system.user_files import WrongFileError, check_own_folder, read_own

__all__ = ["MAX_TRIES", "Journal", "state_after"]

logger = logging.getLogger("ktransformers.server")

MAX_TRIES = 3
"""Starts of a server that a request may see without getting any further: it may be what ends them."""

_FORGETS = "From now on nothing is written down: this server forgets its requests when it is killed"
_SYNC_SECONDS = 0.05
_MIN_COMPACTED = 1 << 20
"""Bytes: smaller files are not worth rewriting."""


def state_after(payloads: Sequence[bytes]) -> JournalState:
    """Return the requests that are open after these records. Those that another version wrote are passed over with a
    line in the log.
    """
    state, num_unknown = JournalState(), 0
    for payload in payloads:
        try:
            state.apply(decoded(payload), len(payload))
        except msgspec.MsgspecError:
            num_unknown += 1
    if num_unknown:
        logger.warning("the journal has %d records that this version cannot read: they are left out", num_unknown)
    return state


class Journal:
    """The journal of one server, which alone has its folder. Raises ConfigError when another server has it, or it
    cannot be used.

    `begin` on the event loop, before anything but `close`; all other methods there too.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        try:
            check_own_folder("--state_dir", folder, "what is written down is text, and its key")
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._lock)
                raise ConfigError(f"--state_dir {folder} is in use by another server: give each one its own") from error
            try:
                self._key = self._read_key()
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise ConfigError(f"--state_dir {folder} cannot be used: {reason_of(error)}") from error
        self._queue: deque[Record] = deque()
        self._wake, self._ends = threading.Event(), threading.Event()
        self._is_dirty, self._is_stopped, self._has_failed = threading.Event(), False, False
        self._num_put, self._num_written = 0, 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._threads: list[threading.Thread] = []
        self._syncing = threading.Lock()  # held by whoever needs the file to stay open although it does not write
        self._min_compacted = _MIN_COMPACTED

    def _read_key(self) -> bytes:
        path = self._folder / "key"
        if not path.exists():
            new = self._folder / "key.new"
            new.unlink(missing_ok=True)
            made = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(made, secrets.token_bytes(KEY_BYTES))
                os.fsync(made)
            finally:
                os.close(made)
            new.rename(path)
        try:
            key = read_own(path, is_secret=True)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be used: {reason_of(error)}; it must be a file of yours with mode 600. Who could write "
                "it may know what is in the journal beside it: remove both, or chmod 600 it if nobody could"
            ) from error
        if len(key) != KEY_BYTES:
            raise ConfigError(f"{path} is damaged: remove it, and with it what the journal beside it knows")
        return key

    @property
    def folder(self) -> Path:
        """The folder that the journal is in."""
        return self._folder

    def digest_of(self, api_key: str) -> str:
        """Return what stands for an API key in the journal; "" for none."""
        return hashlib.blake2b(api_key.encode(), key=self._key, digest_size=16).hexdigest() if api_key else ""

    # The beginning and the end.

    def begin(self, fingerprint: bytes) -> list[Kept]:
        """Read what there is, go on from there, and return the requests that were open, the oldest first.

        fingerprint: 32 bytes, of the model. Another model's journal is set aside. Raises ConfigError.
        """
        path = self._folder / "journal"
        try:
            self._state = self._read(path, fingerprint)
            self._fingerprint = fingerprint
            self._file = self._new_file()
        except OSError as error:
            raise ConfigError(f"--state_dir {self._folder} cannot be used: {reason_of(error)}") from error
        self._loop = asyncio.get_running_loop()
        for work in (self._write_all, self._sync_all):
            thread = threading.Thread(target=work, name="kt-journal", daemon=True)
            thread.start()
            self._threads.append(thread)
        return [replace(one, tokens=list(one.tokens)) for one in self._state.kept.values()]  # the thread has its own

    def _read(self, path: Path, fingerprint: bytes) -> JournalState:
        try:
            contents = contents_of(read_own(path), self._key, fingerprint)
        except FileNotFoundError:
            return JournalState()
        except (WrongJournalError, WrongFileError) as error:
            aside = path.with_name(f"journal.{time.time_ns()}")
            path.rename(aside)
            logger.warning("%s is not used: %s. It is now called %s", path, reason_of(error), aside.name)
            return JournalState()
        if contents.torn:
            logger.warning("%s: the last %d bytes are of a record that was not finished: cut off", path, contents.torn)
        if contents.num_damaged:
            logger.warning("%s is damaged in %d places: what stood there is left out", path, contents.num_damaged)
        return state_after(contents.payloads)

    def _new_file(self) -> JournalFile:
        """With the requests that are open, in place of the file that there was."""
        made = JournalFile(self._folder / "journal", self._key, self._fingerprint)
        for one in self._state.kept.values():
            made.append([encoded(record) for record in one.records()])
        made.install()
        return made

    def stop(self) -> None:
        """Stop writing down what comes: the requests that are open now are so at the next start."""
        self._is_stopped = True

    def close(self) -> None:
        """Write what is left, and let go of the folder. Safe to call twice."""
        self.stop()
        self._ends.set()
        self._wake.set()
        self._is_dirty.set()
        for thread in self._threads:
            thread.join()
        if self._threads:
            with contextlib.suppress(OSError):
                self._file.sync()
            self._file.close()
        self._threads.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # What happens to requests.

    def opened(self, record: Opened) -> None:
        """Record that a request has come."""
        self._put(record)

    def note(self, id: str, first: int, token: PastToken) -> None:
        """Record a token, number `first` of all answers of a request."""
        self._put(Tokens(id, first, (token,)))

    def suspended(self, id: str, is_suspended: bool, num_tries: int = 0) -> None:
        """Record whether a request is suspended from now on. num_tries: see Noted."""
        self._put(Noted(id, is_suspended, num_tries))

    def closed(self, id: str) -> None:
        """Record that nobody can ask for the request any more."""
        self._put(Closed(id))

    async def written(self) -> bool:
        """Wait until all that was recorded before is written. False: the journal has stopped, it never will be."""
        if not self._is_stopped and not self._has_failed and self._num_written < self._num_put:
            waiter = self._loop.create_future()
            self._waiters.append((self._num_put, waiter))
            await waiter
        return not self._is_stopped

    def _put(self, record: Record) -> None:
        if not self._is_stopped and not self._has_failed:
            self._num_put += 1
            self._queue.append(record)
            self._wake.set()

    def _wrote(self, num_records: int) -> None:
        self._num_written += num_records
        while self._waiters and (self._has_failed or self._waiters[0][0] <= self._num_written):
            waiter = self._waiters.popleft()[1]
            if not waiter.done():
                waiter.set_result(None)

    # The threads.

    def _write_all(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                is_end = self._ends.is_set()
                records = [self._queue.popleft() for _ in range(len(self._queue))]
                self._append(records)
                self._loop.call_soon_threadsafe(self._wrote, len(records))
                if is_end:
                    return
        except OSError as error:
            logger.error("--state_dir %s: %s. %s", self._folder, reason_of(error), _FORGETS)
        except Exception:
            logger.exception("--state_dir %s: %s", self._folder, _FORGETS)
        self._has_failed = True
        self._loop.call_soon_threadsafe(self._wrote, 0)  # whoever waits goes on

    def _append(self, records: Sequence[Record]) -> None:
        payloads = []
        for record in _joined(records):
            payload = encoded(record)
            self._state.apply(record, len(payload))
            payloads.append(payload)
        self._file.append(payloads)
        if self._file.num_bytes > max(2 * self._state.num_bytes, self._min_compacted):
            self._compact()
        if payloads:
            self._is_dirty.set()

    def _compact(self) -> None:
        made = self._new_file()
        self._min_compacted = max(2 * made.num_bytes, _MIN_COMPACTED)  # many short records take more than a long one
        with self._syncing:
            old, self._file = self._file, made
            old.close()

    def _sync_all(self) -> None:
        while not self._ends.wait(_SYNC_SECONDS):
            self._is_dirty.wait()
            self._is_dirty.clear()
            try:
                with self._syncing:
                    self._file.sync()
            except OSError as error:
                if not self._has_failed:
                    logger.warning("--state_dir %s: %s", self._folder, reason_of(error))


def _joined(records: Sequence[Record]) -> list[Record]:
    """Neighbouring tokens of a request as one record."""
    made: list[Record] = []
    tokens: list[PastToken] = []
    for at, record in enumerate(records):
        if not isinstance(record, Tokens):
            made.append(record)
            continue
        tokens += record.tokens
        following = records[at + 1] if at + 1 < len(records) else None
        if not isinstance(following, Tokens) or following.id != record.id:
            made.append(Tokens(record.id, record.first + len(record.tokens) - len(tokens), tuple(tokens)))
            tokens = []
    return made

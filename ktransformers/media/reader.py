"""Reads pictures in a child process, each once: what PictureReader says, for the folder of one model."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import msgspec

from ktransformers.errors import ConfigError
from ktransformers.media.limits import DETAILS, MAX_NBYTES
from ktransformers.media.messages import Answer, Fault, ProcessorOpened, Question, Read, Setup
from ktransformers.media.picture import ReadPicture
from ktransformers.media.store import PictureStore
from ktransformers.system.asked_process import AnswerTimeout, AskedProcess, ProcessEndedError
from ktransformers.system.child import spawn_code

__all__ = ["ChildReader", "key_of"]

_log = logging.getLogger(__name__)

_START_SECONDS = 180.0  # torch and transformers, on a slow disk
_SECONDS = 120.0  # a picture; the largest take ten on two busy cores
_MOST_KNOWN = 4096


def key_of(data: bytes) -> bytes:
    """Return what an encoded picture is found again by: 32 bytes."""
    return blake2b(data, digest_size=32).digest()


class ChildReader:
    """A PictureReader for the processor in `folder`, whose pictures go to `store`, which it closes. The child process
    starts with `start_ahead`, or with the first picture. Any thread may call it.

    tower: what is known of a tower whose weights are not the model's own files; keys and values of the same picture are
    kept apart by it, in this process and in files.
    """

    def __init__(self, folder: Path, store: PictureStore, tower: bytes = b""):
        self.store = store
        opening = msgspec.msgpack.encode(Setup(str(folder), str(store.folder), tower))
        self.child = AskedProcess(spawn_code("ktransformers.media.reader_process"), opening, _START_SECONDS)
        self._lock = threading.Lock()
        self._opened: ProcessorOpened | Fault | None = None
        self._known: OrderedDict[tuple[bytes, str], ReadPicture] = OrderedDict()
        self._noted: set[str] = set()
        self._starting: threading.Thread | None = None
        self._is_closed = False

    def start_ahead(self) -> None:
        """Start the child process while nobody waits for it; returns at once. A picture that comes meanwhile waits."""
        self._starting = threading.Thread(target=self._start_ahead, daemon=True, name="start-pictures")
        self._starting.start()

    def _start_ahead(self) -> None:
        try:
            self._open()
        except ConfigError as error:
            if not self._is_closed and threading.main_thread().is_alive():  # else it was ended
                _log.warning("pictures cannot be read so far: %s", error)

    @property
    def placeholder(self) -> str:
        """The text that the model's chat template writes for one picture. Raises ConfigError where its processor cannot
        be used."""
        return self._open().placeholder

    @property
    def position_token_ids(self) -> frozenset[int]:
        """The ids of tokens whose positions the tower fills. Raises as `placeholder`."""
        return frozenset(self._open().position_token_ids)

    def read(self, data: bytes, detail: str | None = None) -> ReadPicture:
        """Read an encoded picture, or find it among those that were read. Blocks. See PictureReader.read.

        Raises ConfigError for what is no picture, or too large, and when the child process dies of it.
        """
        detail = detail or DETAILS[0]
        if detail not in DETAILS:
            raise ConfigError(f"detail {detail!r:.40} is not one of {', '.join(DETAILS)}")
        if len(data) > MAX_NBYTES:
            raise ConfigError(f"the picture has {len(data)} bytes; at most {MAX_NBYTES} are read")
        key = key_of(data)
        known = self.known(key, detail)
        if known is not None:
            return known
        self._open()
        made = self._ask(msgspec.msgpack.encode(Question(data, detail)))
        assert isinstance(made, Read)
        self.store.add(made.digest, made.nbytes)
        picture = ReadPicture(
            made.digest,
            made.text,
            made.num_positions,
            made.width,
            made.height,
            made.lead,
            made.trail,
            made.closing,
        )
        with self._lock:
            self._known[key, detail] = picture
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return picture

    def known(self, key: bytes, detail: str | None = None) -> ReadPicture | None:
        """Return the picture of the bytes with this `key_of`, while it is in the store; None: it is not."""
        with self._lock:
            found = self._known.get((key, detail or DETAILS[0]))
            if found is not None:
                self._known.move_to_end((key, detail or DETAILS[0]))
        return found if found is not None and self.store.has(found.digest) else None

    def hold(self, digests: Iterable[bytes]) -> None:
        """Keep the files of these pictures until `release`: for as long as a request needs them."""
        self.store.hold(digests)

    def release(self, digests: Iterable[bytes]) -> None:
        """Take a `hold` back."""
        self.store.release(digests)

    def close(self) -> None:
        """End the child process, and delete the store's folder, if it is of the store alone."""
        self._is_closed = True
        while self._starting is not None and self._starting.is_alive():
            self.child.kill()  # it may not be there yet
            self._starting.join(0.01)
        self.child.close()
        self.store.close()

    def _open(self) -> ProcessorOpened:
        if self._opened is None:
            try:
                made = self._answer(self.child.start())
            except (AnswerTimeout, ProcessEndedError) as error:
                raise ConfigError(f"the process that reads pictures does not start: {error}") from error
            assert not isinstance(made, Read)
            self._opened = made
        if isinstance(self._opened, Fault):
            raise ConfigError(self._opened.message)
        return self._opened

    def _ask(self, question: bytes) -> Answer:
        try:
            made = self._answer(self.child.ask(question, _SECONDS))
        except AnswerTimeout as error:
            raise ConfigError(f"the picture could not be read: {error}; make it smaller") from error
        except ProcessEndedError as error:
            raise ConfigError(f"the picture could not be read: the process that reads it ended ({error})") from error
        if isinstance(made, Fault):
            raise ConfigError(made.message)
        return made

    def _answer(self, data: bytes) -> Answer:
        made: Answer = msgspec.msgpack.decode(data, type=Answer)
        for note in () if isinstance(made, Fault) else made.notes:
            log = _log.debug if note in self._noted else _log.info
            self._noted.add(note)
            log("%s", note)
        return made

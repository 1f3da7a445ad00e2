"""An append-only file of sealed records, of which every part that is whole can be read, whatever happened to the rest.

    file     magic 16 | salt 16 | fingerprint 32 | CRC-32 of these, 4 | record | record | ...
    record   mark 4 | length 4 | number 8 | CRC-32 of these, 4 | AES-256-GCM of the payload, length bytes, tag included

Integers are little-endian. Records are numbered from 0, and a record's number is its nonce: each file has a key of its
own, BLAKE2b of its salt with the folder's key. What is behind the last whole record was being written when the power
went; a record that does not open is passed over, and reading goes on at the next mark. Knows no requests.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["KEY_BYTES", "Contents", "JournalFile", "WrongJournalError", "contents_of"]

KEY_BYTES = 32
MAX_RECORD = 1 << 30
"""Bytes of a payload. A length beyond it is damage."""

_MAGIC = b"kt journal 1\r\n\x1a\n"
_MARK = b"\xf5KTJ"
_HEAD = Struct("<4sIQ")
_CRC = Struct("<I")
_SALT_BYTES, _FINGERPRINT_BYTES, _TAG_BYTES = 16, 32, 16
_FILE_HEAD = len(_MAGIC) + _SALT_BYTES + _FINGERPRINT_BYTES + _CRC.size


class WrongJournalError(Exception):
    """Error that a file is no journal for this server to read. The message says why."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The readable records of a journal file. payloads: of the whole records, in order. num_damaged: stretches passed
    over. torn: bytes cut off at the end.
    """

    payloads: tuple[bytes, ...]
    num_damaged: int
    torn: int


def _sealed_with(key: bytes, salt: bytes) -> AESGCM:
    return AESGCM(hashlib.blake2b(salt, key=key, digest_size=KEY_BYTES).digest())


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def contents_of(data: bytes, key: bytes, fingerprint: bytes) -> Contents:
    """Return the records in a file with these bytes. Raises WrongJournalError for another version, model or key,
    and for what is damaged from its first byte to its last.
    """
    if len(data) < _FILE_HEAD and _MAGIC.startswith(data[: len(_MAGIC)]):
        return Contents((), 0, len(data))  # killed while it began
    head = data[: _FILE_HEAD - _CRC.size]
    if not data.startswith(_MAGIC):
        raise WrongJournalError("it is no journal of this version")
    if _CRC.unpack_from(data, len(head))[0] != zlib.crc32(head):
        raise WrongJournalError("its first bytes are damaged")
    if head[-_FINGERPRINT_BYTES:] != fingerprint:
        raise WrongJournalError("it is of another model, or of one that computes with other settings")
    contents = _records_in(data, _sealed_with(key, head[len(_MAGIC) : len(_MAGIC) + _SALT_BYTES]))
    if not contents.payloads and _has_whole_head(data):
        raise WrongJournalError("no record of it opens: it was sealed with another key, or all of it is damaged")
    return contents


def _has_whole_head(data: bytes) -> bool:
    """Whether there is a record all of whose bytes are there, whatever they are."""
    at = _FILE_HEAD - 1
    while (at := data.find(_MARK, at + 1)) >= 0:
        begin = at + _HEAD.size + _CRC.size
        if begin > len(data):
            return False
        length = _HEAD.unpack_from(data, at)[1]
        head = data[at : at + _HEAD.size]
        if _CRC.unpack_from(data, at + _HEAD.size)[0] == zlib.crc32(head) and begin + length <= len(data):
            return True
    return False


def _records_in(data: bytes, seal: AESGCM) -> Contents:
    payloads: list[bytes] = []
    at, last, num_damaged = _FILE_HEAD, -1, 0
    while at < len(data):
        found = _record_at(data, at, seal)
        if found is None:
            following = _next_whole(data, at + 1, seal, last)
            if following is None:
                return Contents(tuple(payloads), num_damaged, len(data) - at)
            at, num_damaged = following, num_damaged + 1
            continue
        number, payload, at = found
        if number > last:  # one that was copied to where it does not belong is none
            payloads.append(payload)
            last = number
    return Contents(tuple(payloads), num_damaged, 0)


def _record_at(data: bytes, at: int, seal: AESGCM) -> tuple[int, bytes, int] | None:
    """(number, payload, where the next one begins); None when there is no whole record here."""
    begin = at + _HEAD.size + _CRC.size
    if begin > len(data):
        return None
    mark, length, number = _HEAD.unpack_from(data, at)
    head = data[at : at + _HEAD.size]
    if mark != _MARK or length > MAX_RECORD + _TAG_BYTES or begin + length > len(data):
        return None
    if _CRC.unpack_from(data, at + _HEAD.size)[0] != zlib.crc32(head):
        return None
    try:
        return number, seal.decrypt(_nonce(number), data[begin : begin + length], head), begin + length
    except InvalidTag:
        return None


def _next_whole(data: bytes, at: int, seal: AESGCM, last: int) -> int | None:
    while (at := data.find(_MARK, at)) >= 0:
        found = _record_at(data, at, seal)
        if found is not None and found[0] > last:
            return at
        at += 1
    return None


class JournalFile:
    """A new journal file at `path`, 0600, which takes the place of one that is there when it is `installed`. Raises
    OSError.
    """

    def __init__(self, path: Path, key: bytes, fingerprint: bytes):
        self._path, self._new = path, path.with_suffix(".new")
        self._new.unlink(missing_ok=True)
        self._number, self.num_bytes = 0, 0
        salt = secrets.token_bytes(_SALT_BYTES)
        self._seal = _sealed_with(key, salt)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._new, flags, 0o600)
        head = _MAGIC + salt + fingerprint
        self._write(head + _CRC.pack(zlib.crc32(head)))

    def append(self, payloads: Iterable[bytes]) -> None:
        """Write records to the file. They outlive this process from then on, and a power loss once `sync` has
        returned.
        """
        self._write(b"".join(map(self._record, payloads)))

    def _record(self, payload: bytes) -> bytes:
        head = _HEAD.pack(_MARK, len(payload) + _TAG_BYTES, self._number)
        sealed = self._seal.encrypt(_nonce(self._number), payload, head)
        self._number += 1
        return head + _CRC.pack(zlib.crc32(head)) + sealed

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self.num_bytes += len(data)

    def install(self) -> None:
        """Move the file to its place as the journal: whoever reads finds either the old one or this one, whole."""
        os.fsync(self._file)
        self._new.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def sync(self) -> None:
        """Wait until what was appended before is on the disk. For another thread than the one that appends."""
        os.fdatasync(self._file)

    def close(self) -> None:
        """Close the file; nothing is appended any more."""
        os.close(self._file)

"""The header of a packed file of experts.

    magic       8 bytes, KTEXPERT
    version     u32, little-endian, as all numbers
    nbytes      u32: of all that is in front of the first record, a multiple of 4,096
    json        u32: bytes of the JSON that follows
    (zeros)     u32
    digest      32 bytes: blake2b of everything from the JSON up to the first record, and of the five fields above
    JSON        `Header`; then zeros
    records     layer behind layer as `Header.layers` has them, in each expert behind expert, without gaps

A record's checksum is its CRC-32: it is there for disks that fail, and costs a seventh of what blake2b does (4.5 GiB/s
of one core). Every byte of the file is under a checksum, the digest, or compared.

VERSION changes with the bytes of any packed layout, which a test holds, and with what `--cpu_quant` makes of weights.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ktransformers.errors import FormatError, reason_of
from ktransformers.kernels.cpu.base import CpuLayout
from ktransformers.kernels.cpu.expert_store import RecordLayout
from ktransformers.kernels.types import GroupType, OwnType, QuantType, WeightType
from ktransformers.system.file_kinds import check_is_file, size_of
from ktransformers.weights.digests.samples import digest_of, samples, tensor_sizes
from ktransformers.weights.source import WeightSource
from ktransformers.weights.stored_experts.records import (
    RECORD_ALIGN,
    RecordMatrix,
    as_packed,
    parts_of,
    record_layout,
    rounded_up,
)

__all__ = [
    "MAGIC",
    "NO_CHECKSUM",
    "VERSION",
    "Header",
    "SourceFile",
    "SourceIdentity",
    "StoredLayer",
    "encode_header",
    "is_packed_file",
    "read_header",
]

MAGIC = b"KTEXPERT"
VERSION = 1
NO_CHECKSUM = "0" * 8
"""Stands where a checksum will be: as long as one."""

_FIELDS = struct.Struct("<8sIIII")
_DIGEST_BYTES = 32
_JSON_AT = _FIELDS.size + _DIGEST_BYTES
_MAX_HEADER_BYTES = 1 << 28
_MAX_EXPERTS = 1 << 20
_AGAIN = "pack the model again: ktransformers pack MODEL --force"


class SourceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name and bytes of one of the model's files."""

    name: str
    size: int


class SourceIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity of the model that packed experts were made from. tensors: digest of all tensors' names and sizes;
    sample: of some of their bytes, because models of one shape have equal headers.
    """

    files: tuple[SourceFile, ...]
    tensors: str
    sample: str

    @classmethod
    def of(cls, source: WeightSource, files: Sequence[Path]) -> SourceIdentity:
        """Identify the model in these files. Reads a page of up to 1,024 tensors. Raises OSError."""
        found = tuple(SourceFile(path.name, path.stat().st_size) for path in files)
        return cls(found, digest_of(tensor_sizes(source)), digest_of(samples(source)))

    def why_other(self, other: SourceIdentity) -> str | None:
        """Say in words in what way `other` is not this model; None when it is. Names of files do not matter."""
        if other.tensors != self.tensors or sorted(f.size for f in other.files) != sorted(f.size for f in self.files):
            return "their tensors differ"
        return None if other.sample == self.sample else "they have the same tensors with other numbers"


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    rows: int
    cols: int
    layout: str
    offset: int
    nbytes: int


class StoredLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The experts of one layer. key: name of their module; number: of the layer in the model, -1 for none.
    checksums: eight hexadecimal digits of each record.
    """

    key: str
    number: int
    num_experts: int
    parts: dict[str, _Part]
    record_nbytes: int
    checksums: tuple[str, ...]

    @classmethod
    def of(cls, key: str, number: int, record: RecordLayout, checksums: Sequence[str]) -> StoredLayer:
        """Describe a layer of as many experts as there are checksums."""
        record = as_packed(record)
        parts = {
            name: _Part(part.qtype.name, part.rows, part.cols, part.layout.name, part.offset, part.nbytes)
            for name, part in parts_of(record).items()
        }
        return cls(key, number, len(checksums), parts, record.nbytes, tuple(checksums))

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.num_experts * self.record_nbytes

    def record(self) -> RecordLayout:
        """Return the layout of the records. Raises ValueError where it is none that this version writes."""
        matrices = {name: _matrix(part) for name, part in self.parts.items()}
        if not {"up", "down"} <= matrices.keys() <= {"gate", "up", "down"}:
            raise ValueError(f"experts of {', '.join(matrices)}")
        made = record_layout(matrices.get("gate"), matrices["up"], matrices["down"])
        stored = {name: (part.offset, part.nbytes) for name, part in self.parts.items()}
        if stored != {name: (part.offset, part.nbytes) for name, part in parts_of(made).items()}:
            raise ValueError("parts of other sizes")
        if made.nbytes != self.record_nbytes:
            raise ValueError("records of another size")
        return made


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything in front of the records. made_by: version of the program; options: of how it was packed, for
    messages.
    """

    made_by: str
    source: SourceIdentity
    options: dict[str, str]
    layers: tuple[StoredLayer, ...]


def _matrix(part: _Part) -> RecordMatrix:
    """Raises ValueError for a type or a layout that is not known."""
    kinds: tuple[type[QuantType] | type[OwnType] | type[GroupType], ...] = (QuantType, OwnType, GroupType)
    found: list[WeightType] = [kind[part.type] for kind in kinds if part.type in kind.__members__]
    if not found or part.layout not in ("ROWS", "TILES"):
        raise ValueError(f"a matrix of {part.type} in {part.layout}")
    if not (0 < part.rows < 1 << 31 and 0 < part.cols < 1 << 31):
        raise ValueError(f"a matrix of {part.rows} x {part.cols}")
    return RecordMatrix(found[0], part.rows, part.cols, CpuLayout[part.layout])


def encode_header(header: Header) -> bytes:
    """Return the bytes in front of the first record. How many does not depend on checksums."""
    text = msgspec.json.encode(header)
    nbytes = rounded_up(_JSON_AT + len(text), RECORD_ALIGN)
    fields = _FIELDS.pack(MAGIC, VERSION, nbytes, len(text), 0)
    padded = text.ljust(nbytes - _JSON_AT, b"\0")
    return fields + _digest(fields, padded) + padded


def _digest(fields: bytes, rest: bytes) -> bytes:
    return hashlib.blake2b(fields + rest, digest_size=_DIGEST_BYTES).digest()


def is_packed_file(path: Path) -> bool:
    """Whether a path is a file that begins as a packed one does. Raises OSError."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path) -> tuple[Header, int]:
    """Read the header of a packed file and check it against the file's size. Returns the offset of the first record,
    too. Raises FormatError.
    """
    check_is_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_JSON_AT)
            nbytes, json_nbytes = _check_fields(path, head, size)
            rest = file.read(nbytes - _JSON_AT)
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {reason_of(error)}") from error
    if _digest(head[: _FIELDS.size], rest) != head[_FIELDS.size :] or any(rest[json_nbytes:]):
        raise FormatError(f"{path}: its header is damaged; {_AGAIN}")
    try:
        header = msgspec.json.decode(rest[:json_nbytes], type=Header)
        end = nbytes + sum(_checked_nbytes(layer) for layer in header.layers)
        if len({layer.key for layer in header.layers}) != len(header.layers):
            raise ValueError("a layer that is there twice")
    except ValueError as error:  # msgspec's are, too
        raise FormatError(f"{path} is not as this version writes it ({error}); {_AGAIN}") from error
    if size != end:
        how = f"has {size_of(size)} of {size_of(end)}: it was cut off" if size < end else "is longer than it should be"
        raise FormatError(f"{path} {how}; {_AGAIN}")
    return header, nbytes


def _check_fields(path: Path, head: bytes, size: int) -> tuple[int, int]:
    """Bytes of the header, and of the JSON in it. Raises FormatError."""
    if head[: len(MAGIC)] != MAGIC:
        raise FormatError(f"{path} is no file of packed experts; {_AGAIN}")
    if len(head) < _JSON_AT:
        raise FormatError(f"{path} ends within its header: it was cut off; {_AGAIN}")
    _, version, nbytes, json_nbytes, zeros = _FIELDS.unpack(head[: _FIELDS.size])
    if version != VERSION:
        by = "a newer" if version > VERSION else "an older"
        raise FormatError(f"{path} was packed by {by} version of this program ({version}, not {VERSION}); {_AGAIN}")
    if nbytes % RECORD_ALIGN or not _JSON_AT + json_nbytes <= nbytes <= _MAX_HEADER_BYTES or zeros:
        raise FormatError(f"{path}: its header is damaged; {_AGAIN}")
    if nbytes > size:
        raise FormatError(f"{path} ends within its header: it was cut off; {_AGAIN}")
    return nbytes, json_nbytes


def _checked_nbytes(layer: StoredLayer) -> int:
    """Bytes of a layer's records. Raises ValueError for a layer that this version does not write."""
    layer.record()
    if not 0 < layer.num_experts <= _MAX_EXPERTS or len(layer.checksums) != layer.num_experts:
        raise ValueError(f"{len(layer.checksums)} checksums of {layer.num_experts} experts")
    return layer.nbytes

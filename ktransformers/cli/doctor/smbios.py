"""Memory modules in the firmware's tables (SMBIOS, DMTF DSP0134): structures of type 17.

Offsets are those of the specification; shorter structures of old firmware have fewer fields. Knows no files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["MemoryModule", "memory_modules"]

_MEMORY_DEVICE, _END = 17, 127
_SIZE, _LOCATOR, _RATED, _CONFIGURED, _EXTENDED = 0x0C, 0x10, 0x15, 0x20, 0x1C
_UNKNOWN = (0, 0xFFFF)


@dataclass(frozen=True, slots=True)
class MemoryModule:
    """A slot for memory as the firmware describes it. nbytes: 0 for an empty one.

    rated, configured: MT/s, 0 where the firmware does not say.
    """

    locator: str
    nbytes: int
    rated: int
    configured: int


def memory_modules(table: bytes) -> list[MemoryModule]:
    """Return all slots in the table. One that is cut off is left out."""
    return [_module(data, strings) for kind, data, strings in _structures(table) if kind == _MEMORY_DEVICE]


def _structures(table: bytes) -> Iterator[tuple[int, bytes, list[bytes]]]:
    """(type, formatted part, strings): a header of four bytes, the rest of its length, strings up to two zeros."""
    at = 0
    while at + 4 <= len(table):
        kind, length = table[at], table[at + 1]
        end = table.find(b"\0\0", at + length)
        if length < 4 or end < 0:
            return
        yield kind, table[at : at + length], table[at + length : end].split(b"\0")
        if kind == _END:
            return
        at = end + 2


def _word(data: bytes, offset: int, layout: str = "<H") -> int:
    size = struct.calcsize(layout)
    return int(struct.unpack_from(layout, data, offset)[0]) if offset + size <= len(data) else 0


def _module(data: bytes, strings: list[bytes]) -> MemoryModule:
    size = _word(data, _SIZE)
    if size == 0x7FFF:  # in MiB, where there is more room
        nbytes = _word(data, _EXTENDED, "<I") << 20
    elif size in _UNKNOWN:
        nbytes = 0
    else:
        nbytes = (size & 0x7FFF) << (10 if size & 0x8000 else 20)
    number = data[_LOCATOR] if len(data) > _LOCATOR else 0
    locator = strings[number - 1].decode("ascii", "replace") if 0 < number <= len(strings) else ""
    rated, configured = (_word(data, offset) for offset in (_RATED, _CONFIGURED))
    return MemoryModule(locator, nbytes, rated % 0xFFFF, configured % 0xFFFF)

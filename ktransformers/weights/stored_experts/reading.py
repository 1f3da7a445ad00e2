"""Opens a packed file of experts, checks whose it is, and says where its records are."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ktransformers.errors import ConfigError, FormatError, reason_of
from ktransformers.kernels.cpu.expert_store import Extent, RecordLayout
from ktransformers.weights.stored_experts.header import Header, SourceIdentity, StoredLayer, read_header
from ktransformers.weights.stored_experts.records import as_packed, parts_of

__all__ = ["StoredExperts"]

_THREADS = 4
_READ_BYTES = 16 << 20
_SHOWN = 3


class StoredExperts:
    """A packed file of experts, opened. files: what the `path_index` of an Extent counts."""

    def __init__(self, path: Path, header: Header, start: int):
        self.files, self.header = (path,), header
        self._layers: dict[str, tuple[StoredLayer, int]] = {}
        for layer in header.layers:
            self._layers[layer.key] = (layer, start)
            start += layer.nbytes

    @classmethod
    def open(cls, path: Path, source: SourceIdentity | None) -> StoredExperts:
        """Read the file's header. source: the model that it has to be of; None: any.

        Raises FormatError for a file that is damaged, cut off or of another version, ConfigError for one of another
        model.
        """
        header, start = read_header(path)
        why = None if source is None else source.why_other(header.source)
        if why is not None:
            theirs = ", ".join(file.name for file in header.source.files[:_SHOWN])
            raise ConfigError(
                f"{path} holds the experts of another model ({theirs}): {why}; pack this one: ktransformers pack MODEL "
                "--force, or move the file away"
            )
        return cls(path, header, start)

    @property
    def path(self) -> Path:
        """Path of the packed file."""
        return self.files[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(layer.nbytes for layer in self.header.layers)

    def layer(self, key: str, wanted: RecordLayout | None = None) -> tuple[RecordLayout, list[list[Extent]]] | None:
        """Return the layout of the records of module `key`, and one extent of each expert; None when it is not there.

        wanted: the layout that the module's experts would have in memory. It is returned, for it says in which products
        tiles are multiplied. Raises ConfigError when the file has other types, as with another --cpu_quant.
        """
        found = self._layers.get(key)
        if found is None:
            return None
        layer, start = found
        record = layer.record()
        if wanted is not None and as_packed(wanted) != record:
            options = ", ".join(f"--{name} {value}" for name, value in self.header.options.items())
            raise ConfigError(
                f"{self.path} has the experts of {key} as {_words(record)}; here they are to be {_words(wanted)}. It "
                f"was packed with {options}: run with these flags, or pack again: ktransformers pack MODEL --force"
            )
        size = layer.record_nbytes
        extents = [[Extent(0, start + expert * size, size)] for expert in range(layer.num_experts)]
        return wanted or record, extents

    def verify(self, progress: Callable[[int], None] = lambda nbytes: None) -> None:
        """Read all records and compare their checksums. progress: called with bytes that were read.

        Raises FormatError that names what is damaged.
        """
        damaged = list[str]()
        try:
            with self.path.open("rb") as file, ThreadPoolExecutor(_THREADS, thread_name_prefix="kt-check") as pool:
                try:
                    for record, is_whole in pool.map(partial(_checked, file.fileno()), self._records()):
                        progress(record.nbytes)
                        if not is_whole:
                            damaged.append(record.name)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        except OSError as error:
            raise FormatError(f"{self.path} cannot be read: {reason_of(error)}") from error
        if damaged:
            more = f" and {len(damaged) - _SHOWN} more" if len(damaged) > _SHOWN else ""
            raise FormatError(
                f"{self.path} is damaged: {', '.join(damaged[:_SHOWN])}{more}; pack the model again: ktransformers "
                "pack MODEL --force, and look at the disk"
            )

    def _records(self) -> Iterator[_Record]:
        for layer, start in self._layers.values():
            for expert, checksum in enumerate(layer.checksums):
                at = start + expert * layer.record_nbytes
                yield _Record(f"expert {expert} of {layer.key}", at, layer.record_nbytes, checksum)


class _Record(NamedTuple):
    name: str
    offset: int
    nbytes: int
    checksum: str


def _checked(fd: int, record: _Record) -> tuple[_Record, bool]:
    """A record, and whether it is what was written."""
    made, end = 0, record.offset + record.nbytes
    for start in range(record.offset, end, _READ_BYTES):
        made = zlib.crc32(os.pread(fd, min(_READ_BYTES, end - start), start), made)
    os.posix_fadvise(fd, record.offset, record.nbytes, os.POSIX_FADV_DONTNEED)  # leave the cache to others
    return record, f"{made:08x}" == record.checksum


def _words(record: RecordLayout) -> str:
    return ", ".join(
        f"{name} {part.qtype.name} {part.rows} x {part.cols} {part.layout.name.lower()}"
        for name, part in parts_of(record).items()
    )

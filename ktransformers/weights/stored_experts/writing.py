"""Writes a packed file of experts: whole, or not at all.

    OUT.partial    the file to be, locked by the process that writes it, at its full size from the start: a full disk
                   shows before any work

It becomes OUT when everything is on the disk. What a process that was killed has left is begun again by the next one.
Of the experts one piece of a layer is in memory at a time, beside what its source holds.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from typing_extensions import Buffer

from ktransformers import __version__
from ktransformers.errors import CapacityError, ConfigError, reason_of
from ktransformers.kernels.cpu.base import CpuLayout
from ktransformers.kernels.cpu.expert_store import RecordLayout, RecordPart
from ktransformers.kernels.types import ExpertWeight, ExpertWeights, Fp8Matrix, RawTensor
from ktransformers.system.file_kinds import size_of
from ktransformers.weights.stored_experts.header import (
    NO_CHECKSUM,
    Header,
    SourceIdentity,
    StoredLayer,
    encode_header,
)
from ktransformers.weights.stored_experts.records import as_packed, parts_of

__all__ = ["ExpertsLayer", "write"]

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, slots=True)
class ExpertsLayer:
    """A layer that is to be written. key: name of its experts' module; number: of the layer in the model, -1: none."""

    key: str
    number: int
    num_experts: int
    record: RecordLayout

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.num_experts * self.record.nbytes


def write(
    path: Path,
    source: SourceIdentity,
    options: Mapping[str, str],
    layers: Sequence[ExpertsLayer],
    pieces: Callable[[ExpertsLayer], Iterator[ExpertWeights]],
    progress: Callable[[int], None] = lambda nbytes: None,
    check_source: Callable[[], None] = lambda: None,
) -> None:
    """Write the experts of `layers` to `path`, in the place of what is there.

    pieces: gives the experts of a layer as `pack_experts` makes them, some at a time, in their order. progress: called
    with bytes as they are written. check_source: raises where the model's files are not as they were any more; called
    behind each layer. Raises CapacityError for a full disk, ConfigError for a folder that cannot be written and while
    another process writes the same file; nothing is left then.
    """
    start, checksums = len(_encoded(source, options, layers, {})), dict[str, list[str]]()
    nbytes, at = start + sum(layer.nbytes for layer in layers), start
    with _partial_file(path, nbytes) as fd, ThreadPoolExecutor(1, thread_name_prefix="kt-sync") as syncs:
        synced: Future[None] | None = None
        for layer in layers:
            checksums[layer.key] = _write_layer(fd, layer, at, pieces(layer), progress)
            check_source()
            if synced is not None:
                synced.result()
            synced = syncs.submit(_sync, fd, at, layer.nbytes)  # beside the next layer's work
            at += layer.nbytes
        if synced is not None:
            synced.result()
        _write_at(fd, _encoded(source, options, layers, checksums), 0)


def _encoded(
    source: SourceIdentity,
    options: Mapping[str, str],
    layers: Sequence[ExpertsLayer],
    checksums: Mapping[str, Sequence[str]],
) -> bytes:
    """The header, as long without checksums as with them."""
    stored = [
        StoredLayer.of(one.key, one.number, one.record, checksums.get(one.key, [NO_CHECKSUM] * one.num_experts))
        for one in layers
    ]
    return encode_header(Header(__version__, source, dict(options), tuple(stored)))


def _write_layer(
    fd: int, layer: ExpertsLayer, at: int, pieces: Iterator[ExpertWeights], progress: Callable[[int], None]
) -> list[str]:
    """Write all experts of a layer from byte `at` on. Returns their checksums."""
    checksums = list[str]()
    for weights in pieces:
        records = _records(weights, layer)
        checksums += [f"{zlib.crc32(record.numpy()):08x}" for record in records]
        _write_at(fd, records.view(-1).numpy().data, at)
        at += records.numel()
        progress(records.numel())
    assert len(checksums) == layer.num_experts, f"{layer.key}: {len(checksums)} experts of {layer.num_experts}"
    return checksums


def _sync(fd: int, at: int, nbytes: int) -> None:
    """Put bytes on the disk and out of the system's cache, where nobody reads them again."""
    os.fdatasync(fd)
    os.posix_fadvise(fd, at, nbytes, os.POSIX_FADV_DONTNEED)


def _records(weights: ExpertWeights, layer: ExpertsLayer) -> torch.Tensor:
    """uint8 [experts, bytes of a record]. What lies between parts is 0."""
    out = torch.zeros((len(weights.up), layer.record.nbytes), dtype=torch.uint8)
    given = {"gate": weights.gate, "up": weights.up, "down": weights.down}
    for name, part in parts_of(as_packed(layer.record)).items():
        matrices = given[name]
        assert matrices is not None, f"{layer.key} has no {name}"
        for record, matrix in zip(out, matrices, strict=True):
            record[part.offset : part.offset + part.nbytes] = _data(matrix, part, layer.key)
    return out


def _data(matrix: ExpertWeight, part: RecordPart, key: str) -> torch.Tensor:
    assert not isinstance(matrix, Fp8Matrix), f"{key}: FP8 matrices are packed"
    layout = CpuLayout.ROWS if isinstance(matrix, RawTensor) else CpuLayout.TILES
    made, wanted = (matrix.qtype, *matrix.shape, layout), (part.qtype, part.rows, part.cols, part.layout)
    assert made == wanted, f"{key}: planned {wanted}, packed {made}"
    return matrix.data


def _write_at(fd: int, data: Buffer, at: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


# The file while it is written.


@contextmanager
def _partial_file(path: Path, nbytes: int) -> Iterator[int]:
    """The descriptor of a locked file of nbytes that becomes `path` at the end, and goes when there is an error."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        fd = _locked(partial)
        try:
            os.ftruncate(fd, 0)  # what a killed process has left
            _check_room(path, nbytes)
            os.posix_fallocate(fd, 0, nbytes)
            yield fd
            os.fsync(fd)
            os.replace(partial, path)
            _sync_folder(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in _FULL:
            raise _full(path, nbytes, reason_of(error)) from error
        if error.errno in _NOT_WRITABLE:
            raise ConfigError(
                f"{path.parent} cannot be written to ({reason_of(error)}); --output names another place"
            ) from error
        raise


def _locked(partial: Path) -> int:
    """Open and lock the file to write. Raises ConfigError while another process has it."""
    while True:
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(fd, partial)
            here, there = os.fstat(fd), _stat_of(partial)
            if there is not None and (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it got its name, or was removed, between being opened and being locked


def _stat_of(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _lock(fd: int, partial: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"{partial} is being written by another process; wait for it, or end it") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("%s cannot be locked (%s): do not pack the same model twice at once", partial, reason_of(error))


def _check_room(path: Path, nbytes: int) -> None:
    disk = os.statvfs(path.parent)
    free = disk.f_bavail * disk.f_frsize
    if free < nbytes:
        raise _full(path, nbytes, f"{size_of(free)} are free")


def _full(path: Path, nbytes: int, why: str) -> CapacityError:
    return CapacityError(
        f"{path.parent} has no room for {path.name} ({size_of(nbytes)}): {why}; free some, or --output names another "
        "place"
    )


def _sync_folder(folder: Path) -> None:
    """Put the file's new name on the disk. Some network file systems cannot, and need not."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        logger.debug("%s cannot be synced: %s", folder, reason_of(error))
    finally:
        os.close(fd)

"""Files of activation statistics ("importance matrices"), as llama.cpp writes and reads them.

A GGUF with general.type "imatrix" holds for each matrix of a model, by its name there:

    NAME.in_sum2   F32 [matrices, cols]  the sum over tokens of the squares of what is multiplied with each column
    NAME.counts    F32 [matrices, 1]     how many tokens that were; of experts each its own

Older files (.dat) hold, by name, the number of chunks and the sums divided by the tokens and multiplied by that number.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from ktransformers.errors import FormatError
from ktransformers.system.file_kinds import is_gguf, read_head
from ktransformers.weights.gguf.file import GGUFModel, open_gguf
from ktransformers.weights.quantize.transcode import dequantize

__all__ = ["Imatrix", "Statistics", "read_imatrix", "write_imatrix"]

F32Array = npt.NDArray[np.float32]

_MAX_NAME = 1024
_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(slots=True)
class Statistics:
    """Activation statistics of one tensor. sums: fp64 [matrices, cols]; counts: fp64 [matrices]."""

    sums: npt.NDArray[np.float64]
    counts: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Imatrix:
    """Activation statistics of a model by the names of its tensors in GGUF.

    chunk_count, chunk_size: how much text that was, in pieces of so many tokens. datasets: names of the texts.
    """

    path: Path
    tensors: Mapping[str, Statistics]
    chunk_count: int = 0
    chunk_size: int = 0
    datasets: list[str] = field(default_factory=list)

    def importance(self, name: str, matrices: int, cols: int) -> F32Array | None:
        """Return the mean squares of a tensor's columns, fp32 [matrices, cols], or [1, cols] for all. None for a tensor
        that is not here.

        An expert that no token chose weighs all columns as the others do together. Raises FormatError for another size.
        """
        found = self.tensors.get(name)
        if found is None:
            return None
        if found.sums.shape == (1, matrices * cols):  # an old file
            found = Statistics(found.sums.reshape(matrices, cols), np.repeat(found.counts, matrices))
        if found.sums.shape[1] != cols or found.sums.shape[0] not in (1, matrices):
            raise FormatError(
                f"{self.path}: {name} has statistics of {list(found.sums.shape)}, the model [{matrices}, {cols}]"
            )
        total = found.counts.sum()
        common = found.sums.sum(axis=0) / max(total, 1.0)
        counts = found.counts[:, None]
        mean = np.divide(found.sums, counts, out=np.tile(common, (len(counts), 1)), where=counts > 0)
        narrow: F32Array = mean.astype(np.float32)
        return narrow

    def described(self) -> dict[str, str | int]:
        """Return what a quantized file says of the statistics, by llama.cpp's keys."""
        values: dict[str, str | int] = {"file": self.path.name}
        if self.datasets:
            values["dataset"] = self.datasets[0]
        return {**values, "entries_count": len(self.tensors), "chunks_count": self.chunk_count}


def write_imatrix(imatrix: Imatrix) -> None:
    """Write statistics to `imatrix.path`."""
    writer = GGUFWriter(imatrix.path, "")
    writer.kv_data[0].clear()  # there is no architecture
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", imatrix.datasets)
    writer.add_uint32("imatrix.chunk_count", imatrix.chunk_count)
    writer.add_uint32("imatrix.chunk_size", imatrix.chunk_size)
    for name, found in sorted(imatrix.tensors.items()):
        writer.add_tensor(name + _SUMS, found.sums.astype(np.float32))
        writer.add_tensor(name + _COUNTS, found.counts.astype(np.float32).reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_imatrix(path: Path) -> Imatrix:
    """Return the statistics in a file of either form. Raises FormatError."""
    return _from_gguf(path, open_gguf(path)) if is_gguf(read_head(path)) else _from_dat(path, path.read_bytes())


def _from_gguf(path: Path, model: GGUFModel) -> Imatrix:
    if model.metadata.get("general.type") != "imatrix":
        raise FormatError(f"{path}: a GGUF file, but not of activation statistics (general.type is not imatrix)")
    tensors: dict[str, Statistics] = {}
    for name in model.tensors:
        if not name.endswith(_SUMS):
            continue
        base = name.removesuffix(_SUMS)
        if base + _COUNTS not in model.tensors:
            raise FormatError(f"{path}: {name} has no {base}{_COUNTS} beside it")
        sums = dequantize(model.raw(name), name).double().numpy()
        counts = dequantize(model.raw(base + _COUNTS), name).double().numpy().reshape(-1)
        sums = sums.reshape(-1, sums.shape[-1])
        if len(counts) != len(sums) or not np.isfinite(sums).all() or not (counts >= 0).all() or (sums < 0).any():
            raise FormatError(f"{path}: the statistics of {base!r:.80} are no sums of squares with their counts")
        tensors[base] = Statistics(sums, counts)
    chunk_count, chunk_size = (model.metadata.get(f"imatrix.chunk_{what}", 0) for what in ("count", "size"))
    datasets = model.metadata.get("imatrix.datasets", [])
    if type(chunk_count) is not int or type(chunk_size) is not int or not isinstance(datasets, list):
        raise FormatError(f"{path}: imatrix.chunk_count, chunk_size or datasets have another type")
    return Imatrix(path, tensors, chunk_count, chunk_size, datasets)


class _Dat:
    """A cursor over an old file's bytes."""

    def __init__(self, path: Path, data: bytes):
        self.path, self.data, self.at = path, data, 0

    def take(self, size: int) -> bytes:
        if size < 0 or size > len(self.data) - self.at:
            raise FormatError(f"{self.path}: neither a GGUF file nor a whole file of activation statistics")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self) -> int:
        value: int = struct.unpack("<i", self.take(4))[0]
        return value


def _from_dat(path: Path, data: bytes) -> Imatrix:
    """int32 entries; each: int32 length, name, int32 chunks, int32 n, n fp32; then int32 chunks, int32 length, text.

    Experts' columns stand one after the other; how many experts there are shows when a tensor asks.
    """
    reader = _Dat(path, data)
    tensors: dict[str, Statistics] = {}
    for _ in range(reader.number()):
        length = reader.number()
        if not 0 < length <= _MAX_NAME:
            raise FormatError(f"{path}: neither a GGUF file nor a whole file of activation statistics")
        name = reader.take(length).decode("utf-8", "replace")
        calls, count = reader.number(), reader.number()
        values = np.frombuffer(reader.take(4 * count), dtype="<f4").astype(np.float64)
        if not np.isfinite(values).all() or (values < 0).any() or count == 0:
            raise FormatError(f"{path}: the statistics of {name!r:.80} are no sums of squares")
        tensors[name] = Statistics(values[None], np.array([float(max(calls, 1))]))
    chunks, datasets = 0, []
    if reader.at < len(data):  # the oldest have no tail
        chunks = reader.number()
        datasets = [reader.take(reader.number()).decode("utf-8", "replace")]
    return Imatrix(path, tensors, chunks, 0, datasets)

"""Reads safetensors headers: where each tensor's bytes are. Knows nothing of models.

The layout is that of https://huggingface.co/docs/safetensors: the header's length (u64, little-endian), a JSON object
{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}, then the data, which the offsets cover
without gaps. Nothing in a header is used before it is checked against the file's size.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ktransformers.errors import FormatError
from ktransformers.system.file_kinds import (
    HEAD_BYTES,
    incomplete,
    is_gguf,
    list_folder,
    not_weights,
    size_of,
    wrong_start,
)
from ktransformers.weights.mapped_file import map_file, typed_view

__all__ = ["SafetensorsFile", "SafetensorsModel", "SafetensorsTensor", "open_safetensors"]

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_INDEX_BYTES = 100_000_000
MAX_NAME_CHARS = 1024
MAX_DIMS = 8
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """Place of one tensor: dtype by its name in the file, `offset` from the start of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A parsed safetensors file. `data` is the whole file, mapped."""

    path: Path
    tensors: Mapping[str, SafetensorsTensor]
    data: torch.Tensor

    def torch_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of one of the dtypes that weights may have, as a view of the map (a copy where
        misaligned).
        """
        tensor = self.tensors[name]
        return typed_view(self.bytes_of(name), _DTYPES[tensor.dtype]).reshape(tensor.shape)

    def bytes_of(self, name: str) -> torch.Tensor:
        """Return a tensor's bytes [nbytes], uint8, as a view of the map."""
        tensor = self.tensors[name]
        return self.data[tensor.offset : tensor.offset + tensor.nbytes]


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key occurs twice")
    return out


def _parse_json(data: bytes, what: str) -> dict[str, object]:
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise FormatError(f"{what} is not valid JSON ({str(error)[:80]}); the file is damaged or truncated") from error
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not a JSON object; the file is damaged")
    return value


def parse_file(path: Path) -> SafetensorsFile:
    """Map one file and check its whole header. Raises FormatError."""
    data = map_file(path)
    size = data.numel()
    head = bytes(data[:HEAD_BYTES].numpy())
    header_len = struct.unpack("<Q", head[:8])[0] if size >= 8 else size
    if size < 8 or header_len > MAX_HEADER_BYTES or is_gguf(head) or wrong_start(head) is not None:
        raise not_weights(path, head, "safetensors")
    if header_len > size - 8:
        raise FormatError(
            f"{path}: the header has {size_of(header_len)}, the whole file {size_of(size)}; it is truncated or "
            "damaged, download it again"
        )
    header = _parse_json(bytes(data[8 : 8 + header_len].numpy()), f"{path}: the header")
    header.pop("__metadata__", None)
    start = 8 + header_len
    tensors = {name: _tensor_info(path, name, entry, start) for name, entry in header.items()}
    needed, last = max(((tensor.offset + tensor.nbytes, name) for name, tensor in tensors.items()), default=(0, ""))
    if needed > size:
        raise incomplete(path, size, needed, ascii(last[:80]))
    _check_coverage(path, tensors, start, size)
    return SafetensorsFile(path, tensors, data)


def _tensor_info(path: Path, name: str, entry: object, start: int) -> SafetensorsTensor:
    shown = ascii(name[:80])
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise FormatError(f"{path}: a tensor's name has {len(name)} characters; 1 to {MAX_NAME_CHARS} are allowed")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{path}: tensor {shown} must have dtype, shape and data_offsets and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise FormatError(f"{path}: tensor {shown} has the unknown dtype {dtype!r:.40}")
    if not _is_counts(shape) or len(shape) > MAX_DIMS or not _is_counts(offsets) or len(offsets) != 2:
        raise FormatError(f"{path}: tensor {shown} has a shape or offsets that are not lists of counts")
    begin, end = offsets
    nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if begin > end or end - begin != nbytes:
        raise FormatError(
            f"{path}: tensor {shown} of {dtype} and shape {shape!s:.60} takes {size_of(nbytes)}, but its offsets are "
            f"{begin} to {end}; the file is damaged"
        )
    return SafetensorsTensor(name, dtype, tuple(shape), start + begin, nbytes)


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def _check_coverage(path: Path, tensors: Mapping[str, SafetensorsTensor], start: int, size: int) -> None:
    at = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != at:
            kind = "overlaps the tensor before it" if tensor.offset < at else "leaves a gap before it"
            raise FormatError(f"{path}: tensor {tensor.name[:80]!a} {kind}; the file is damaged")
        at += tensor.nbytes
    if at != size:
        raise FormatError(f"{path}: {size - at} bytes after the last tensor belong to none; the file is damaged")


class SafetensorsModel:
    """All safetensors files of one model."""

    def __init__(self, files: list[SafetensorsFile]):
        self.files = files
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.tensors:
                if name in self._file_of:
                    other = self._file_of[name].path.name
                    raise FormatError(f"{file.path}: tensor {name[:80]!a} is also in {other}")
                self._file_of[name] = file

    @property
    def tensors(self) -> dict[str, SafetensorsTensor]:
        """Return every tensor of every file, by its name."""
        return {name: file.tensors[name] for name, file in self._file_of.items()}

    def torch_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as a view of its file's map, see SafetensorsFile.torch_tensor."""
        return self._file_of[name].torch_tensor(name)

    def bytes_of(self, name: str) -> torch.Tensor:
        """Return a tensor's bytes as a view of its file's map, see SafetensorsFile.bytes_of."""
        return self._file_of[name].bytes_of(name)


def open_safetensors(path: Path | str) -> SafetensorsModel:
    """Open one file, or a folder: the files its index names, else model.safetensors, else every *.safetensors.

    Raises FormatError when a file is damaged or missing, when files and index disagree, or when an index points
    outside its folder.
    """
    path = Path(path)
    if not path.is_dir():
        return SafetensorsModel([parse_file(path)])
    if (path / INDEX_NAME).is_file():
        return _open_indexed(path)
    if (path / SINGLE_NAME).is_file():
        return SafetensorsModel([parse_file(path / SINGLE_NAME)])
    paths = [p for p in list_folder(path) if p.suffix == ".safetensors" and p.is_file()]
    if not paths:
        raise FormatError(f"{path}: holds no .safetensors file")
    return SafetensorsModel([parse_file(p) for p in paths])


def _open_indexed(folder: Path) -> SafetensorsModel:
    index_path = folder / INDEX_NAME
    if index_path.stat().st_size > MAX_INDEX_BYTES:
        raise FormatError(f"{index_path}: larger than {size_of(MAX_INDEX_BYTES)}; no index is")
    try:
        data = index_path.read_bytes()
    except OSError as error:
        raise FormatError(f"{index_path} cannot be read: {error.strerror or error}") from error
    weight_map = _parse_json(data, str(index_path)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index_path}: has no weight_map")
    for file in set(map(str, weight_map.values())):
        # A name with a separator, "..", or a drive could read any file of the user's.
        if Path(file).name != file or "\\" in file or file in (".", "..") or not file.endswith(".safetensors"):
            raise FormatError(f"{index_path}: {file[:80]!a} is not the name of a .safetensors file in this folder")
    names = sorted(set(map(str, weight_map.values())))
    if missing := [name for name in names if not (folder / name).is_file()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise FormatError(
            f"{folder}: {', '.join(missing[:3])}{more} of the {len(names)} files that {INDEX_NAME} names are missing; "
            "download them"
        )
    model = SafetensorsModel([parse_file(folder / name) for name in names])
    stored = {name: file.path.name for file in model.files for name in file.tensors}
    for name in stored.keys() | weight_map.keys():
        if stored.get(name) != weight_map.get(name):
            raise FormatError(
                f"{index_path}: says that tensor {name[:80]!a} is in {weight_map.get(name)!r:.60}, "
                f"but it is in {stored.get(name)!r:.60}"
            )
    return model

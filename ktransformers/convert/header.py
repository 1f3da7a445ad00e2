"""Header of a GGUF file, before its tensors are made: metadata with their types, and where each tensor will be.

The `gguf` package's writer packs it. Knows no model.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter

from ktransformers.kernels.types import QuantType, row_bytes
from ktransformers.weights.gguf.file import DEFAULT_ALIGNMENT, GGUFFile

__all__ = ["Entries", "GGUFLayout", "MetadataValue", "Placed", "entries_of", "entry", "lay_out"]

_ALIGNMENT = "general.alignment"
_ARCHITECTURE = "general.architecture"


@dataclass(frozen=True, slots=True)
class MetadataValue:
    """A value of the metadata and its type in the file; elements: the type of an array's elements."""

    value: Any
    kind: GGUFValueType
    elements: GGUFValueType | None = None


Entries = dict[str, MetadataValue]


def entry(value: object) -> MetadataValue:
    """Return a value with the type that llama.cpp's converter gives it: whole numbers u32, others f32; lists by their
    first.

    Raises TypeError for other values.
    """
    if isinstance(value, list):
        return MetadataValue(value, GGUFValueType.ARRAY, entry(value[0]).kind if value else GGUFValueType.STRING)
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    kind = GGUFValueType.STRING if isinstance(value, str) else kinds.get(type(value))
    if kind is None:
        raise TypeError(f"no GGUF type holds a {type(value).__name__}")
    if kind is GGUFValueType.UINT32 and value < 0:  # type: ignore[operator]
        kind = GGUFValueType.INT32
    return MetadataValue(value, kind)


def entries_of(file: GGUFFile) -> Entries:
    """Return all metadata of a file as they are. Empty arrays are left out: the format's writers refuse them."""
    found: Entries = {}
    for key, value in file.metadata.items():
        kinds = [GGUFValueType(kind) for kind in file.value_types[key]]
        plain = value.tolist() if isinstance(value, np.ndarray) else value
        if plain != []:
            found[key] = MetadataValue(plain, kinds[0], kinds[1] if len(kinds) > 1 else None)
    return found


@dataclass(frozen=True, slots=True)
class Placed:
    """Tensor with its place in a file that is to be written. shape: in torch order. offset: from the start of the file,
    in bytes.
    """

    name: str
    shape: tuple[int, ...]
    qtype: QuantType
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape[:-1]) * row_bytes(self.qtype, self.shape[-1])


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """Layout of a whole file: what comes first, padded to where the data begin, and its tensors in order. nbytes: of
    all.
    """

    header: bytes
    tensors: tuple[Placed, ...]
    nbytes: int


def lay_out(arch: str, entries: Mapping[str, MetadataValue], tensors: Sequence[Placed]) -> GGUFLayout:
    """Lay out the file with these metadata and tensors, whose offsets are filled in."""
    header = _header(arch, entries, tensors)
    found = entries.get(_ALIGNMENT)
    alignment = DEFAULT_ALIGNMENT if found is None else int(found.value)

    def aligned(at: int) -> int:
        return -(-at // alignment) * alignment

    at = aligned(len(header))
    header = header.ljust(at, b"\0")
    placed = []
    for tensor in tensors:
        placed.append(Placed(tensor.name, tensor.shape, tensor.qtype, at))
        at = aligned(at + tensor.nbytes)
    return GGUFLayout(header, tuple(placed), at)


def _header(arch: str, entries: Mapping[str, MetadataValue], tensors: Sequence[Placed]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="ktransformers-header-") as folder:
        path = Path(folder) / "header"
        writer = GGUFWriter(path, arch)
        for key, one in entries.items():
            if key == _ALIGNMENT:
                writer.add_custom_alignment(one.value)
            elif key != _ARCHITECTURE:  # the writer has it from its constructor
                writer.add_key_value(key, one.value, one.kind, one.elements)
        for tensor in tensors:
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, tensor.qtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return path.read_bytes()

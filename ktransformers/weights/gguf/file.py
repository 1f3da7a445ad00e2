"""Reads GGUF headers: metadata and where each tensor's bytes are. Knows nothing of models or of what blocks mean.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian:

    "GGUF"  version u32  tensor_count u64  kv_count u64
    kv_count    x { key string, value type u32, value }
    tensor_count x { name string, n_dims u32, dims u64 x n_dims (fastest first), type u32, offset u64 }
    padding to `general.alignment`, then the tensor data, each tensor's offset counted from here

A file is hostile until proven otherwise: every count, length and offset is checked against the bytes that are left in
the file before it is used or sizes anything, so that nothing allocated exceeds a small multiple of the file's header.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.errors import FormatError
from ktransformers.kernels.types import QuantType, RawTensor, block_size, row_bytes
from ktransformers.system.file_kinds import HEAD_BYTES, incomplete, is_drafter, is_projector, not_weights, size_of
from ktransformers.weights.mapped_file import map_file
from ktransformers.weights.ollama import gpt_oss, towers

__all__ = ["OTHER_FILE", "GGUFFile", "GGUFModel", "GGUFTensor", "MetadataValue", "beside", "open_gguf", "shown"]

MetadataValue = int | float | bool | str | list[str] | npt.NDArray[np.generic]
"""Numbers in arrays stay in a numpy array (a copy in the file's own dtype); strings become a list."""

MAX_NAME_BYTES = 1024  # ggml itself allows 64 for tensors and 65535 for keys
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SUBFOLDERS = 2  # how far below a folder its GGUF files are looked for
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")


def shown(name: str, limit: int = 80) -> str:
    """Return a name from a file as it may appear in a message: quoted, escaped, shortened."""
    return ascii(name if len(name) <= limit else name[: limit - 3] + "...")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Place of one tensor: `shape` in torch order (slowest first), `offset` from the start of its file, in bytes."""

    name: str
    shape: tuple[int, ...]
    qtype: QuantType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed GGUF file. `data` is the whole file, mapped.

    value_types: by metadata key the number of the value's type in GGUF, and of an array's elements behind it.
    """

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, GGUFTensor]
    data: torch.Tensor
    value_types: Mapping[str, tuple[int, ...]]

    def raw(self, name: str) -> RawTensor:
        """Return a tensor's bytes as a view of the mapping."""
        tensor = self.tensors[name]
        return RawTensor(self.data[tensor.offset : tensor.offset + tensor.nbytes], tensor.qtype, tensor.shape)


class _Reader:
    """A cursor over the file's bytes that never reads past their end."""

    def __init__(self, data: torch.Tensor, path: Path):
        self.bytes = data.numpy().data
        self.size = len(self.bytes)
        self.at = 0
        self.path = path

    def fail(self, what: str) -> FormatError:
        return FormatError(f"{self.path}: {what}; the file is truncated or damaged, download or convert it again")

    def take(self, nbytes: int, what: str) -> memoryview:
        if nbytes > self.size - self.at:
            left = self.size - self.at
            raise self.fail(
                f"{what} needs {size_of(nbytes)} at byte {self.at}, but {size_of(left)} of the file are left"
            )
        start = self.at
        self.at += nbytes
        return self.bytes[start : self.at]

    def number(self, code: str, what: str) -> int | float | bool:
        if code == "?":  # struct would take any byte for True
            byte = self.take(1, what)[0]
            if byte > 1:
                raise self.fail(f"{what} is a boolean with the value {byte}")
            return bool(byte)
        value: int | float = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]
        return value

    def count(self, code: str, least_bytes: int, what: str) -> int:
        """An unsigned count of things that take at least `least_bytes` bytes each."""
        value = int(self.number(code, what))
        if value > (self.size - self.at) // least_bytes:
            raise self.fail(f"{what} is {value}, more than the rest of the file can hold")
        return value

    def string(self, what: str, limit: int | None = None) -> str:
        length = int(self.number("Q", f"the length of {what}"))
        if limit is not None and length > limit:
            raise self.fail(f"{what} is {length} bytes long; at most {limit} are allowed")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not valid UTF-8 (byte {error.start})") from error

    def value(self, key: str) -> MetadataValue:
        what = f"the value of {shown(key)}"
        kind = int(self.number("I", f"the type of {shown(key)}"))
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise self.fail(f"{what} has the unknown type {kind}")
        return self.number(_SCALARS[kind], what)

    def array(self, what: str) -> MetadataValue:
        kind = int(self.number("I", f"the element type of {what}"))
        if kind == _STRING:
            return [self.string(f"an element of {what}") for _ in range(self.count("Q", 8, f"the length of {what}"))]
        if kind == _ARRAY:
            raise self.fail(f"{what} is an array of arrays, which no GGUF writer makes")
        if kind not in _SCALARS:
            raise self.fail(f"{what} has elements of the unknown type {kind}")
        dtype = np.dtype(np.uint8) if kind == _BOOL else np.dtype("<" + _SCALARS[kind])
        length = self.count("Q", dtype.itemsize, f"the length of {what}")
        values = np.frombuffer(self.take(length * dtype.itemsize, what), dtype=dtype).copy()
        if kind != _BOOL:
            return values
        if (values > 1).any():
            raise self.fail(f"{what} holds a boolean that is neither 0 nor 1")
        return values.astype(np.bool_)


def parse_file(path: Path) -> GGUFFile:
    """Map one file and check its whole header. Raises FormatError."""
    data = map_file(path)
    reader = _Reader(data, path)
    _check_magic(reader)
    tensor_count = reader.count("Q", 24, "the tensor count")
    kv_count = reader.count("Q", 13, "the metadata count")
    metadata: dict[str, MetadataValue] = {}
    value_types: dict[str, tuple[int, ...]] = {}
    for index in range(kv_count):
        key = reader.string(f"metadata key {index}", MAX_NAME_BYTES)
        if key in metadata:
            raise reader.fail(f"metadata key {shown(key)} occurs twice")
        start = reader.at
        metadata[key] = reader.value(key)
        value_types[key] = _value_type(reader, start)
    alignment = _alignment(reader, metadata)
    tensors: dict[str, GGUFTensor] = {}
    for index in range(tensor_count):
        tensor = _tensor_info(reader, index)
        if tensor.name in tensors:
            raise reader.fail(f"tensor {shown(tensor.name)} occurs twice")
        tensors[tensor.name] = tensor
    start = -(-reader.at // alignment) * alignment
    _check_complete(reader, tensors.values(), start)
    placed = {name: _placed(reader, tensor, start, alignment) for name, tensor in tensors.items()}
    _check_overlap(reader, placed)
    file = GGUFFile(path, metadata, placed, data, value_types)
    architecture = metadata.get("general.architecture")
    if architecture == towers.QWEN25VL:
        return _from_ollamas_qwen25vl(file)
    return _from_ollamas_gpt_oss(file) if architecture == gpt_oss.ARCHITECTURE else file


def _from_ollamas_qwen25vl(file: GGUFFile) -> GGUFFile:
    """The same file under the name of its architecture that llama.cpp has."""
    metadata = {towers.renamed_key(key): value for key, value in file.metadata.items()}
    value_types = {towers.renamed_key(key): kind for key, kind in file.value_types.items()}
    return replace(file, metadata={**metadata, "general.architecture": towers.QWEN2VL}, value_types=value_types)


def _from_ollamas_gpt_oss(file: GGUFFile) -> GGUFFile:
    """The same file with the names and metadata that llama.cpp's converter would have given it."""
    try:
        names = {name: gpt_oss.renamed_tensor(name) for name in file.tensors}
    except FormatError as error:
        raise FormatError(f"{file.path}: {error}") from error
    tensors = {names[name]: replace(tensor, name=names[name]) for name, tensor in file.tensors.items()}
    metadata = {gpt_oss.renamed_key(key): value for key, value in file.metadata.items()}
    value_types = {gpt_oss.renamed_key(key): kind for key, kind in file.value_types.items()}
    said = dict.fromkeys(gpt_oss.SAID, (_STRING,))
    if len(tensors) < len(file.tensors) or len(metadata) < len(file.metadata):
        raise FormatError(f"{file.path}: has names of both Ollama's and llama.cpp's gpt-oss; convert the model again")
    return replace(file, metadata={**metadata, **gpt_oss.SAID}, tensors=tensors, value_types={**value_types, **said})


def _value_type(reader: _Reader, start: int) -> tuple[int, ...]:
    """The type of the value at `start`, which was read already."""
    kind: int = struct.unpack_from("<I", reader.bytes, start)[0]
    return (kind, *struct.unpack_from("<I", reader.bytes, start + 4)) if kind == _ARRAY else (kind,)


def _check_magic(reader: _Reader) -> None:
    if bytes(reader.bytes[:4]) != b"GGUF":
        raise not_weights(reader.path, bytes(reader.bytes[:HEAD_BYTES]), "GGUF")
    reader.take(4, "the magic number")
    version = int(reader.number("I", "the version"))
    if version in (2, 3):
        return
    if version == 1:
        raise FormatError(f"{reader.path}: GGUF version 1 is not supported; convert the model again (2 and 3 are)")
    if version & 0xFFFF == 0:
        raise FormatError(f"{reader.path}: a big-endian GGUF file; only little-endian ones are supported")
    raise FormatError(f"{reader.path}: GGUF version {version} is unknown; versions 2 and 3 are supported")


def _alignment(reader: _Reader, metadata: Mapping[str, MetadataValue]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise reader.fail(f"general.alignment is {value!r:.40}, not a power of two up to {MAX_ALIGNMENT}")
    return value


def _tensor_info(reader: _Reader, index: int) -> GGUFTensor:
    """One tensor's entry; its offset is still relative to the data section."""
    name = reader.string(f"the name of tensor {index}", MAX_NAME_BYTES)
    what = f"tensor {shown(name)}"
    if not name:
        raise reader.fail(f"tensor {index} has no name")
    n_dims = int(reader.number("I", f"the dimension count of {what}"))
    if not 1 <= n_dims <= MAX_DIMS:
        raise reader.fail(f"{what} has {n_dims} dimensions; 1 to {MAX_DIMS} are allowed")
    dims = [int(reader.number("Q", f"a dimension of {what}")) for _ in range(n_dims)]
    type_id = int(reader.number("I", f"the type of {what}"))
    offset = int(reader.number("Q", f"the offset of {what}"))
    if min(dims) == 0:
        raise reader.fail(f"{what} has the empty shape {dims[::-1]}")
    try:
        qtype = QuantType(type_id)
        block = block_size(qtype)
    except (ValueError, KeyError):
        raise _unknown_type(reader.path, what, type_id) from None
    if dims[0] % block:
        raise reader.fail(f"{what} has rows of {dims[0]} elements, but {qtype.name} blocks hold {block}")
    nbytes = math.prod(dims[1:]) * row_bytes(qtype, dims[0])  # Python integers do not overflow
    return GGUFTensor(name, tuple(reversed(dims)), qtype, offset, nbytes)


_OTHER_TYPES = {
    4: "Q4_2, or MXFP4 in the order of Ollama's first gpt-oss",
    5: "Q4_3",
    42: "Q2_0",  # 64 weights of 2 bits under an fp16 scale
    **dict.fromkeys((31, 32, 33), "Q4_0 in an order of rows for some processors"),
    **dict.fromkeys((36, 37, 38), "IQ4_NL in an order of rows for some processors"),
    **dict(enumerate(("Q6_0", "IQ1_BN", "IQ2_BN"), 133)),  # from here on of ik_llama.cpp
    151: "Q8_KV",
    **dict.fromkeys(range(200, 400), "a type of ik_llama.cpp in an order of rows for some processors"),
}
"""Numbers of ggml's types that are not read and that the `gguf` package may not name."""

OTHER_FILE = "take a file of the model in another type, for instance Q4_0 or Q4_K_M"
"""What to do about a tensor whose type is not read."""


def _unknown_type(path: Path, what: str, type_id: int) -> FormatError:
    name = _OTHER_TYPES.get(type_id)
    stored = "a type of weights that is not known here" if name is None else name
    return FormatError(
        f"{path}: {what} is stored as {stored} (ggml type {type_id}), which is not supported; {OTHER_FILE}"
    )


def _check_complete(reader: _Reader, tensors: Iterable[GGUFTensor], start: int) -> None:
    """Whether the data, which begin at `start`, hold the last byte of every tensor."""
    needed, last = max(((start + tensor.offset + tensor.nbytes, tensor.name) for tensor in tensors), default=(0, ""))
    if needed > reader.size:
        raise incomplete(reader.path, reader.size, needed, shown(last))


def _placed(reader: _Reader, tensor: GGUFTensor, start: int, alignment: int) -> GGUFTensor:
    """The same tensor with its offset in the file, checked against alignment. The file holds all of it."""
    what = f"tensor {shown(tensor.name)}"
    if tensor.offset % alignment:
        raise reader.fail(f"{what} is at offset {tensor.offset}, which is not aligned to {alignment}")
    return GGUFTensor(tensor.name, tensor.shape, tensor.qtype, start + tensor.offset, tensor.nbytes)


def _check_overlap(reader: _Reader, tensors: Mapping[str, GGUFTensor]) -> None:
    previous: GGUFTensor | None = None
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if previous is not None and previous.offset + previous.nbytes > tensor.offset:
            raise reader.fail(f"tensors {shown(previous.name)} and {shown(tensor.name)} overlap")
        previous = tensor


class GGUFModel:
    """All files of one model: the first file's metadata, every file's tensors."""

    def __init__(self, files: list[GGUFFile]):
        self.files = files
        self.metadata = files[0].metadata
        self._file_of: dict[str, GGUFFile] = {}
        for file in files:
            for name in file.tensors:
                if name in self._file_of:
                    raise FormatError(f"{file.path}: tensor {shown(name)} is also in {self._file_of[name].path.name}")
                self._file_of[name] = file

    @property
    def tensors(self) -> dict[str, GGUFTensor]:
        """Return every tensor of every file, by its name, in file order."""
        return {name: file.tensors[name] for name, file in self._file_of.items()}

    @property
    def architecture(self) -> str:
        """Name of the architecture, `general.architecture`. Raises FormatError when the file does not say."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise FormatError(f"{self.files[0].path}: general.architecture is missing; this is not a model file")
        return value

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor. Raises KeyError when there is none of that name."""
        return self._file_of[name].path

    def info(self, name: str) -> GGUFTensor | None:
        """Return what the headers say of a tensor; None when there is none of that name."""
        file = self._file_of.get(name)
        return None if file is None else file.tensors[name]

    def raw(self, name: str) -> RawTensor:
        """Return a tensor's bytes as a view of the mapping. Raises KeyError when there is none of that name."""
        return self._file_of[name].raw(name)


def open_gguf(path: Path | str) -> GGUFModel:
    """Open a GGUF file, one shard of a set, or a folder that holds exactly one model, itself or in its subfolders.

    Shards ("-00001-of-00003.gguf") bring in their siblings. Raises FormatError when a file is damaged, a shard is
    missing or shards do not belong together, or a folder holds none or several models.
    """
    path = Path(path)
    if path.is_dir():
        path = _only_model_in(path)
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None:
        file = parse_file(path)
        if _split_number(file, "split.count", 1) > 1:
            raise FormatError(f"{path}: one of {file.metadata['split.count']} shards, but renamed; restore its name")
        return GGUFModel([file])
    count = int(match["count"])
    if count == 0:
        raise FormatError(f"{path}: the name says that the model has no shards")
    paths = [path.with_name(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf") for index in range(1, count + 1)]
    if missing := [p.name for p in paths if not p.exists()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise FormatError(f"{path.parent}: {', '.join(missing[:3])}{more} of {count} shards missing; download them")
    return GGUFModel(_checked_shards([parse_file(p) for p in paths]))


def gguf_files(folder: Path) -> list[Path]:
    """Return the .gguf files in `folder`, else those in its subfolders, in order: quantizers' repositories have one for
    each type of weights. Projectors for pictures (mmproj) and what drafts (mtp-) are none of a model by themselves.
    """
    patterns = ["/".join(["*"] * depth + ["*.gguf"]) for depth in range(SUBFOLDERS + 1)]
    models = (
        [path for path in folder.glob(pattern) if not (is_projector(path.name) or is_drafter(path.name))]
        for pattern in patterns
    )
    found = ([path for path in paths if path.is_file()] for paths in models)
    return sorted(next((paths for paths in found if paths), []))


def beside(path: Path, is_wanted: Callable[[str], bool], rank: Callable[[str], tuple[int, str]]) -> Path | None:
    """Return the GGUF file whose name is wanted in the folder of another one, or in the one above it, where quantizers
    put what goes with all of their types that have a folder each: of several the one of the lowest rank; None where
    there is none."""
    for folder in (path.parent, path.parent.parent):
        found = [each for each in folder.glob("*.gguf") if is_wanted(each.name) and each.is_file()]
        if found:
            return min(found, key=lambda each: rank(each.name))
    return None


def _only_model_in(folder: Path) -> Path:
    models: dict[tuple[Path, str, str], Path] = {}
    for path in gguf_files(folder):
        match = _SHARD_NAME.fullmatch(path.name)
        models.setdefault((path.parent, match["stem"], match["count"]) if match else (path, "", ""), path)
    if not models:
        raise FormatError(f"{folder}: holds no .gguf file")
    if len(models) > 1:
        names = ", ".join(path.relative_to(folder).as_posix() for path in list(models.values())[:5])
        raise FormatError(f"{folder}: holds {len(models)} GGUF models ({names}); pass the path of one file")
    return next(iter(models.values()))


def _split_number(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise FormatError(f"{file.path}: {key} is {value!r:.40}, not a count")
    return value


def _checked_shards(files: list[GGUFFile]) -> list[GGUFFile]:
    """The same files, once their split.* metadata agree with their names and with each other."""
    for index, file in enumerate(files):
        if len(files) == 1 and "split.count" not in file.metadata:
            break  # "-00001-of-00001" without split metadata is a whole file
        if _split_number(file, "split.count", 0) != len(files):
            raise FormatError(f"{file.path}: its metadata say {file.metadata.get('split.count')!r:.20} shards, "
                              f"its name {len(files)}; the files do not belong together")  # fmt: skip
        if _split_number(file, "split.no", len(files)) != index:
            raise FormatError(f"{file.path}: its metadata say shard {file.metadata.get('split.no')!r:.20} (from 0), "
                              f"its name {index}; the files were renamed")  # fmt: skip
    total = sum(len(file.tensors) for file in files)
    expected = _split_number(files[0], "split.tensors.count", total)
    if expected != total:
        raise FormatError(f"{files[0].path}: the shards hold {total} tensors, but should hold {expected}")
    return files

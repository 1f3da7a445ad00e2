"""The GGUF parser: what it reads from good files, and that each kind of damage is refused and named."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from ktransformers.errors import FormatError, UnsupportedError
from ktransformers.kernels.cpu import NATIVE_TYPES
from ktransformers.kernels.formats import FORMATS
from ktransformers.kernels.types import QuantType
from ktransformers.models.facts import ModelFacts
from ktransformers.weights.gguf.file import open_gguf, shown
from ktransformers.weights.gguf.source import GGUFSource
from tests.support.models.tiny_models import tiny_config


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def kv(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_bytes(
    kvs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    version: int = 3,
    magic: bytes = b"GGUF",
    alignment: int = 32,
) -> bytes:
    kvs, tensors = kvs or [], tensors or []
    head = magic + struct.pack("<IQQ", version, len(tensors), len(kvs)) + b"".join(kvs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def write(folder: Path, content: bytes, name: str = "m.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint64("a.big", (1 << 64) - 1)
    writer.add_int8("a.small", -128)
    writer.add_float32("a.float", 0.5)
    writer.add_float64("a.double", 1e300)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "grüße 你好")
    writer.add_array("a.texts", ["x", "", "é"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.bools", [True, False])
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    blocks = np.arange(2 * 68, dtype=np.uint8).reshape(2, 68)
    writer.add_tensor("t", values)
    writer.add_tensor("q", blocks, raw_dtype=QuantType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = open_gguf(path)
    m = model.metadata
    assert model.architecture == m["general.architecture"] == "llama"
    assert (m["a.big"], m["a.small"], m["a.float"], m["a.double"]) == ((1 << 64) - 1, -128, 0.5, 1e300)
    assert m["a.bool"] is True
    assert (m["a.text"], m["a.texts"]) == ("grüße 你好", ["x", "", "é"])
    assert m["a.ints"].tolist() == [1, -2, 3]
    assert m["a.bools"].tolist() == [True, False]
    assert m["a.bools"].dtype == np.bool_
    assert model.tensors["t"].shape == (2, 3, 4)
    assert (model.raw("t").data.numpy().view(np.float32) == values.reshape(-1)).all()
    assert (model.tensors["q"].shape, model.tensors["q"].qtype) == ((2, 64), QuantType.Q8_0)
    assert (model.raw("q").data.numpy() == blocks.reshape(-1)).all()


def test_version_2_and_other_alignments(tmp_path: Path) -> None:
    kvs = [kv("general.alignment", 4, struct.pack("<I", 64))]
    content = file_bytes(
        kvs, [tensor("a", [2], 0, 0), tensor("b", [1], 0, 64)], bytes(64) + b"\0\0\x80?", 2, alignment=64
    )
    model = open_gguf(write(tmp_path, content))
    assert model.raw("b").data.numpy().view(np.float32).tolist() == [1.0]


ONE = tensor("blk.0.x", [4])
DATA = bytes(16)
BROKEN = {
    "empty": (b"", "is empty"),
    "short": (b"GG", "not a GGUF file: it begins with 'GG'"),
    "magic": (file_bytes(magic=b"GGML"), "not a GGUF file"),
    "version 1": (file_bytes(version=1), "version 1 is not supported"),
    "version 9": (file_bytes(version=9), "version 9 is unknown"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "no counts": (b"GGUF\3\0\0\0", "tensor count"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0), "tensor count is 9223372036854775808"),
    "kv count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "metadata count"),
    "key length": (file_bytes([struct.pack("<QI", 1 << 62, 4)]), "metadata key 0"),
    "long key": (file_bytes([kv("k" * 2000, 0, b"\0")]), "2000 bytes long"),
    "key not utf-8": (file_bytes([kv(b"\xff\xfe", 0, b"\0")]), "not valid UTF-8"),
    "key twice": (file_bytes([kv("k", 0, b"\0")] * 2), "'k' occurs twice"),
    "value type": (file_bytes([kv("k", 13, b"\0")]), "unknown type 13"),
    "boolean": (file_bytes([kv("k", 7, b"\2")]), "boolean with the value 2"),
    "string length": (file_bytes([kv("k", 8, struct.pack("<Q", (1 << 64) - 1))]), "value of 'k'"),
    "array length": (file_bytes([kv("k", 9, struct.pack("<IQ", 4, 1 << 60))]), "length of the value of 'k'"),
    "string array length": (file_bytes([kv("k", 9, struct.pack("<IQ", 8, 1 << 60))]), "length of the value of 'k'"),
    "array of arrays": (file_bytes([kv("k", 9, struct.pack("<IQ", 9, 1))]), "array of arrays"),
    "element type": (file_bytes([kv("k", 9, struct.pack("<IQ", 99, 1))]), "elements of the unknown type 99"),
    "boolean array": (file_bytes([kv("k", 9, struct.pack("<IQ", 7, 2) + b"\1\3")]), "neither 0 nor 1"),
    "alignment 0": (file_bytes([kv("general.alignment", 4, bytes(4))]), "alignment is 0"),
    "alignment 48": (file_bytes([kv("general.alignment", 4, b"\x30\0\0\0")]), "alignment is 48"),
    "alignment huge": (file_bytes([kv("general.alignment", 4, b"\0\0\0\x80")]), "not a power of two up to"),
    "alignment text": (file_bytes([kv("general.alignment", 8, text("32"))]), "alignment is '32'"),
    "no name": (file_bytes(tensors=[tensor("", [4])], data=DATA), "has no name"),
    "no dims": (file_bytes(tensors=[tensor("a", [])], data=DATA), "0 dimensions"),
    "five dims": (file_bytes(tensors=[tensor("a", [1] * 5)], data=DATA), "5 dimensions"),
    "empty shape": (file_bytes(tensors=[tensor("a", [4, 0])], data=DATA), r"empty shape \[0, 4\]"),
    "overflowing shape": (file_bytes(tensors=[tensor("a", [1 << 33, 1 << 33])], data=DATA), "more than 1 EiB missing"),
    "type": (file_bytes(tensors=[tensor("a", [4], 4)], data=DATA), r"'a' is stored as Q4_2, or .* \(ggml type 4\)"),
    "Q2_0": (file_bytes(tensors=[tensor("a", [64], 42)], data=bytes(18)), r"'a' is stored as Q2_0 \(ggml type 42\)"),
    "Q8_KV": (file_bytes(tensors=[tensor("a", [256], 151)], data=bytes(264)), r"stored as Q8_KV \(ggml type 151\)"),
    "rows side by side": (file_bytes(tensors=[tensor("a", [256], 339)], data=bytes(999)), "stored as a type of ik_l"),
    "rows for ARM": (file_bytes(tensors=[tensor("a", [32], 31)], data=bytes(18)), "'a' is stored as Q4_0 in an order"),
    "half a block": (file_bytes(tensors=[tensor("a", [33], 8)], data=bytes(68)), "Q8_0 blocks hold 32"),
    "misaligned": (file_bytes(tensors=[tensor("a", [4], 0, 4)], data=bytes(64)), "not aligned to 32"),
    "offset": (file_bytes(tensors=[tensor("a", [4], 0, 1 << 62)], data=DATA), "truncated or damaged"),
    "truncated": (file_bytes(tensors=[ONE], data=DATA[:-1]), r"1 byte missing of the 80 bytes .* 'blk\.0\.x'"),
    "name twice": (file_bytes(tensors=[ONE, ONE], data=DATA), r"'blk\.0\.x' occurs twice"),
    "overlap": (file_bytes(tensors=[tensor("a", [9]), tensor("b", [4], 0, 32)], data=bytes(64)), "'a' and 'b' overlap"),
    "escape": (file_bytes(tensors=[tensor("\x1b[31m\n", [5])], data=b""), r"'\\x1b\[31m\\n'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_damage_is_refused(case: str, tmp_path: Path) -> None:
    content, message = BROKEN[case]
    path = write(tmp_path, content)
    with pytest.raises(FormatError, match=message) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)


def test_names_in_messages_are_escaped_and_short() -> None:
    assert shown("a\n\x1b") == r"'a\n\x1b'"
    assert len(shown("x" * 1000)) == 82


def shard(index: int, count: int, names: list[str], total: int | None = None) -> bytes:
    kvs = [kv("split.no", 2, struct.pack("<H", index)), kv("split.count", 2, struct.pack("<H", count))]
    if total is not None:
        kvs.append(kv("split.tensors.count", 5, struct.pack("<i", total)))
    return file_bytes(kvs, [tensor(name, [4], 0, 32 * i) for i, name in enumerate(names)], bytes(32 * len(names)))


def test_shards(tmp_path: Path) -> None:
    first = write(tmp_path, shard(0, 2, ["a"], 3), "m-00001-of-00002.gguf")
    with pytest.raises(FormatError, match=r"m-00002-of-00002\.gguf of 2 shards missing"):
        open_gguf(first)
    second = write(tmp_path, shard(1, 2, ["b", "c"]), "m-00002-of-00002.gguf")
    for path in (first, second, tmp_path):
        assert list(open_gguf(path).tensors) == ["a", "b", "c"]
    for content, message in (
        (shard(0, 2, ["b", "c"]), "metadata say shard 0"),
        (shard(1, 3, ["b", "c"]), "metadata say 3 shards"),
        (shard(1, 2, ["b"]), "hold 2 tensors, but should hold 3"),
        (shard(1, 2, ["a", "c"]), "'a' is also in m-00001-of-00002"),
        (file_bytes(), "metadata say None shards"),
    ):
        second.write_bytes(content)
        with pytest.raises(FormatError, match=message):
            open_gguf(first)
    renamed = write(tmp_path, first.read_bytes(), "renamed.gguf")
    with pytest.raises(FormatError, match="one of 2 shards, but renamed"):
        open_gguf(renamed)
    with pytest.raises(FormatError, match="says that the model has no shards"):
        open_gguf(write(tmp_path, file_bytes(), "m-00000-of-00000.gguf"))


def test_rows_with_a_scale_in_front_of_their_blocks(tmp_path: Path) -> None:
    """A row of IQ4_KS is 4 bytes, then 136 for each 256 weights; one byte less is a truncated file."""
    tensors = [tensor("a", [512, 3], 144), tensor("b", [4], 0, 832)]
    data = bytes(range(256)) * 4
    model = open_gguf(write(tmp_path, file_bytes([kv("general.architecture", 8, text("llama"))], tensors, data[:848])))
    raw = model.raw("a")
    assert (raw.qtype, raw.shape, raw.row_bytes, raw.nbytes) == (QuantType.IQ4_KS, (3, 512), 276, 828)
    assert bytes(raw.data.numpy()) == data[:828]
    with pytest.raises(FormatError, match="'b' overlap"):
        open_gguf(write(tmp_path, file_bytes([], [tensors[0], tensor("b", [4], 0, 800)], data), "overlap.gguf"))


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"holds no \.gguf file"):
        open_gguf(tmp_path)
    write(tmp_path, file_bytes(), "a.gguf")
    assert open_gguf(tmp_path).files[0].path.name == "a.gguf"
    write(tmp_path, file_bytes(), "b.gguf")
    with pytest.raises(FormatError, match=r"holds 2 GGUF models \(a\.gguf, b\.gguf\)"):
        open_gguf(tmp_path)


def test_unreadable_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="No such file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(FormatError, match=r"general\.architecture is missing"):
        _ = open_gguf(write(tmp_path, file_bytes())).architecture


@pytest.mark.parametrize("number", sorted({*range(61), *(near for n in FORMATS for near in (n - 1, n, n + 1))} - {-1}))
def test_every_type_is_read_or_refused_in_one_line(number: int, tmp_path: Path) -> None:
    """Which says the tensor, its type, the file and what to do; numbers that ggml has not given yet included."""
    heads = [kv("general.architecture", 8, text("llama"))]
    path = write(tmp_path, file_bytes(heads, [tensor("output.weight", [256], number)], data=bytes(2048)))
    try:
        GGUFSource(open_gguf(path), ModelFacts.of(tiny_config("llama")))
    except (FormatError, UnsupportedError) as error:
        said, names = str(error), {kind.value: kind.name for kind in QuantType}
        assert "\n" not in said
        assert said.startswith(f"{path}: tensor 'output.weight' is stored as ")
        assert names.get(number, f"(ggml type {number})") in said
        assert said.endswith("; take a file of the model in another type, for instance Q4_0 or Q4_K_M")
    else:
        assert QuantType(number) in NATIVE_TYPES

"""The safetensors parser: each kind of damage is refused with a message that names it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ktransformers.errors import FormatError
from ktransformers.weights.safetensors.file import open_safetensors


def file_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


GOOD = {"a": entry()}
BROKEN = {
    "empty": (b"", "is empty"),
    "short": (b"1234567", "not a safetensors file: it begins with '1234567'"),
    "header length": (file_bytes(GOOD, bytes(8), length=1 << 60), "begins with the bytes 00 00 00"),
    "truncated header": (file_bytes(GOOD)[:20], "the header has"),
    "not json": (file_bytes(b"{]"), "not valid JSON"),
    "not utf-8": (file_bytes(b'{"\xff": 1}'), "not valid JSON"),
    "not an object": (file_bytes([1]), "not a JSON object"),
    "deep": (file_bytes(b"[" * 100_000), "not valid JSON"),
    "long number": (file_bytes(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "name twice": (file_bytes(b'{"a": {}, "a": {}}'), "occurs twice"),
    "no name": (file_bytes({"": entry()}, bytes(8)), "name has 0 characters"),
    "long name": (file_bytes({"n" * 2000: entry()}, bytes(8)), "name has 2000 characters"),
    "entry": (file_bytes({"a": 3}), "'a' must have dtype"),
    "missing key": (file_bytes({"a": {"dtype": "F32", "shape": []}}), "'a' must have dtype"),
    "extra key": (file_bytes({"a": entry() | {"x": 1}}, bytes(8)), "nothing else"),
    "dtype": (file_bytes({"a": entry("F31")}, bytes(8)), "unknown dtype 'F31'"),
    "dtype number": (file_bytes({"a": entry(3)}, bytes(8)), "unknown dtype 3"),
    "negative dim": (file_bytes({"a": entry(shape=[-2])}, bytes(8)), "not lists of counts"),
    "float dim": (file_bytes({"a": entry(shape=[2.0])}, bytes(8)), "not lists of counts"),
    "true dim": (file_bytes({"a": entry(shape=[True, 2])}, bytes(8)), "not lists of counts"),
    "many dims": (file_bytes({"a": entry(shape=[1] * 8 + [2])}, bytes(8)), "not lists of counts"),
    "three offsets": (file_bytes({"a": entry(offsets=[0, 8, 8])}, bytes(8)), "not lists of counts"),
    "shape and size": (file_bytes({"a": entry(shape=[3])}, bytes(8)), "takes 12 bytes"),
    "overflow": (file_bytes({"a": entry(shape=[1 << 62, 1 << 62])}, bytes(8)), "its offsets are 0 to 8"),
    "backwards": (file_bytes({"a": entry(offsets=[8, 0])}, bytes(8)), "its offsets are 8 to 0"),
    "past the end": (file_bytes(GOOD, bytes(7)), "1 byte missing"),
    "gap": (file_bytes({"a": entry(offsets=[4, 12])}, bytes(12)), "leaves a gap"),
    "overlap": (file_bytes({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)), "'b' overlaps"),
    "rest": (file_bytes(GOOD, bytes(9)), "1 bytes after the last tensor"),
    "escape": (file_bytes({"\x1b[31m\n": 3}), r"'\\x1b\[31m\\n'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_damage_is_refused(case: str, tmp_path: Path) -> None:
    content, message = BROKEN[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message) as caught:
        open_safetensors(tmp_path)
    assert str(path) in str(caught.value)


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),  # shifts the others to odd addresses
        "f32": torch.randn(2, 3),
        "bf16": torch.randn(3).bfloat16(),
        "fp8": torch.randn(2, 2).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
    }
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    model = open_safetensors(tmp_path)
    assert set(model.tensors) == set(tensors)
    assert model.bytes_of("odd").tolist() == [0, 1, 2]
    for name in ("f32", "bf16", "fp8", "empty"):
        assert torch.equal(model.torch_tensor(name).float(), tensors[name].float())


def test_misaligned_tensors_are_copied_not_refused(tmp_path: Path) -> None:
    values = torch.randn(5)
    header = {"a": entry("U8", [3], [0, 3]), "b": entry("F32", [5], [3, 23])}
    for padding in range(4):  # of the header, so that every address modulo 4 occurs
        text = json.dumps(header).encode() + b" " * padding
        (tmp_path / "model.safetensors").write_bytes(file_bytes(text, bytes(3) + values.numpy().tobytes()))
        assert torch.equal(open_safetensors(tmp_path).torch_tensor("b"), values)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"holds no \.safetensors file"):
        open_safetensors(tmp_path)
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    safetensors.torch.save_file({"b": torch.ones(1)}, tmp_path / "y.safetensors")
    assert set(open_safetensors(tmp_path).tensors) == {"a", "b"}
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "z.safetensors")
    with pytest.raises(FormatError, match=r"'a' is also in x\.safetensors"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("header_len", [0x80 + 256 * 2, 0x1F + 256 * 0x8B, 0x42 + 256 * 0x5A])
def test_a_headers_length_may_look_like_another_files_first_bytes(header_len: int, tmp_path: Path) -> None:
    """A pickle's, gzip's, bzip2's."""
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(header_len)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", header_len) + header + struct.pack("<f", 2.5))
    assert open_safetensors(path).torch_tensor("a").tolist() == [2.5]

"""A packed file that is not what was written is an error that says so: any damaged byte, any length, other versions."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ktransformers.errors import ConfigError, FormatError
from ktransformers.weights.stored_experts import header as header_module
from ktransformers.weights.stored_experts.header import Header, SourceFile, SourceIdentity, encode_header, read_header
from ktransformers.weights.stored_experts.reading import StoredExperts
from ktransformers.weights.stored_experts.writing import write
from tests.weights.stored_experts.test_writing import LAYERS, RECORD, SOURCE, pieces


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "a.kt", SOURCE, {"cpu_quant": "q4_k"}, LAYERS, pieces)
    return tmp_path / "a.kt"


def check(path: Path) -> None:
    StoredExperts.open(path, SOURCE).verify()


def test_any_damaged_byte_is_found(path: Path, random_cases: Callable[[int, int], int]) -> None:
    """In fields, JSON, padding, matrices, between them and behind them."""
    check(path)
    data, draw = path.read_bytes(), random.Random(0)
    _, start = read_header(path)
    places = [*range(60), start - 1, start, start + 9599, start + 9600, start + 12287, len(data) - 1]
    places += [draw.randrange(len(data)) for _ in range(random_cases(200, 20_000))]
    with path.open("r+b", buffering=0) as file:
        for place in places:
            file.seek(place)
            file.write(bytes([data[place] ^ 1 << draw.randrange(8)]))
            with pytest.raises(FormatError, match=str(path)):
                check(path)
            file.seek(place)
            file.write(data[place : place + 1])
    check(path)


def test_what_is_damaged_is_named(path: Path) -> None:
    start, data = read_header(path)[1], bytearray(path.read_bytes())
    for expert in (0, 3, 7, 9, 17):
        data[start + expert * RECORD.nbytes + 5] ^= 4
    path.write_bytes(data)
    named = "expert 0 of layers.0.experts, expert 3 of layers.0.experts, expert 1 of layers.1.experts and 2 more"
    with pytest.raises(FormatError, match=f"is damaged: {named}; pack the model again: ktransformers pack MODEL"):
        check(path)


def test_a_file_of_any_other_length_is_refused(path: Path) -> None:
    data = path.read_bytes()
    start = read_header(path)[1]
    for nbytes in (0, 1, 7, 8, 20, 55, 56, 57, start - 1, start, start + 1, len(data) - 4096, len(data) - 1):
        path.write_bytes(data[:nbytes])
        with pytest.raises(FormatError, match=r"cut off|no file of packed experts"):
            StoredExperts.open(path, SOURCE)
    path.write_bytes(data + bytes(4096))
    with pytest.raises(FormatError, match="is longer than it should be"):
        StoredExperts.open(path, SOURCE)


def test_another_version_is_refused(path: Path) -> None:
    data = path.read_bytes()
    for version, wanted in ((2, "a newer version of this program"), (0, "an older version")):
        path.write_bytes(data[:8] + struct.pack("<I", version) + data[12:])
        with pytest.raises(FormatError, match=f"{wanted}.*pack the model again: ktransformers pack MODEL --force"):
            StoredExperts.open(path, SOURCE)


def _with(path: Path, change: Callable[[Header], Header]) -> None:
    """A header that is whole, and says something else."""
    found, start = read_header(path)
    path.write_bytes(encode_header(change(found)) + path.read_bytes()[start:])


_replace = msgspec.structs.replace


def _part(found: Header, **values: object) -> Header:
    layer = found.layers[0]
    parts = layer.parts | {"up": _replace(layer.parts["up"], **values)}
    return _replace(found, layers=(_replace(layer, parts=parts), *found.layers[1:]))


CHANGES: dict[str, Callable[[Header], Header]] = {
    "a type of the future": lambda found: _part(found, type="Q9_Z"),
    "a layout of the future": lambda found: _part(found, layout="TILES_32"),
    "rows of another number": lambda found: _part(found, rows=41),
    "no rows": lambda found: _part(found, rows=0),
    "more rows than memory": lambda found: _part(found, rows=1 << 62),
    "columns that are no blocks": lambda found: _part(found, type="Q4_K"),
    "another offset": lambda found: _part(found, offset=64),
    "another size": lambda found: _part(found, nbytes=10),
    "no up": lambda found: _replace(
        found, layers=(_replace(found.layers[0], parts={"down": found.layers[0].parts["down"]}), *found.layers[1:])
    ),
    "a layer twice": lambda found: _replace(found, layers=(found.layers[0], found.layers[0], found.layers[2])),
    "records of another size": lambda found: _replace(
        found, layers=(_replace(found.layers[0], record_nbytes=8192), *found.layers[1:])
    ),
    "more experts than checksums": lambda found: _replace(
        found, layers=(_replace(found.layers[0], num_experts=7), *found.layers[1:])
    ),
    "experts without end": lambda found: _replace(
        found, layers=(_replace(found.layers[0], num_experts=1 << 40), *found.layers[1:])
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_header_that_cannot_be_is_refused(kind: str, path: Path) -> None:
    _with(path, CHANGES[kind])
    with pytest.raises(FormatError, match="is not as this version writes it"):
        StoredExperts.open(path, SOURCE)


def test_json_that_is_none_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = path.read_bytes()
    for text in (b"", b"[]", b"{", b'{"made_by": 1}', b"\xff" * 9, b"[" * 100_000):
        monkeypatch.setattr(header_module.msgspec.json, "encode", lambda header, text=text: text)
        path.write_bytes(encode_header(read_header_of_bytes(data, path)))
        monkeypatch.undo()
        with pytest.raises(FormatError, match="is not as this version writes it"):
            read_header(path)


def read_header_of_bytes(data: bytes, path: Path) -> Header:
    path.write_bytes(data)
    return read_header(path)[0]


def test_whose_it_is(path: Path) -> None:
    """Names of files do not matter, nor their order; sizes, tensors and numbers do."""
    StoredExperts.open(path, SourceIdentity((SourceFile("other name", 7),), "tensors", "sample"))
    for other, why in (
        (SourceIdentity((SourceFile("m.gguf", 8),), "tensors", "sample"), "their tensors differ"),
        (SourceIdentity((SourceFile("m.gguf", 7),), "others", "sample"), "their tensors differ"),
        (SourceIdentity((SourceFile("m.gguf", 7),), "tensors", "other"), "the same tensors with other numbers"),
    ):
        with pytest.raises(ConfigError, match=rf"experts of another model \(m.gguf\): .*{why}; pack this one: ktr"):
            StoredExperts.open(path, other)


def test_layers_that_there_are(path: Path) -> None:
    stored = StoredExperts.open(path, SOURCE)
    assert stored.layer("layers.3.experts") is None
    found = stored.layer("layers.1.experts", RECORD)
    assert found is not None
    start = read_header(path)[1] + 6 * RECORD.nbytes
    assert [(extent.path_index, extent.offset, extent.nbytes) for (extent,) in found[1]] == [
        (0, start + expert * RECORD.nbytes, RECORD.nbytes) for expert in range(6)
    ]
    assert stored.files == (path,)
    assert stored.nbytes == 18 * RECORD.nbytes


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read: No such file"):
        StoredExperts.open(tmp_path / "none.kt", None)
    with pytest.raises(FormatError, match="is not a file"):
        StoredExperts.open(tmp_path, None)

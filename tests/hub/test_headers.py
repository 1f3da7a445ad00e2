"""Plans from headers that came by HTTP ranges."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformers.config import DEMO_MODEL_PATH
from ktransformers.errors import FormatError
from ktransformers.hub import headers
from ktransformers.hub.headers import fetch_headers
from ktransformers.hub.names import parse_name
from ktransformers.hub.remote import list_repository
from ktransformers.hub.variants import find_variants
from ktransformers.weights.gguf.file import parse_file as parse_gguf
from ktransformers.weights.safetensors.file import parse_file as parse_safetensors
from tests.support.gguf.writer import write_gguf
from tests.support.models.demo import DEMO_CHECKPOINT
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.hub_server import HubServer, Repo

DEMO = DEMO_MODEL_PATH / "demo-Q4_K_M.gguf"


def fetched(name: str, folder: Path) -> Path:
    repository = list_repository(parse_name(name))
    return fetch_headers(repository, find_variants(repository.files)[0], folder)


def test_a_gguf_header_is_read_on_until_it_is_whole(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "FIRST_READ", 1000)
    hub.repos["org/demo"] = Repo({DEMO.name: DEMO.read_bytes()})
    made, real = parse_gguf(fetched("org/demo", tmp_path)), parse_gguf(DEMO)
    assert dict(made.tensors) == dict(real.tensors)
    assert made.metadata.keys() == real.metadata.keys()
    assert made.metadata["tokenizer.ggml.tokens"] == real.metadata["tokenizer.ggml.tokens"]
    assert made.data.numel() == real.data.numel()
    bodies = hub.bodies(DEMO.name)
    assert [body.range for body in bodies[:2]] == ["bytes=0-999", "bytes=1000-3999"]
    begin = min(tensor.offset for tensor in real.tensors.values())
    assert begin <= sum(body.sent for body in bodies) < headers.GROWTH * begin < DEMO.stat().st_size


def test_no_beginning_of_a_header_is_taken_for_the_whole(tmp_path: Path) -> None:
    """Zeros after the bytes that were read are valid names, counts and types, so they must not count."""
    path = write_gguf(tiny_model("llama"), tmp_path / "model.gguf")
    data = path.read_bytes()
    begin = min(tensor.offset for tensor in parse_gguf(path).tensors.values())
    for read in range(8, begin, 7):
        path.write_bytes(data[:read] + bytes(len(data) - read))
        assert headers._error_of(path, read) is not None, read
    path.write_bytes(data[:begin] + bytes(len(data) - begin))
    assert headers._error_of(path, begin) is None


def test_safetensors_headers(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "FIRST_READ", 16)
    real = DEMO_CHECKPOINT / "model.safetensors"
    names = ("config.json", "model.safetensors")
    hub.repos["org/demo"] = Repo({name: (DEMO_CHECKPOINT / name).read_bytes() for name in names}, frozenset(names[:1]))
    folder = fetched("org/demo", tmp_path)
    assert folder == tmp_path
    assert (folder / "config.json").read_bytes() == (DEMO_CHECKPOINT / "config.json").read_bytes()
    assert dict(parse_safetensors(folder / real.name).tensors) == dict(parse_safetensors(real).tensors)
    assert sum(body.sent for body in hub.bodies(real.name)) < real.stat().st_size // 10


def test_what_is_no_gguf_is_found_with_the_first_bytes(hub: HubServer, tmp_path: Path) -> None:
    hub.repos["org/text"] = Repo({"model-Q8_0.gguf": b"<html>" * 10**6})
    with pytest.raises(FormatError, match="is an HTML page"):
        fetched("org/text", tmp_path)
    assert [body.sent for body in hub.bodies("model-Q8_0.gguf")] == [headers.FIRST_READ]

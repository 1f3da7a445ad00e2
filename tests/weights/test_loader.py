"""open_source decides by content, and says so when it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformers.errors import ConfigError, FormatError
from ktransformers.weights.gguf_source import GGUFSource
from ktransformers.weights.loader import open_source, weight_format
from ktransformers.weights.safetensors_source import SafetensorsSource
from tests.support.gguf_writer import write_gguf
from tests.support.tiny_models import tiny_model, write_safetensors


def test_formats(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = write_safetensors(model, tmp_path / "st")
    path = write_gguf(model, tmp_path / "gguf.bin")  # the name does not matter
    assert isinstance(open_source(folder, model.config), SafetensorsSource)
    assert isinstance(open_source(folder / "model.safetensors", model.config), SafetensorsSource)
    assert isinstance(open_source(path, model.config), GGUFSource)
    path = path.rename(tmp_path / "m.gguf")
    assert isinstance(open_source(tmp_path, model.config), GGUFSource)


def test_folders_with_both_formats_or_none(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(FormatError, match="empty folder"):
        weight_format(tmp_path)
    write_safetensors(model, tmp_path)
    write_gguf(model, tmp_path / "m.gguf")
    with pytest.raises(FormatError, match="both GGUF and safetensors"):
        open_source(tmp_path, model.config)
    assert isinstance(open_source(tmp_path, model.config, prefer="safetensors"), SafetensorsSource)
    assert isinstance(open_source(tmp_path, model.config, prefer="gguf"), GGUFSource)


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_source(tmp_path / "none", tiny_model("llama").config)

"""weight_format decides by content, and says so when it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformers.errors import ConfigError, FormatError
from ktransformers.weights.gguf.file import open_gguf
from ktransformers.weights.loader import weight_format
from tests.support.gguf.writer import write_gguf
from tests.support.models.tiny_models import tiny_model, write_safetensors


def test_formats(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = write_safetensors(model, tmp_path / "st")
    path = write_gguf(model, tmp_path / "gguf.bin")  # the name does not matter
    assert weight_format(folder) == "safetensors"
    assert weight_format(folder / "model.safetensors") == "safetensors"
    assert weight_format(path) == "gguf"
    path = path.rename(tmp_path / "m.gguf")
    assert weight_format(tmp_path) == "gguf"


def test_folders_with_both_formats_or_none(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(FormatError, match="empty folder"):
        weight_format(tmp_path)
    write_safetensors(model, tmp_path)
    write_gguf(model, tmp_path / "m.gguf")
    with pytest.raises(FormatError, match="both GGUF and safetensors"):
        weight_format(tmp_path)
    assert weight_format(tmp_path, prefer="safetensors") == "safetensors"
    assert weight_format(tmp_path, prefer="gguf") == "gguf"


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        weight_format(tmp_path / "none")


def test_gguf_in_a_subfolder(tmp_path: Path) -> None:
    """As repositories of quantizers are downloaded: a folder for each quantization, shards in it."""
    model = tiny_model("llama")
    (tmp_path / "config.json").write_text("{}")
    folder = tmp_path / "repo" / "UD-Q2_K_XL"
    folder.mkdir(parents=True)
    write_gguf(model, folder / "m-00001-of-00001.gguf")
    for path in (tmp_path, tmp_path / "repo", folder):
        assert weight_format(path) == "gguf"


def test_several_models_in_subfolders_are_listed(tmp_path: Path) -> None:
    model = tiny_model("llama")
    for name in ("Q4_K_M", "Q8_0"):
        (tmp_path / name).mkdir()
        write_gguf(model, tmp_path / name / "m-00001-of-00001.gguf")
    with pytest.raises(FormatError, match=r"holds 2 GGUF models \(Q4_K_M/m-00001-of-00001\.gguf, Q8_0/m-00001"):
        open_gguf(tmp_path)


def test_subfolders_count_where_the_folder_has_no_weights(tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_safetensors(model, tmp_path)
    folder = tmp_path / "1" / "2" / "3"
    folder.mkdir(parents=True)
    write_gguf(model, folder / "m.gguf")
    assert weight_format(tmp_path) == "safetensors"
    assert weight_format(tmp_path / "1") == "gguf"
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FormatError, match="neither"):  # so deep below, it is not this folder's model
        weight_format(tmp_path)

"""Digests of pictures: equal for equal pixels under equal settings, in any process; different for all that decides."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ktransformers.media import processing
from ktransformers.media.decoding import decode
from ktransformers.media.processing import Processor
from ktransformers.media.reader import ChildReader
from ktransformers.media.store import PictureStore
from tests.support.pictures.folders import FAMILIES, write_folder

NAMES = ("qwen3_vl", "gemma3", "internvl", "idefics3")


def drawn(width: int = 60, height: int = 40) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str) -> bytes:
    data = io.BytesIO()
    image.save(data, kind)
    return data.getvalue()


def opened(folder: Path, tower: bytes = b"") -> Processor:
    return Processor(folder, lambda note: None, tower)


def digest(folder: Path, image: Image.Image | None = None, detail: str = "auto", tower: bytes = b"") -> bytes:
    return opened(folder, tower).process(image or drawn(), detail).digest


def change(folder: Path, file: str, **values: Any) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", "qwen3_vl", FAMILIES["qwen3_vl"])


@pytest.mark.parametrize("name", NAMES)
def test_they_outlive_the_process_and_the_place_of_the_folder(name: str, tmp_path: Path) -> None:
    one, other = (write_folder(tmp_path / place, name, FAMILIES[name]) for place in ("one", "other"))
    reader = ChildReader(other, PictureStore())
    try:
        assert digest(one) == digest(other) == reader.read(encoded(drawn(), "PNG")).digest
    finally:
        reader.close()


def test_the_encoding_does_not_matter(folder: Path) -> None:
    processor = opened(folder)
    images = [decode(encoded(drawn(), kind), lambda note: None) for kind in ("PNG", "BMP", "TIFF")]
    assert len({processor.process(image, "auto").digest for image in images}) == 1


def test_one_pixel_and_the_shape_matter(folder: Path) -> None:
    processor, other = opened(folder), drawn()
    other.putpixel((59, 39), (1, 2, 3))
    plain = Image.new("RGB", (60, 40), "red")
    images = [drawn(), other, plain, Image.new("RGB", (40, 60), "red")]
    assert len({processor.process(image, "auto").digest for image in images}) == 4


def test_detail_matters_where_the_processor_has_such_settings(folder: Path, tmp_path: Path) -> None:
    tiles = write_folder(tmp_path / "tiles", "internvl", FAMILIES["internvl"])
    assert digest(tiles, detail="low") != digest(tiles, detail="high")
    assert digest(folder, detail="high") == digest(folder)
    assert digest(folder, detail="low") == digest(folder)  # which has fewer pixels anyway


def test_settings_towers_and_versions_matter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [digest(folder), digest(folder, tower=b"of a projector")]
    change(folder, "preprocessor_config.json", image_std=[0.25, 0.5, 0.5])
    found.append(digest(folder))
    monkeypatch.setattr(processing, "version", lambda library: f"{library} of another day")
    found.append(digest(folder))
    assert len(set(found)) == 4

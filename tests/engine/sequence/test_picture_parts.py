"""PIL's images as they are sent: the pixels that they have, the same bytes for the same pixels."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from ktransformers.engine.sequence import picture_parts
from ktransformers.engine.sequence.picture_parts import split_pictures
from ktransformers.errors import ConfigError
from ktransformers.media.decoding import decode


def sent(image: Image.Image) -> bytes:
    (picture,) = split_pictures([{"role": "user", "content": [{"type": "image", "image": image}]}])[1]
    return picture.data


def of_png(image: Image.Image) -> Image.Image:
    """What a PNG of it is read as."""
    data = io.BytesIO()
    image.save(data, "PNG")
    return decode(data.getvalue(), lambda note: None)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_pixels_are_those_of_the_image(mode: str) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (20, 30, 4), dtype=np.uint8)
    deep = Image.fromarray(levels[..., 0].astype(np.uint16) << 8 | levels[..., 1])
    image = deep if mode == "I;16" else Image.fromarray(levels, "RGBA").convert("LA" if mode == "LA" else "RGBA")
    image = image if image.mode == mode else image.convert("RGB").convert(mode)
    assert decode(sent(image), lambda note: None).tobytes() == of_png(image).tobytes()
    assert sent(image) == sent(image.copy())


def test_a_transparent_colour_and_lossy_files_are_kept_as_they_look(monkeypatch: pytest.MonkeyPatch) -> None:
    clear = Image.new("RGB", (8, 8), (1, 2, 3))
    clear.info["transparency"] = (1, 2, 3)
    assert decode(sent(clear), lambda note: None).getpixel((0, 0)) == (255, 255, 255)
    data = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(data, "TIFF", compression="jpeg")
    image = Image.open(data)
    assert decode(sent(image), lambda note: None).tobytes() == image.convert("RGB").tobytes()
    assert sent(image)[:2] == b"II"
    monkeypatch.setattr(picture_parts, "_MOST_PLAIN_NBYTES", 100)
    assert sent(image)[:4] == b"\x89PNG"


def test_what_a_url_names_is_not_fetched_outside_of_a_server() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with pytest.raises(ConfigError, match="not fetched here; give a path, the bytes, or a PIL image"):
        split_pictures([{"role": "user", "content": [part]}])

"""Bytes of a picture to upright RGB pixels. Runs in the child process: what decodes may fail in any way.

    bytes ── length ──> header: format, sides, pixels ── within limits ──> first frame ── upright, on white ──> RGB

Nothing is decoded before the header has been found to be within the limits. Formats are allowed by name; none of them
runs code or opens other files.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import numpy as np
from PIL import Image, UnidentifiedImageError

from ktransformers.errors import ConfigError, reason_of
from ktransformers.media.limits import FORMATS, MAX_NBYTES, MAX_PIXELS, MAX_SIDE

__all__ = ["decode"]

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By EXIF's number of the orientation; 1 is upright."""

_ORIENTATION = 0x0112

# What is allowed is asked for by name below; Pillow's own check warns at other sizes than ours.
Image.MAX_IMAGE_PIXELS = None


def decode(data: bytes, note: Callable[[str], None]) -> Image.Image:
    """Return the picture in mode RGB, upright, transparent parts white.

    note: called with a line for what is left out. Raises ConfigError, with words for whoever sent it.
    """
    if len(data) > MAX_NBYTES:
        raise ConfigError(f"the picture has {len(data)} bytes; at most {MAX_NBYTES} are read")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about metadata that nobody reads
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                return _decoded(image, note)
        except ConfigError:
            raise
        except UnidentifiedImageError:
            named = ", ".join(FORMATS)
            raise ConfigError(
                f"these {len(data)} bytes are no picture that can be read ({named}): {_beginning(data)}"
            ) from None
        except Exception as error:  # decoders raise anything on damaged files: SyntaxError, struct.error, ...
            raise ConfigError(f"the picture is damaged: {reason_of(error)}") from error


def _beginning(data: bytes) -> str:
    return f"they begin with {data[:8].hex(' ')}" if data else "there are none"


def _decoded(image: Image.Image, note: Callable[[str], None]) -> Image.Image:
    width, height = image.size
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise ConfigError(
            f"the picture is {width} x {height}; at most {MAX_PIXELS} pixels and {MAX_SIDE} a side are read: "
            "make it smaller"
        )
    image.load()
    turn = _UPRIGHT.get(_orientation(image, note))
    made = _rgb(image)
    if _has_more(image):
        note(f"of several frames in a {image.format} picture the first one is read")
    return made if turn is None else made.transpose(turn)


def _has_more(image: Image.Image) -> bool:
    """Whether there are further frames, which some formats decode to know it. Damage in them is none of the first's."""
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # noqa: BLE001 - as for the pixels
        return True


def _orientation(image: Image.Image, note: Callable[[str], None]) -> int:
    """EXIF's number; 1 where there is none. Of TIFF Pillow has turned it, and left none."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception as error:  # noqa: BLE001 - as for the pixels
        note(f"a picture's EXIF data cannot be read, it stays as it is: {reason_of(error)}")
        return 1
    return found if isinstance(found, int) else 1


def _rgb(image: Image.Image) -> Image.Image:
    """The pixels in RGB on white. Raises ConfigError for numbers whose range the file does not tell."""
    if image.mode in ("F", "I"):
        raise ConfigError("the picture has 32-bit numbers, whose range nobody can know: save it with 8 or 16 bits")
    if image.mode.startswith("I;16"):
        return _of_16_bits(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        straight = image.convert({"RGBa": "RGBA", "La": "LA"}.get(image.mode, image.mode)).convert("RGBA")
        white = Image.new("RGBA", straight.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, straight).convert("RGB")
    return image.copy() if image.mode == "RGB" else image.convert("RGB")  # looking for frames changes the image


def _of_16_bits(image: Image.Image) -> Image.Image:
    """The upper 8 bits of gray levels. Pillow's own conversion cuts them off at 255."""
    levels = np.asarray(image)
    gray = (levels >> 8).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        gray[levels == clear] = 255
    return Image.fromarray(gray).convert("RGB")

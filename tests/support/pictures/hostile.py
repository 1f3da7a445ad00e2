"""Files that are sent as pictures: right ones with hand-worked pixels, damaged ones, bombs, files of other kinds.

Each has the mode of its verdict: the pixels that must come of it, or a part of the error's words; None: one of both,
whichever the decoder finds, so long as it is an error of ours.
"""

from __future__ import annotations

import gzip
import io
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

__all__ = ["HostilePicture", "hostile_pictures"]

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@dataclass(frozen=True)
class HostilePicture:
    """name: for the test's report. pixels: uint8 [H, W, 3] that must come out; error: words; neither: any of both."""

    name: str
    data: bytes
    pixels: np.ndarray | None = None
    error: str | None = None


def hostile_pictures() -> list[HostilePicture]:
    """Return all of them, the same in every run, more than 500."""
    drawn = random.Random(40)
    return [
        *_right(),
        *_turned(),
        *_truncated(),
        *_changed(drawn),
        *_bombs(),
        *_other_kinds(drawn),
        *_shapes(),
    ]


def _saved(image: Image.Image, kind: str, **options: object) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)  # type: ignore[arg-type]
    return data.getvalue()


def _picture(width: int = 24, height: int = 16) -> Image.Image:
    """A gradient without two equal pixels in a row."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], axis=-1).astype(np.uint8)
    return Image.fromarray(pixels)


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _png(width: int, height: int, depth: int, colour: int, rows: bytes, *more: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [_chunk(b"IHDR", head), *more, _chunk(b"IDAT", zlib.compress(rows)), _chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _gray(*levels: int) -> np.ndarray:
    return np.array([[[level] * 3 for level in levels]], dtype=np.uint8)


def _right() -> Iterator[HostilePicture]:
    """Every mode, with pixels worked by hand."""
    rgb = _picture()
    for kind in ("PNG", "BMP", "TIFF"):
        yield HostilePicture(f"{kind} RGB", _saved(rgb, kind), np.asarray(rgb))
    yield HostilePicture("WEBP RGB", _saved(rgb, "WEBP", lossless=True), np.asarray(rgb))
    yield HostilePicture("PNG 16-bit gray", _png(4, 1, 16, 0, b"\0" + struct.pack(">4H", 0, 255, 256, 65535)),
                         _gray(0, 0, 1, 255))  # fmt: skip
    yield HostilePicture("PNG 16-bit RGB", _png(1, 1, 16, 2, b"\0" + struct.pack(">3H", 0x1234, 0xFFFF, 0x00FF)),
                         np.array([[[0x12, 0xFF, 0x00]]], np.uint8))  # fmt: skip
    yield HostilePicture("PNG 1-bit", _png(8, 1, 1, 0, b"\0\xa0"), _gray(255, 0, 255, 0, 0, 0, 0, 0))
    yield HostilePicture("PNG alpha", _png(3, 1, 8, 6, b"\0" + bytes([9, 9, 9, 0, 9, 9, 9, 255, 0, 0, 0, 51])),
                         _gray(255, 9, 204))  # fmt: skip
    yield HostilePicture("PNG gray and alpha", _png(2, 1, 8, 4, b"\0" + bytes([0, 0, 40, 255])), _gray(255, 40))
    palette = _chunk(b"PLTE", bytes([1, 2, 3, 40, 50, 60])), _chunk(b"tRNS", bytes([0]))
    yield HostilePicture("PNG palette", _png(2, 1, 8, 3, b"\0\0\1", palette[0]),
                         np.array([[[1, 2, 3], [40, 50, 60]]], np.uint8))  # fmt: skip
    yield HostilePicture("PNG palette, clear", _png(2, 1, 8, 3, b"\0\0\1", *palette),
                         np.array([[[255] * 3, [40, 50, 60]]], np.uint8))  # fmt: skip
    yield HostilePicture("PNG clear colour", _png(2, 1, 8, 0, b"\0\7\x09", _chunk(b"tRNS", b"\0\7")), _gray(255, 9))
    yield HostilePicture("PNG clear level of 16 bits",
                         _png(2, 1, 16, 0, b"\0" + struct.pack(">2H", 300, 65535), _chunk(b"tRNS", b"\x01\x2c")),
                         _gray(255, 255))  # fmt: skip
    cmyk = Image.fromarray(np.array([[[0, 0, 0, 0], [255, 0, 0, 0], [0, 0, 0, 255]]], np.uint8), "CMYK")
    yield HostilePicture("TIFF CMYK", _saved(cmyk, "TIFF"),
                         np.array([[[255] * 3, [0, 255, 255], [0] * 3]], np.uint8))  # fmt: skip
    frames = [Image.new("P", (4, 4), colour) for colour in (0, 1, 2)]
    for frame in frames:
        frame.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    first = np.full((4, 4, 3), (255, 0, 0), np.uint8)
    animated = _saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    yield HostilePicture("GIF animated", animated, first)
    yield HostilePicture("GIF animated, later frames cut", animated[: len(animated) - 30], first)
    rgbs = [frame.convert("RGB") for frame in frames]
    yield HostilePicture("PNG animated", _saved(rgbs[0], "PNG", save_all=True, append_images=rgbs[1:]), first)
    yield HostilePicture("WEBP animated", _saved(rgbs[0], "WEBP", save_all=True, append_images=rgbs[1:], lossless=True),
                         first)  # fmt: skip
    yield HostilePicture("TIFF of three pages", _saved(rgbs[0], "TIFF", save_all=True, append_images=rgbs[1:]), first)
    yield HostilePicture("TIFF of floats", _saved(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF"),
                         error="32-bit numbers")  # fmt: skip
    yield HostilePicture("JPEG CMYK", _saved(cmyk.resize((16, 16)), "JPEG"))
    yield HostilePicture("PNG and a ZIP behind it", _saved(rgb, "PNG") + b"PK\3\4" + bytes(100), np.asarray(rgb))
    yield HostilePicture("PNG and JavaScript behind it", _saved(rgb, "PNG") + b"<script>", np.asarray(rgb))


def _turned() -> Iterator[HostilePicture]:
    """EXIF's eight ways, hand-worked: the picture is 1 2 3 over 4 5 6."""
    upright = {
        1: [[1, 2, 3], [4, 5, 6]], 2: [[3, 2, 1], [6, 5, 4]], 3: [[6, 5, 4], [3, 2, 1]], 4: [[4, 5, 6], [1, 2, 3]],
        5: [[1, 4], [2, 5], [3, 6]], 6: [[4, 1], [5, 2], [6, 3]], 7: [[6, 3], [5, 2], [4, 1]],
        8: [[3, 6], [2, 5], [1, 4]], 9: [[1, 2, 3], [4, 5, 6]], 0: [[1, 2, 3], [4, 5, 6]],
    }  # fmt: skip
    image = Image.fromarray(np.array([[1, 2, 3], [4, 5, 6]], np.uint8)).convert("RGB")
    for number, rows in upright.items():
        exif = Image.Exif()
        exif[0x0112] = number
        pixels = np.repeat(np.array(rows, np.uint8)[..., None], 3, axis=-1)
        for kind in ("PNG", "TIFF", "WEBP"):
            if kind == "TIFF" and number in (0, 9):
                continue
            options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
            yield HostilePicture(f"{kind} turned {number}", _saved(image, kind, exif=exif, **options), pixels)
    wide = _saved(Image.new("RGB", (32, 16), (7, 7, 7)), "JPEG", exif=_exif(6))
    yield HostilePicture("JPEG turned", wide, np.full((32, 16, 3), 7, np.uint8))
    yield HostilePicture("JPEG with damaged EXIF", wide.replace(b"\x01\x12\x00\x03", b"\x01\x12\xff\xff"))
    yield HostilePicture("PNG with EXIF that is none", _png(1, 1, 8, 0, b"\0\x20", _chunk(b"eXIf", b"\xff" * 40)))


def _exif(number: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


def _all_formats() -> Iterator[tuple[str, bytes]]:
    for kind in _FORMATS:
        yield kind, _saved(_picture(), kind)


def _truncated() -> Iterator[HostilePicture]:
    for kind, data in _all_formats():
        places = sorted({*range(0, min(len(data), 64), 4), *(len(data) * part // 24 for part in range(24))})
        for at in places:
            yield HostilePicture(f"{kind} cut at {at}", data[:at])


def _changed(drawn: random.Random) -> Iterator[HostilePicture]:
    for kind, data in _all_formats():
        for number in range(30):
            made = bytearray(data)
            for _ in range(1 + number % 6):
                made[drawn.randrange(len(made) if number % 2 else min(len(made), 80))] = drawn.randrange(256)
            yield HostilePicture(f"{kind} changed {number}", bytes(made))


def _bombs() -> Iterator[HostilePicture]:
    """Small files of large pictures: refused by their headers."""
    for width, height in ((100_000, 100_000), (2**31 - 1, 1), (1, 100_000), (100_000, 1), (9000, 9000), (40_000, 10)):
        rows = zlib.compress(b"\0" * 1000)
        head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        data = b"\x89PNG\r\n\x1a\n" + head + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")
        yield HostilePicture(f"PNG of {width} x {height}", data, error="at most")
    screen = struct.pack("<HHBBB", 65535, 65535, 0, 0, 0)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\2\2\x4c\1\0;"
    yield HostilePicture("GIF of 65535 x 65535", b"GIF89a" + screen + frame, error="at most")
    info = struct.pack("<IiiHHIIiiII", 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0)
    yield HostilePicture("BMP of 60000 x 60000", b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + info, error="at most")
    text = _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(200_000_000), 9))
    yield HostilePicture("PNG with a text of 200 MB", _png(1, 1, 8, 0, b"\0\x20", text))
    profile = _chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(200_000_000), 9))
    yield HostilePicture("PNG with a profile of 200 MB", _png(1, 1, 8, 0, b"\0\x20", profile))
    yield HostilePicture("PNG whose rows never end", _png(8, 8, 8, 2, bytes(200_000_000)))
    loop = b"II*\0\x08\0\0\0" + struct.pack("<H", 1) + struct.pack("<HHII", 256, 3, 1, 8) + struct.pack("<I", 8)
    yield HostilePicture("TIFF whose pages go round", loop)
    many = struct.pack("<H", 65535) + struct.pack("<HHII", 256, 4, 0x7FFFFFFF, 8) * 400
    yield HostilePicture("TIFF of many tags", b"II*\0\x08\0\0\0" + many)


def _other_kinds(drawn: random.Random) -> Iterator[HostilePicture]:
    """What is no picture, or none that is allowed."""
    rgb = _picture()
    kinds = {
        "nothing": b"",
        "text": b"hello, this is a picture",
        "HTML": b"<!doctype html><html></html>",
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "PDF": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n",
        "ZIP": b"PK\3\4" + bytes(60),
        "gzip": gzip.compress(b"a" * 1000),
        "ELF": b"\x7fELF\2\1\1" + bytes(60),
        "MP4": b"\0\0\0\x18ftypmp42" + bytes(60),
        "AVIF": b"\0\0\0\x18ftypavif" + bytes(60),
        "HEIC": b"\0\0\0\x18ftypheic" + bytes(60),
        "RIFF that is no WebP": b"RIFF\x24\0\0\0WAVEfmt " + bytes(30),
        "pickle": b"\x80\x04\x95" + bytes(30),
        "PSD": b"8BPS\0\1" + bytes(40),
        "XBM": b"#define a_width 1\n#define a_height 1\nstatic char a_bits[] = {0};",
        "XPM": b'/* XPM */\nstatic char *a[] = {"1 1 1 1", "a c None", "a"};',
    }
    for name, data in kinds.items():
        yield HostilePicture(name, data, error="no picture that can be read")
    for kind in ("PPM", "TGA", "PCX", "ICO", "SGI", "JPEG2000", "DDS"):
        yield HostilePicture(f"{kind}, which is not read", _saved(rgb, kind), error="no picture that can be read")
    for number in range(60):
        head = drawn.choice([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"II*\0", b"RIFF"])
        yield HostilePicture(f"noise {number}", head + drawn.randbytes(drawn.randrange(200)))
    for kind, data in _all_formats():
        yield HostilePicture(f"{kind} behind a letter", b"x" + data, error="no picture that can be read")


def _shapes() -> Iterator[HostilePicture]:
    """Sides that a decoder takes; whether the model's processor does is its own matter."""
    for width, height in ((1, 1), (2, 1), (1, 2), (1, 300), (300, 1), (32_768, 1), (1, 32_768), (17, 13)):
        image = Image.new("RGB", (width, height), (1, 2, 3))
        yield HostilePicture(f"{width} x {height}", _saved(image, "PNG"), np.asarray(image))
    for width, height in ((0, 1), (1, 0), (0, 0)):
        yield HostilePicture(f"PNG of {width} x {height}", _png(width, height, 8, 2, b"\0"))

"""What a picture may be, before anything of it is decoded."""

from __future__ import annotations

__all__ = ["DETAILS", "FORMATS", "MAX_NBYTES", "MAX_PIXELS", "MAX_SIDE"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's names of what is read."""

MAX_NBYTES = 64 << 20
"""Bytes of an encoded picture."""

MAX_PIXELS = 1 << 26
"""67 million: 8192 x 8192, or what a camera of 64 megapixels takes."""

MAX_SIDE = 1 << 15
"""Pixels of the longer side."""

DETAILS = ("auto", "low", "high")
"""OpenAI's words for how closely a picture is looked at."""

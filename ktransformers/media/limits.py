"""What a picture may be, before anything of it is decoded."""

from __future__ import annotations

__all__ = ["DETAILS", "FORMATS", "MAX_NBYTES", "MAX_PIXELS", "MAX_SIDE", "begins_as_picture"]

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

_STARTS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")


def begins_as_picture(head: bytes) -> bool:
    """Whether a file with these first bytes, at least 16, is meant as a picture of one of FORMATS."""
    is_bitmap = head[:2] == b"BM" and head[6:10] == bytes(4)  # text may begin with these letters
    return head.startswith(_STARTS) or is_bitmap or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")

"""Pictures in conversations as callers give them: paths, bytes, PIL's images, data URLs; in parts of several spellings.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,...", "detail": "low"}}     OpenAI's
    {"type": "image", "image": path, bytes, PIL image or data URL}                                transformers', Qwen's
    {"type": "image", "path" | "url" | "base64": ...}                                             transformers'
    {"type": "image_pil", "image_pil": PIL image}                                                 vLLM's

Knows PIL's images by what they can do, so that nothing is imported for them.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ktransformers.engine.sequence.prompts import shown
from ktransformers.errors import ConfigError, reason_of
from ktransformers.media.fetching import fetch
from ktransformers.media.limits import MAX_NBYTES
from ktransformers.system.user_files import read_named
from ktransformers.tokenizer.tokenizer import Message

__all__ = ["SentPicture", "picture_part", "split_pictures"]

_SOURCES = ("image", "path", "url", "base64", "image_pil", "image_url")
_MOST_PLAIN_NBYTES = MAX_NBYTES // 2
_PART = (
    'a picture is {"type": "image", "image": a path, bytes, a PIL image or a data URL}, or '
    '{"type": "image_url", "image_url": {"url": a data URL}}'
)


@runtime_checkable
class _Image(Protocol):
    """What is asked of PIL's images."""

    @property
    def mode(self) -> str: ...

    def convert(self, mode: str) -> _Image: ...

    @property
    def size(self) -> tuple[int, int]: ...

    @property
    def info(self) -> Mapping[str | tuple[int, int], object]: ...

    def save(self, fp: io.BytesIO, format: str, *, compress_level: int = ..., compression: str = ...) -> None: ...


@dataclass(frozen=True, slots=True)
class SentPicture:
    """An encoded picture. detail: OpenAI's; None: auto."""

    data: bytes
    detail: str | None = None


def split_pictures(messages: Sequence[Message]) -> tuple[list[Message], list[SentPicture]]:
    """Return the messages with {"type": "image"} for each picture, and the pictures in their order.

    Parts of other kinds stay as they are. Raises ConfigError for what is no picture, or cannot be read.
    """
    pictures = list[SentPicture]()

    def plain(part: object) -> object:
        if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url", "image_pil"):
            return part
        pictures.append(_sent(part))
        return {"type": "image"}

    made = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            message = {**message, "content": [plain(part) for part in content]}
        made.append(message)
    return made, pictures


def picture_part(data: bytes) -> dict[str, object]:
    """Return a part of a message with a picture in it, as a data URL, which JSON can hold."""
    url = f"data:image/*;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _sent(part: Mapping[str, object]) -> SentPicture:
    given = [(name, part[name]) for name in _SOURCES if part.get(name) is not None]
    if len(given) != 1:
        raise ConfigError(f"{_PART}, got {shown(part)}")
    name: str = given[0][0]
    value: object = given[0][1]
    detail = part.get("detail")
    if isinstance(value, Mapping):  # OpenAI's has both in it
        detail, value = value.get("detail", detail), value.get("url")
    if detail is not None and not isinstance(detail, str):
        raise ConfigError(f"detail of a picture must be a word, got {shown(detail)}")
    if name == "base64" and isinstance(value, str):
        value = f"data:;base64,{value}"
    return SentPicture(_bytes_of(value), detail)


def _bytes_of(value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str) and value[:5].lower() == "data:":
        return fetch(value)
    if isinstance(value, str) and value.lower().startswith(("http:", "https:")):
        raise ConfigError(f"{shown(value)}: pictures are not fetched here; give a path, the bytes, or a PIL image")
    if isinstance(value, str | os.PathLike):
        return _of_file(Path(str(value).removeprefix("file://")).expanduser())
    if isinstance(value, _Image):
        return _of_image(value)
    raise ConfigError(f"{_PART}, got {shown(value)}")


def _of_file(path: Path) -> bytes:
    try:
        data = read_named(path, MAX_NBYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in it
        raise ConfigError(f"the picture {path} cannot be read: {reason_of(error)}") from error
    if len(data) > MAX_NBYTES:
        raise ConfigError(f"the picture {path} has more than {MAX_NBYTES} bytes")
    return data


def _of_image(image: _Image) -> bytes:
    """Encode PIL's image: the same bytes for the same pixels, by which it is known when it comes again.

    As TIFF, in a small part of PNG's time, unless it is too large so, or has a palette or a transparent colour.
    """
    data = io.BytesIO()
    try:
        made = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else image.convert("RGB")
        width, height = made.size
        if made.mode == "P" or "transparency" in made.info or width * height * len(made.mode) > _MOST_PLAIN_NBYTES:
            made.save(data, "PNG", compress_level=1)
        else:
            made.save(data, "TIFF", compression="raw")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the PIL image cannot be read: {reason_of(error)}") from error
    return data.getvalue()

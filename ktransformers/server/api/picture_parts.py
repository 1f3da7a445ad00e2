"""Pictures as clients of any dialect send them, as a part of a turn's content. Knows no bodies, and decodes nothing.

{"type": "image_url", "image_url": {"url": URL, "detail": "low"}}          chat completions; a URL alone, too
{"type": "input_image", "image_url": URL, "detail": "low"}                 /v1/responses
{"type": "image", "source": {"type": "base64", "data": BASE64}}            Anthropic; {"type": "url", "url": URL}
{"type": "image", "data": BASE64}   {"type": "image", "image": URL}        results of MCP; transformers
{"type": "video", "video": [URL, ...]}                                     frames, each a picture
{"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,BASE64,BASE64"}}       the same, vLLM's
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ktransformers.server.answers.requests import UnreadPicture

__all__ = ["PICTURE_TYPES", "PictureSources", "sent_pictures"]

PICTURE_TYPES = frozenset({"image_url", "input_image", "image", "computer_screenshot", "video", "video_url"})
"""Types of parts that are pictures, or frames of them."""

_DETAILS = {"low": "low", "high": "high", "auto": "auto", "original": "high", None: None}
_FRAMES = "data:video/jpeg;base64,"
_NO_FILES = "files are not kept here: send the picture itself, as a data: URL"
_NO_VIDEO = "a video is read as the list of its frames, each a picture: send data: URLs of them"


@dataclass(frozen=True, slots=True)
class PictureSources:
    """The pictures of one part. field: of the part, that holds them."""

    field: str
    sources: tuple[str, ...]
    detail: str | None = None

    def at(self, place: str, name: str) -> Iterator[UnreadPicture]:
        """Yield them as parts of a message. place: of the part in the body; name: for the header."""
        for source in self.sources:
            yield UnreadPicture(source=source, place=f"{place}.{self.field}", name=name, detail=self.detail)


def sent_pictures(part: Mapping[str, object]) -> PictureSources:
    """Return the pictures of a part whose type is among PICTURE_TYPES. Raises ValueError for a part without one."""
    if part.get("type") in ("video", "video_url"):
        return _frames(part)
    for field in ("image_url", "source", "image", "data", "url"):
        value = part.get(field)
        if value is None:
            continue
        inner: Mapping[str, object] = value if isinstance(value, Mapping) else {}
        if inner.get("type") == "file" or "file_id" in inner:
            raise ValueError(f"{field}: {_NO_FILES}")
        source = next((one for one in (value, inner.get("url"), inner.get("data")) if isinstance(one, str)), None)
        if source is None:
            raise ValueError(f"{field}: it must be a URL, or hold one as url")
        return PictureSources(field, (source,), _detail(inner.get("detail") or part.get("detail")))
    if part.get("file_id") is not None:
        raise ValueError(f"file_id: {_NO_FILES}")
    raise ValueError("there is no picture in this part: image_url is missing")


def _frames(part: Mapping[str, object]) -> PictureSources:
    field = str(part["type"])
    value = part.get(field)
    found = value.get("url") if isinstance(value, Mapping) else value
    if isinstance(found, str) and found.startswith(_FRAMES):
        found = found.removeprefix(_FRAMES).split(",")
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise ValueError(f"{field}: no support for videos as files: {_NO_VIDEO}")
    return PictureSources(field, tuple(found))


def _detail(value: object) -> str | None:
    if not isinstance(value, str | None) or value not in _DETAILS:
        raise ValueError("detail must be low, high or auto")
    return _DETAILS[value]

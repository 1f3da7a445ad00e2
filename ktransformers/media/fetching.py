"""The bytes behind the URL of a picture."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from ktransformers.errors import ConfigError

__all__ = ["fetch"]


def fetch(url: str, allowed_hosts: Sequence[str]) -> bytes:
    """Return the bytes of a data: URL, or of what an allowed host has. Blocks. Raises ConfigError, with words for the
    client.
    """
    if not url[:5].lower() == "data:":
        raise ConfigError("only data: URLs are read here (--allowed_image_hosts)")
    head, comma, data = url[5:].partition(",")
    if not comma:
        raise ConfigError("the data: URL has no comma")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"the data: URL is not valid base64: {error}") from error

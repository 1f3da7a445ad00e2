"""Parses what people call a model of the hub. Knows no files and no network.

org/name                                        the whole repository, or the quantization that fits
org/name:Q4_K_M                                 one quantization of it
org/name@revision                               a branch, a tag or a commit; before the colon
org/name/file.gguf                              one file (a shard brings in its siblings)
https://huggingface.co/org/name/blob/main/...   links as a browser shows them; hf.co, hf:// and HF_ENDPOINT too
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from ktransformers.errors import ConfigError

__all__ = ["ModelName", "is_name", "parse_name"]

_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[\w-])?"
_REVISION = r"refs/pr/\d+|[\w.-]+"
_NAME = re.compile(
    rf"(?P<repo_id>{_PART}/{_PART})(?:@(?P<revision>{_REVISION}))?"
    r"(?::(?P<quant>[\w.-]+))?(?:/(?P<file>[^\\]+\.gguf))?",
    re.ASCII,
)
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_OTHER_KINDS = ("datasets", "spaces", "kernels", "buckets", "collections", "papers", "models", "docs", "blog")
_SHAPE = "a model is called org/name, org/name:QUANT or org/name/file.gguf"


@dataclass(frozen=True, slots=True)
class ModelName:
    """A name of a model of the hub. revision: None is the main branch. quant, file: None when nobody says which."""

    repo_id: str
    revision: str | None = None
    quant: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        quant = "" if self.quant is None else f":{self.quant}"
        return f"{self.repo_id}{revision}{quant}" + ("" if self.file is None else f"/{self.file}")


def is_name(text: str) -> bool:
    """Whether `text` has the form of a hub name, or is a link. A path may have it too: see whether it exists.

    "folder/model.gguf" does not: it is a path that somebody mistyped.
    """
    if "://" in text:
        return True
    try:
        parse_name(text)
    except ConfigError:
        return False
    return True


def parse_name(text: str) -> ModelName:
    """Parse the name of a model of the hub. Raises ConfigError."""
    address = _address(text)
    if address is not None:
        return _from_address(text, address)
    match = _NAME.fullmatch(text)
    if match is None or "--" in match["repo_id"] or ".." in text or _is_file(match["repo_id"]):
        raise ConfigError(f"{text!r} is not the name of a model: {_SHAPE}")
    revision = None if match["revision"] == "main" else match["revision"]
    return ModelName(match["repo_id"], revision, match["quant"], match["file"])


def _is_file(repo_id: str) -> bool:
    return repo_id.lower().endswith((".gguf", ".safetensors"))


def _address(text: str) -> str | None:
    """What follows the host in a link to the hub, None when `text` is no link to it. Raises ConfigError for others."""
    scheme, separator, rest = text.partition("://")
    if separator and scheme.lower() == "hf":
        return rest
    if separator and scheme.lower() not in ("http", "https"):
        return None
    host, _, path = (rest if separator else text).partition("/")
    if host.lower() in _HOSTS or (separator and host.lower() == _endpoint_host()):
        return path
    if separator:
        raise ConfigError(f"{text} is not on the hub ({', '.join(_HOSTS[::2])}, or HF_ENDPOINT); download it yourself")
    return None


def _endpoint_host() -> str | None:
    return urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc.lower() or None


def _from_address(text: str, address: str) -> ModelName:
    path = address.partition("?")[0].partition("#")[0].strip("/")
    parts = [unquote(part) for part in path.split("/")]
    if parts[0] in _OTHER_KINDS or len(parts) < 2:
        raise ConfigError(f"{text} is not a link to a model: {_SHAPE}")
    name = parse_name("/".join(parts[:2]))
    if len(parts) < 4 or parts[2] not in ("tree", "blob", "resolve", "raw"):
        if len(parts) > 2 and parts[-1].endswith(".gguf"):
            return ModelName(name.repo_id, name.revision, file="/".join(parts[2:]))
        return name
    revision = name.revision if parts[3] == "main" else parts[3]
    if parts[-1].endswith(".gguf"):
        return ModelName(name.repo_id, revision, file="/".join(parts[4:]))
    # A folder of a repository has the name of the quantization that is in it.
    return ModelName(name.repo_id, revision, quant=parts[-1] if parts[2] == "tree" and len(parts) > 4 else name.quant)

"""By what a model is known again after a restart, without reading all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["model_digest"]

_SAMPLE = 64 << 10  # bytes at each of three places of a file: its header, its middle, its end
_NOT_OF_THE_MODEL = ("_name_or_path", "_commit_hash", "transformers_version")


def model_digest(files: Iterable[Path], config: Mapping[str, Any], settings: Iterable[object]) -> bytes:
    """32 bytes of a model's config, of its files' sizes and some of their bytes, and of settings. Not of paths."""
    known = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    made = hashlib.blake2b(json.dumps(known, sort_keys=True, default=str).encode(), digest_size=32)
    made.update("\0".join(map(str, settings)).encode())
    for digest in sorted(map(_file_digest, files)):
        made.update(digest)
    return made.digest()


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        made = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=32)
        for at in (0, size // 2, max(size - _SAMPLE, 0)):
            file.seek(at)
            made.update(file.read(_SAMPLE))
    return made.digest()

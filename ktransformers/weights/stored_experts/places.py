"""Where the packed file of a model is: beside the model, unless somebody names another place. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["place_beside"]

_SUFFIX = ".experts.kt"
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def place_beside(files: Sequence[Path]) -> Path:
    """Return where the packed file of the model with weights in `files` is looked for: beside the first of them.

    A GGUF's has its name, without the number of a shard; that of safetensors is called model.
    """
    first = files[0]
    name = "model" if first.suffix == ".safetensors" else _SHARD.sub("", first.stem)
    return first.with_name(f"{name}{_SUFFIX}")

"""Reads the tensors of a picture from the store: a file by its digest, whose owner is another process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ktransformers.errors import EngineError, reason_of

__all__ = ["picture_tensors"]


def picture_tensors(
    folder: Path, digest: bytes, is_wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, torch.Tensor]:
    """Return the tensors of a picture by the names that its processor gave them. Raises EngineError."""
    path = folder / f"{digest.hex()}.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if is_wanted(name)}  # noqa: SIM118 - no mapping
    except FileNotFoundError as error:
        raise EngineError(f"picture {digest.hex()[:12]} is no longer there: send it again") from error
    except (OSError, SafetensorError) as error:
        raise EngineError(f"picture {digest.hex()[:12]} cannot be read: {reason_of(error)}") from error

"""Finds the format of a model's weights. Decides by content, not by name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ktransformers.errors import ConfigError, FormatError
from ktransformers.system.file_kinds import (
    is_gguf,
    is_safetensors,
    list_folder,
    not_weights,
    read_head,
    without_weights,
)
from ktransformers.weights.gguf.file import gguf_files

__all__ = ["WeightFormat", "weight_format"]

WeightFormat = Literal["gguf", "safetensors"]


def weight_format(path: Path | str, prefer: WeightFormat | None = None) -> WeightFormat:
    """Return the format that a file or folder holds; `prefer` decides for a folder that holds both. GGUF may be in
    subfolders.

    Raises ConfigError when the path does not exist, FormatError when a file is of neither format, when a folder holds
    no weights, or both formats and nothing is preferred.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"{path} does not exist")
    if not path.is_dir():
        head = read_head(path)
        if is_gguf(head):
            return "gguf"
        if is_safetensors(head):
            return "safetensors"
        raise not_weights(path, head, "safetensors" if path.suffix == ".safetensors" else "GGUF")
    suffixes = {entry.suffix for entry in list_folder(path)}
    if {".gguf", ".safetensors"} <= suffixes:
        if prefer is not None:
            return prefer
        raise FormatError(
            f"{path}: holds both GGUF and safetensors weights; pass the path of the GGUF file, or move one away"
        )
    if ".gguf" in suffixes:
        return "gguf"
    if ".safetensors" in suffixes:
        return "safetensors"
    if gguf_files(path):
        return "gguf"
    raise without_weights(path)

"""What a user calls a model, and the files that this means. Opens no file and downloads nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ktransformers.errors import ConfigError

__all__ = ["ModelFiles", "locate_model"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """model_path: the folder with config.json and tokenizer; gguf_path: a GGUF file, or a folder of weights.

    One of them is set, or both. The names are EngineConfig's.
    """

    model_path: Path | None = None
    gguf_path: Path | None = None


def locate_model(model: str | os.PathLike[str]) -> ModelFiles:
    """The files of `model`: a GGUF file, a folder of GGUF files, or a folder with config.json and safetensors.

    Raises ConfigError for what does not exist.
    """
    path = Path(model).expanduser()
    if not path.exists():
        raise ConfigError(f"{model} does not exist; a model is a local folder or a GGUF file")
    has_config = path.is_dir() and (path / "config.json").is_file()
    return ModelFiles(model_path=path) if has_config else ModelFiles(gguf_path=path)

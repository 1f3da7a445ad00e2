"""Checks paths that a user has given: whether they can be read, and are what files of a model are."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ktransformers.errors import ConfigError, reason_of
from ktransformers.system.user_files import file_kind

__all__ = ["check_given_path"]

_MODEL_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".py", ".gguf", ".safetensors")


def check_given_path(flag: str, path: Path) -> None:
    """Raise ConfigError unless `path`, which --FLAG names, is a file or a folder that may be read."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in it
        hint = "" if flag == "optimize_config_path" else "; models of the hub: ktransformers pull org/name"
        raise ConfigError(f"--{flag} {path} does not exist{hint}") from None
    except OSError as error:
        raise ConfigError(f"--{flag} {path} cannot be read: {reason_of(error)}") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ConfigError(f"--{flag} {path} is a device or a pipe; it must be a file or a folder")
    if stat.S_ISDIR(mode):
        _check_entries(flag, path)
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        raise ConfigError(f"--{flag} {path} cannot be read: permission denied; mend it with chmod, or ask its owner")


def _check_entries(flag: str, folder: Path) -> None:
    """Raises ConfigError where something stands in a model's folder under a file's name, and is a pipe, a device or a
    link to nothing, as of a hub's cache that was copied in part."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith(_MODEL_SUFFIXES)]
    except OSError:  # which the check of the folder itself reports
        return
    for name in sorted(names):
        path = folder / name
        if path.is_symlink() and not path.exists():
            raise ConfigError(f"--{flag} {folder}: {name} is a link to {os.readlink(path)}, which does not exist")
        kind = file_kind(path)
        if kind is not None and kind != "it is a folder":
            raise ConfigError(f"--{flag} {folder}: {name} cannot be read: {kind}, not a file")

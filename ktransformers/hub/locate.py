"""Finds the files that a user's name for a model means. Opens no model file and downloads nothing.

A path that exists always wins. Otherwise a name of the hub ("org/name", "org/name:Q4_K_M", a link) means what is in the
hub's cache; what is not there is an error with the command that gets it.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from ktransformers.errors import ConfigError
from ktransformers.hub.names import ModelName, is_name, parse_name

__all__ = ["LocatedModel", "locate_model", "locate_path", "title_of"]


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """The files of a model. model_path: the folder with config.json and tokenizer.

    gguf_path: a GGUF, or a folder of weights.
    One of them is set, or both. The names are EngineConfig's.
    """

    model_path: Path | None = None
    gguf_path: Path | None = None


def locate_model(model: str | os.PathLike[str]) -> LocatedModel:
    """Find the files of `model`: a GGUF, a folder of GGUF files, a folder with config.json and safetensors, or a name.

    Raises ConfigError for what does not exist, and for a name that means several models of the cache.
    """
    path = locate_path(model)
    has_config = path.is_dir() and (path / "config.json").is_file()
    return LocatedModel(model_path=path) if has_config else LocatedModel(gguf_path=path)


def locate_path(text: str | os.PathLike[str], flag: str = "") -> Path:
    """Find the file or folder that one flag means: an existing path, else a model of the hub's cache.

    The path of a cached model is inside a snapshot, with links not followed: shards know each other by name. flag
    ("--gguf_path") begins the message of an error. Raises ConfigError.
    """
    prefix = f"{flag} " if flag else ""
    if not os.fspath(text):  # as of a variable of a shell that is not set; to pathlib it is the current folder
        raise ConfigError(f"{prefix or 'MODEL '}is empty: name a model, or its file or folder")
    path = Path(text).expanduser()
    try:
        if path.exists():
            return path
    except OSError as error:
        raise ConfigError(f"{prefix}{text} cannot be read: {error.strerror or error}") from error
    if path.is_symlink():
        raise ConfigError(f"{prefix}{text} is a link to {os.readlink(path)}, which does not exist")
    if not is_name(os.fspath(text)):
        raise ConfigError(f"{prefix}{text} does not exist{_near(path)}")
    try:
        return _in_cache(parse_name(os.fspath(text)))
    except _NotCachedError as error:
        near = _near(path) if path.parent.exists() else ""
        raise ConfigError(f"{prefix}{error}{near}") from None
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from error


class _NotCachedError(ConfigError):
    """A name of the hub that the cache does not have."""


def _in_cache(name: ModelName) -> Path:
    from ktransformers.hub.cache import cached_models, repo_folder
    from ktransformers.hub.variants import select

    try:
        models = cached_models(name.repo_id, name.revision)
    except OSError as error:
        raise ConfigError(f"{repo_folder(name.repo_id)} cannot be read: {error.strerror or error}") from error
    pull = f"ktransformers pull {name}"
    if not models:
        raise _NotCachedError(f"{name} is neither a path nor in the hub's cache; get it with: {pull}")
    chosen = select([model.variant for model in models], name)
    if chosen is None and len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise ConfigError(f"{name} is in the cache {len(models)} times; say which: {names}")
    model = models[0] if chosen is None else next(model for model in models if model.variant is chosen)
    if model.missing:
        more = f" and {len(model.missing) - 1} more" if len(model.missing) > 1 else ""
        raise ConfigError(f"{name} is not complete ({model.missing[0]}{more} missing); go on with: {pull}")
    return model.path


def _near(path: Path) -> str:
    """The nearest name in the folder that was meant, as the end of a message."""
    folder = path.parent
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return "" if folder.exists() else f" (nor does the folder {folder})"
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {folder / near[0]}?" if near else ""


def title_of(path: Path) -> str:
    """Return what people call the model at `path`: the file's or folder's name, or that of the cached repository."""
    path = Path(os.path.abspath(path))  # not resolved: a file of the cache is a link to bytes with a number for a name
    if path.suffix == ".gguf":
        return path.stem
    repo = path.parents[1].name if path.parent.name == "snapshots" else ""
    return repo.rpartition("--")[2] if repo.startswith("models--") else path.name

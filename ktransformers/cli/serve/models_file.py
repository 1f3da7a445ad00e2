"""The YAML file of `ktransformers serve FILE.yaml`: models, each with its flags, and flags of the server above them.

    memory: 64
    port: 8000
    models:
      - name: [qwen3, qwen3:30b]
        gguf_path: /models/qwen3.gguf
        cache_lens: 32768
        load: start
        keep: true

Values are texts here, as in settings.py; the parser of `serve` checks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers.cli.parsing.settings import Setting, read_yaml, settings_of
from ktransformers.errors import ConfigError

__all__ = ["ModelEntry", "ModelsFile", "read_models_file"]

_OWN_KEYS = ("name", "load", "keep")
_LOADS = ("on_demand", "start")
_BOOLEANS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """An entry of a models file: a model with its flags. origin: file and line. names: one at least.

    is_first: loaded at the start. is_kept: never stopped.
    """

    origin: str
    names: tuple[str, ...]
    settings: tuple[Setting, ...]
    is_first: bool = False
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """The content of a models file: its models, and in `settings` what stands beside `models`."""

    path: Path
    settings: tuple[Setting, ...]
    models: tuple[ModelEntry, ...]


def read_models_file(path: Path) -> ModelsFile:
    """Read a models file. Raises ConfigError with the file and the line of what is wrong."""
    try:
        root = read_yaml(path)
        settings = () if root is None else tuple(settings_of(root, path, apart=("models",)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    listed = [] if root is None else [value for key, value in root.value if key.value == "models"]
    if not listed:
        raise ConfigError(
            f"{path}: it has no `models:`, a list of models with `name` and `gguf_path` or `model_path`; a file of "
            "flags for one model is given by --config"
        )
    if len(listed) > 1:
        raise ConfigError(f"{_at(path, listed[1])}: models is given twice")
    return ModelsFile(path, settings, _entries(path, listed[0]))


def _at(path: Path, node: Any) -> str:
    return f"{path} line {node.start_mark.line + 1}"


def _entries(path: Path, node: Any) -> tuple[ModelEntry, ...]:
    import yaml

    if not isinstance(node, yaml.SequenceNode) or not node.value:
        raise ConfigError(f"{_at(path, node)}: models must be a list, each with a dash and its flags: `- name: NAME`")
    entries = tuple(_entry(path, one) for one in node.value)
    seen: dict[str, str] = {}
    for entry in entries:
        for name in entry.names:
            first = seen.setdefault(name, entry.origin)
            if first != entry.origin:
                raise ConfigError(
                    f"{entry.origin}: the name {name!r} is taken, see {first}; names are for one model each"
                )
    return entries


def _entry(path: Path, node: Any) -> ModelEntry:
    import yaml

    where = _at(path, node)
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{where}: a model must be flags of the form `flag: value`, `name` among them")
    try:
        settings = {one.name: one for one in settings_of(node, path)}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    own = {name: settings.pop(name) for name in _OWN_KEYS if name in settings}
    if "name" not in own:
        raise ConfigError(f"{where}: the model has no `name`, by which requests ask for it")
    names = tuple(dict.fromkeys(name.strip() for name in own["name"].texts))
    if not all(names):
        raise ConfigError(f"{own['name'].origin}: a name must not be empty")
    load = _word(own.get("load"), "load", _LOADS) or _LOADS[0]
    keep = _word(own.get("keep"), "keep", tuple(_BOOLEANS)) or "false"
    return ModelEntry(where, names, tuple(settings.values()), load == "start", _BOOLEANS[keep])


def _word(setting: Setting | None, name: str, words: tuple[str, ...]) -> str | None:
    if setting is None:
        return None
    word = ",".join(setting.texts).lower()
    if word not in words:
        raise ConfigError(f"{setting.origin}: {name} must be {' or '.join(words[:2])}, not {word!r}")
    return word

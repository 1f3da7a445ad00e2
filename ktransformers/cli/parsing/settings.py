"""Values of flags that are not on the command line: environment variables and the file of --config.

Values are texts here, as on a command line; the parser of the command checks both alike.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers.errors import ConfigError, reason_of
from ktransformers.system.user_files import read_named

__all__ = [
    "OTHER_VARIABLES",
    "PREFIX",
    "Setting",
    "as_yaml",
    "from_environment",
    "from_file",
    "read_yaml",
    "settings_of",
    "unknown_variables",
]

PREFIX = "KTRANSFORMERS_"

OTHER_VARIABLES = frozenset({"KTRANSFORMERS_ISA"})
"""Variables with the prefix that are not flags: kernels/cpu/base.py reads this one, in every process."""

_KUBERNETES = re.compile(rf"{PREFIX}(SERVICE_(HOST|PORT\w*)|PORT_\d+_\w+)")
"""Variables that Kubernetes gives every container beside a service called ktransformers; PORT=tcp://... is another."""

SECRETS = frozenset({"api_key", "token", "hf_token"})
"""Flags whose values are never printed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of a flag: its name with underscores and without dashes, its texts, and where they stand."""

    name: str
    texts: tuple[str, ...]
    origin: str
    is_from_file: bool = False


def variable(name: str) -> str:
    """Return the name of a flag's environment variable."""
    return PREFIX + name.upper()


def from_environment(environ: Mapping[str, str], names: Iterable[str]) -> list[Setting]:
    """Return settings of those `names` whose variables are set and not empty; commas separate the values of a list."""
    found = []
    for name in names:
        text = environ.get(variable(name), "")
        is_ours = variable(name) not in OTHER_VARIABLES and not text.startswith("tcp://")
        if text and is_ours:
            found.append(Setting(name, tuple(text.split(",")), variable(name)))
    return found


def unknown_variables(environ: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Return a line about variables with our prefix that mean nothing, and the nearest that do; None: all are known."""
    known = [variable(name).removeprefix(PREFIX) for name in names]
    known += [name.removeprefix(PREFIX) for name in OTHER_VARIABLES]
    given = (
        name.removeprefix(PREFIX) for name in environ if name.startswith(PREFIX) and not _KUBERNETES.fullmatch(name)
    )
    unknown = sorted(set(given).difference(known))
    if not unknown:
        return None
    hints = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1)
        hints.append(f"{PREFIX}{name}" + (f" (did you mean {PREFIX}{near[0]}?)" if near else ""))
    return f"environment variables without effect: {', '.join(hints)}"


def from_file(path: Path) -> list[Setting]:
    """Return the settings of a YAML file, in its order.

    Raises ConfigError, without the file's name, for what cannot be read or is no mapping of flags to values.
    """
    root = read_yaml(path)
    if root is None:
        return []
    found = settings_of(root, path, apart=("models",))
    if any(key.value == "models" for key, _ in root.value):
        raise ConfigError("the file lists models: give it in the place of MODEL, `ktransformers serve FILE.yaml`")
    return found


def read_yaml(path: Path) -> Any:
    """Return the root node of a YAML file, which knows its lines; None of an empty one. Raises ConfigError."""
    import yaml

    try:
        return yaml.compose(read_named(path).decode("utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the file cannot be read: {reason}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise ConfigError(f"{line}not YAML: {getattr(error, 'problem', None) or error}") from error


def settings_of(node: Any, path: Path, apart: Container[str] = ()) -> list[Setting]:
    """Return the settings in a mapping of flags to values, without those named in `apart`. Raises ConfigError."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"line {node.start_mark.line + 1}: expected lines of the form `flag: value`")
    found: dict[str, Setting] = {}
    for key, value in node.value:
        origin = f"{path} line {key.start_mark.line + 1}"
        name = str(key.value).lstrip("-").replace("-", "_") if isinstance(key, yaml.ScalarNode) else "?"
        if name in found:
            raise ConfigError(f"line {key.start_mark.line + 1}: {name} is given twice, first in {found[name].origin}")
        if name in apart:
            continue
        texts = _texts(value)
        if texts is None:
            raise ConfigError(f"line {value.start_mark.line + 1}: {name} must be one value, or a list of values")
        if texts:
            found[name] = Setting(name, texts, origin, is_from_file=True)
    return list(found.values())


def _texts(node: Any) -> tuple[str, ...] | None:
    """A scalar's text as it is written, a list's texts, () for null, None for anything else."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return () if node.tag == "tag:yaml.org,2002:null" else (str(node.value),)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(part, yaml.ScalarNode) for part in node.value):
        return tuple(str(part.value) for part in node.value)
    return None


def as_yaml(command: str, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Return `values` as the text of a file for --config, the origin of each as a comment.

    Secrets and open values are comments.
    """
    lines = [f"# {command}: effective values"]
    for name, value in values.items():
        origin = origins.get(name, "default")
        if name in SECRETS and value:
            lines.append(f"# {name}: hidden  # {origin}")
        elif value in (None, []) or (value == "" and name not in origins):
            lines.append(f"# {name}:  # not set")
        else:
            lines.append(f"{name}: {_scalar(value)}  # {origin}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    """A value in YAML, on one line. Texts are quoted as JSON where YAML would read something else."""
    import yaml

    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(_scalar(part) for part in value) + "]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    text = str(value)
    is_plain = text.isascii() and not set(text) & set("\"'#,:[]{}&*!|>%@`\n\r\t") and text == text.strip()
    try:
        return text if is_plain and yaml.safe_load(text) == text else json.dumps(text, ensure_ascii=False)
    except yaml.YAMLError:
        return json.dumps(text, ensure_ascii=False)

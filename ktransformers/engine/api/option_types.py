"""Checks the types of LLM's keywords by their annotations, before anything compares or opens them."""

from __future__ import annotations

import os
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

from ktransformers.engine.sequence.prompts import shown
from ktransformers.errors import ConfigError

__all__ = ["check_types"]

_WANTED: Mapping[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    os.PathLike: "a path",
}


def check_types(options: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first value that is not of the type its annotation in `hints` names."""
    for name, value in options.items():
        kinds = _kinds(hints[name])
        if not any(_is_a(value, kind) for kind in kinds):
            wanted = [_WANTED[kind] for kind in kinds if kind in _WANTED and not (kind is str and os.PathLike in kinds)]
            unset = " or None" if type(None) in kinds else ""
            raise ConfigError(f"{name} must be {' or '.join(wanted)}{unset}, got {shown(value)}")


def _kinds(hint: Any) -> list[object]:
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for each in get_args(hint) for kind in _kinds(each)]
    return [get_origin(hint) or hint]


def _is_a(value: object, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))

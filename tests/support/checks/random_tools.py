"""Tools with random schemas that every format of calls can be forced into; strings and lists have an end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

__all__ = ["random_tools"]


def _string(draw: random.Random) -> dict[str, Any]:
    least = draw.randrange(3)
    return draw.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + draw.randrange(4)},
            {
                "type": "string",
                "pattern": draw.choice(["^[a-c]{2,5}$", "^\\d+-[a-zA-Zé]$", "^(x|yz){0,5}!$"]),
                "maxLength": 9,
            },
            {"type": "string", "enum": ["a b", "null", "7", "</p>", 'q"\n']},
            {"const": "x"},
        ]
    )


def _number(draw: random.Random) -> dict[str, Any]:
    low = draw.randrange(-50, 50)
    kind = draw.choice(["integer", "number"])
    return draw.choice([{"type": kind}, {"type": kind, "minimum": low, "maximum": low + draw.randrange(9)}])


_WORDS: list[dict[str, Any]] = [{"type": "boolean"}, {"type": "null"}, {"enum": [1, True, None]}, {"enum": [1, "one"]}]


def _scalar(draw: random.Random) -> dict[str, Any]:
    return draw.choice([_string, _string, _number, lambda draw: draw.choice(_WORDS)])(draw)


def _union(draw: random.Random) -> dict[str, Any]:
    options = [_string(draw), draw.choice([_number, _list, _object, lambda draw: {"type": "null"}])(draw)]
    return draw.choice(
        [
            {"anyOf": options},
            {"oneOf": options, "description": "either"},
            {"anyOf": [*options, {"type": "boolean"}]},
            {"type": ["string", "null", "integer"], "maxLength": 3},
        ]
    )


def _list(draw: random.Random) -> dict[str, Any]:
    least = draw.randrange(3)
    return {"type": "array", "items": _scalar(draw), "minItems": least, "maxItems": least + draw.randrange(3)}


def _object(draw: random.Random, make: Callable[[random.Random], dict[str, Any]] | None = None) -> dict[str, Any]:
    keys = draw.sample(["a", "b", "city_name", "B2", "x-y"], draw.randrange(4))
    properties = {key: (make or _scalar)(draw) for key in keys}
    required = [key for key in keys if draw.random() < 0.5]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _parameter(draw: random.Random) -> dict[str, Any]:
    made = draw.choice([_scalar, _scalar, _union, _list, _object])(draw)
    return draw.choice([made, made, {"allOf": [made], "default": 1}, {"$ref": "#/$defs/shared"}])


def random_tools(draw: random.Random) -> dict[str, Any]:
    """Tools by name: one to three, some without a schema that says anything."""
    tools: dict[str, Any] = {}
    for name in draw.sample(["f", "get_weather", "get_weather-2", "ns.g"], draw.randint(1, 3)):
        tools[name] = _object(draw, _parameter) | {"$defs": {"shared": draw.choice([_scalar, _union])(draw)}}
    if draw.random() < 0.2:
        tools["now"] = draw.choice([None, {"type": "object", "properties": {}, "additionalProperties": False}])
    return tools

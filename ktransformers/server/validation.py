"""What is wrong with a body, of all that pydantic says about it. Knows no statuses and no shapes of errors.

Pydantic names the members of a union in the place of an error, and says of each member why the value is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic_core import ErrorDetails

__all__ = ["InvalidField", "Place", "first_invalid"]

Place = tuple[int | str, ...]
"""Names and numbers that lead to a value of the body, without the members of unions on the way."""

_EXPECTED = "Input should be "
_OBJECTS = frozenset({"model_type", "model_attributes_type", "dict_type", "dataclass_type"})
_TEXT_OR_LIST = frozenset({"string_type", "list_type"})


@dataclass(frozen=True, slots=True)
class InvalidField:
    """The first value of a body that cannot be taken.

    kind: pydantic's name of what is wrong, of the first member of a union. value: what was sent there.
    """

    place: Place
    message: str
    kind: str
    value: object


def first_invalid(errors: Sequence[ErrorDetails], body: object) -> InvalidField:
    """Return the first of `errors`, which are pydantic's about `body`; of a union's members those that came furthest
    into the value, as one.
    """
    first = errors[0]
    place, union = _place(first, body)
    if union is None:
        return _invalid(place, [first])
    beside = [one for one in errors if one["loc"][: len(union)] == union]
    places = [_place(one, body)[0] for one in beside]
    deepest = max(places, key=len)
    return _invalid(deepest, [one for one, at in zip(beside, places, strict=True) if at == deepest])


def _place(error: ErrorDetails, body: object) -> tuple[Place, Place | None]:
    """The place of an error in `body`, and pydantic's of the first union on the way, which is without a tag (<tag>)."""
    location: Place = error["loc"]
    if location[:1] != ("body",):  # of the query
        return location, None
    place: list[int | str] = []
    union: Place | None = None
    value = body
    for at, part in enumerate(location[1:], 1):
        if isinstance(part, str) and part.startswith("<"):
            continue
        is_last = at == len(location) - 1
        if isinstance(value, Mapping) and (part in value or (is_last and error["type"] == "missing")):
            value = value.get(str(part))
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            union = location[:at] if union is None else union
            continue
        place.append(part)
    return tuple(place), union


def _invalid(place: Place, errors: Sequence[ErrorDetails]) -> InvalidField:
    first = errors[0]
    messages = list(dict.fromkeys(_message(one, place) for one in errors))
    if len(messages) > 1:
        wanted = [one.removeprefix(_EXPECTED).split(", ")[0] for one in messages if one.startswith(_EXPECTED)]
        messages = [_EXPECTED + " or ".join(wanted)] if len(wanted) == len(messages) else messages[:1]
    return InvalidField(place, messages[0], str(first["type"]), first.get("input"))


def _message(error: ErrorDetails, place: Place) -> str:
    kind, location = error["type"], error["loc"]
    if not place and kind == "missing":
        return "the body is empty: send a JSON object"
    if kind in _OBJECTS:
        return f"{_EXPECTED}a JSON object"
    if kind in _TEXT_OR_LIST and isinstance(location[-1], str) and location[-1] in ("<text>", "<parts>"):
        return f"{_EXPECTED}a valid string or a valid list"
    return str(error["msg"]).removeprefix("Value error, ")

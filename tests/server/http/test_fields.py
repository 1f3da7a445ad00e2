"""What becomes of fields, by a table made up for the purpose."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ktransformers.errors import FieldError
from ktransformers.server.http.fields import (
    IGNORED_HEADER,
    LoggedNames,
    hint,
    honour,
    ignored_header,
    inside,
    mapped,
    note_ignored,
    refuse,
    sort_fields,
    within,
)

TABLE = {
    "temperature": honour(),
    "length": honour(-1),
    "reach": mapped("length", 0),
    "store": hint(),
    "mirostat": refuse("temperature", 0),
    "thinking": mapped(lambda value: {"effort": value["how"]} if isinstance(value, dict) else {"effort": value}),
    "effort": honour(),
    "shape": honour({}),
    "form": mapped(lambda value: {"shape": {"form": value}}),
    "text": within({"size": honour(1), "tone": hint(), "hue": refuse("size", 0), "big": mapped("size")}),
    "options": inside({"num": mapped("length"), "tuned": refuse("temperature", 1)}),
}


@pytest.mark.parametrize(
    ("body", "honoured", "ignored"),
    [
        ({"temperature": None, "odd": None}, {}, ()),
        ({"temperature": 0.5}, {"temperature": 0.5}, ()),
        ({"length": -1}, {}, ()),
        ({"length": True}, {"length": True}, ()),
        ({"reach": 5}, {"length": 5}, ()),
        ({"reach": -1}, {}, ()),
        ({"reach": 5, "length": 5.0}, {"length": 5.0}, ()),
        ({"store": {"any": "thing"}}, {}, ()),
        ({"mirostat": 0}, {}, ()),
        ({"mirostat": 0.0}, {}, ()),
        ({"thinking": {"how": "low"}}, {"effort": "low"}, ()),
        ({"odd": 1, "even": 2}, {}, ("odd", "even")),
        ({"options": {"num": 3, "temperature": 1, "odd": 1, "tuned": 1}}, {"length": 3, "temperature": 1}, ("odd",)),
        ({"options": {}}, {}, ()),
        ({"text": {"big": 3, "tone": 1, "odd": 1, "hue": 0}}, {"text": {"size": 3}}, ("text.odd",)),
        ({"text": 5}, {"text": 5}, ()),
        ({"text": {}}, {}, ()),
        ({"shape": {"a": 1}, "form": 2}, {"shape": {"a": 1, "form": 2}}, ()),
        ({"form": 2, "shape": {"a": 1, "form": 2}}, {"shape": {"a": 1, "form": 2}}, ()),
    ],
)
def test_fields_are_sorted(body: dict[str, Any], honoured: dict[str, Any], ignored: tuple[str, ...]) -> None:
    assert sort_fields(body, TABLE) == (honoured, ignored)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"mirostat": 2}, "mirostat", "use temperature"),
        ({"mirostat": False}, "mirostat", "use temperature"),
        ({"reach": 5, "length": 6}, "length", "length says something else than reach"),
        ({"shape": {"form": {"b": 1}}, "form": {"c": 1}}, "form", "form says something else than shape does"),
        ({"text": {"hue": 1}}, "text.hue", "^text.hue: this server"),
        ({"text": {str(i): i for i in range(257)}}, "text", "^text: 257 fields"),
        ({"options": 5}, "options", "must be an object"),
        ({"options": {"tuned": 2}}, "tuned", "use temperature"),
        ({"options": {"num": 2}, "length": 3}, "length", "says something else"),
        ({str(i): i for i in range(257)}, "", "257 fields"),
    ],
)
def test_what_cannot_be_honoured_is_refused(body: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(FieldError, match=said) as raised:
        sort_fields(body, TABLE)
    assert raised.value.param == param


def test_strict_refuses_what_would_be_ignored() -> None:
    assert sort_fields({"odd": None, "store": 1}, TABLE, is_strict=True) == ({}, ())
    with pytest.raises(FieldError, match="'odd' has no effect"):
        sort_fields({"odd": 1}, TABLE, is_strict=True)


def test_the_header_carries_names_only() -> None:
    scope: dict[str, Any] = {}
    assert ignored_header(scope) == {}
    note_ignored(scope, ["odd", "a\r\nset-cookie: x", "odd", "Ü"])
    note_ignored(scope, ["later"])
    assert ignored_header(scope) == {IGNORED_HEADER: "odd, ?, later"}


def test_each_name_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    names = LoggedNames(limit=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            names.say(["odd", "even", "third"])
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "requests carry odd",
        "requests carry even",
    ]

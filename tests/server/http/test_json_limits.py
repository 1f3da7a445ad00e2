"""Counting what a JSON text holds, against what Python's parser makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktransformers.errors import ConfigError
from ktransformers.server.http import json_limits
from ktransformers.server.http.json_limits import JsonLimits, JsonSize, json_size

TEXTS = st.text(alphabet='"\\[]{},:aé\n', max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def measured(value: Any) -> tuple[int, int, int]:
    """depth, elements of all lists and objects, strings with lists and objects."""
    if isinstance(value, str):
        return 0, 0, 1
    if not isinstance(value, list | dict):
        return 0, 0, 0
    children = [measured(child) for child in (value.values() if isinstance(value, dict) else value)]
    depth = 1 + max((child[0] for child in children), default=0)
    names = len(value) if isinstance(value, dict) else 0
    return (
        depth,
        len(children) + sum(child[1] for child in children),
        1 + names + sum(child[2] for child in children),
    )


@given(VALUES, st.booleans(), st.integers(1, 9))
def test_what_is_counted_is_what_is_parsed(value: Any, is_ascii: bool, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_limits, "_PIECE", piece)  # strings and escapes lie across pieces
        size = json_size(json.dumps(value, ensure_ascii=is_ascii).encode())
    depth, num_values, num_nodes = measured(value)
    assert (size.depth, size.num_nodes) == (depth, num_nodes)
    assert num_values <= size.num_values <= num_values + num_nodes + 1  # empty lists count as one more


def test_limits() -> None:
    limits = JsonLimits(max_bytes=100, max_values=6, max_nodes=4, max_depth=3)
    for text in (b"[[[]]]", b"[1, 2, 3, 4, 5]", b'["[[[[", "a", "\\\\"]', b'"' + b"," * 50 + b'"', b""):
        limits.check(text)
    for text, reason in (
        (b"[[[[]]]]", "4 lists and objects within each other"),
        (b"[" * 50, "50 lists and objects"),
        (b"[1, 2, 3, 4, 5, 6]", "7 values"),
        (b'["a", "b", "\\"", "d"]', "5 strings"),
        ("[1]".encode("utf-16"), "UTF-8"),
    ):
        with pytest.raises(ConfigError, match=reason):
            limits.check(text)
    assert json_size(b"") == JsonSize(0, 1, 0)

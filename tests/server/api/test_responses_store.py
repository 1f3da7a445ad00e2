"""What /v1/responses keeps: how much, for whom, and that sizes add up."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from ktransformers.errors import UnknownIdError
from ktransformers.server.api.openai.responses.items import sealed, unsealed
from ktransformers.server.api.openai.responses.store import KeptResponse, ResponseStore, Turn

NUMBER = iter(range(1 << 30))


def turn(num_chars: int = 10) -> Turn:
    return Turn.of([{"id": f"item{next(NUMBER)}", "text": "x" * num_chars}])


def response(*context: Turn, num_chars: int = 10) -> KeptResponse:
    return KeptResponse(f"resp{next(NUMBER)}", b"{}", context, turn(num_chars))


def test_a_conversation_is_held_once() -> None:
    store, last = ResponseStore(1 << 20), response(turn(40_000))
    store.keep("a", last)
    for _ in range(100):
        last = response(*last.turns, turn())
        store.keep("a", last)
    assert len(store) == 101
    assert store.num_bytes < 1 << 20
    assert len(store.get("a", last.id).turns) == 202


def test_the_key_that_holds_most_loses_its_oldest() -> None:
    store = ResponseStore(60_000)
    small, large = response(turn(1000)), [response(turn(20_000)) for _ in range(3)]
    store.keep("b", small)
    store.keep("a", large[0])
    store.keep("a", large[1])
    store.get("a", large[0].id)  # used: the other one is older now
    store.keep("a", large[2])
    with pytest.raises(UnknownIdError, match="responses_store"):
        store.get("a", large[1].id)
    for key, kept in (("b", small), ("a", large[0]), ("a", large[2])):
        assert store.get(key, kept.id) is kept
    with pytest.raises(UnknownIdError):
        store.get("b", large[0].id)
    counted = ResponseStore(1 << 20, max_responses=2)
    kept = [response() for _ in range(3)]
    for one in kept:
        counted.keep("", one)
    assert len(counted) == 2
    with pytest.raises(UnknownIdError):
        counted.get("", kept[0].id)


def test_one_that_is_too_large_is_said(caplog: pytest.LogCaptureFixture) -> None:
    store = ResponseStore(10_000)
    small = response()
    store.keep("", small)
    for _ in range(2):
        store.keep("", response(turn(20_000)))
    assert store.get("", small.id) is small
    assert [("--responses_store" in record.getMessage()) for record in caplog.records] == [True]


def test_items_live_as_long_as_a_response_needs_them() -> None:
    store, first = ResponseStore(1 << 20), response(turn())
    second = response(*first.turns, turn())
    (item_id,) = first.answer.ids
    store.keep("", first)
    store.keep("", second)
    store.delete("", first.id)
    assert store.turn_of("", item_id) is first.answer
    store.delete("", second.id)
    for key in ("", "other"):
        with pytest.raises(UnknownIdError):
            store.turn_of(key, item_id)
    assert (store.num_bytes, len(store)) == (0, 0)


def test_sizes_add_up() -> None:
    draw, store = random.Random(7), ResponseStore(30_000, max_responses=20)
    held: list[tuple[str, KeptResponse]] = []
    for _ in range(500):
        key = draw.choice("ab")
        before = [one for of, one in held if of == key]
        context = draw.choice(before).turns[-6:] if before and draw.random() < 0.7 else ()
        kept = response(*context, turn(draw.randrange(2000)), num_chars=draw.randrange(2000))
        store.keep(key, kept)
        held.append((key, kept))
        if draw.random() < 0.2:
            of, one = held.pop(draw.randrange(len(held)))
            with suppress(UnknownIdError):
                store.delete(of, one.id)
        assert store.num_bytes <= 30_000
        assert len(store) <= 20
    for of, one in held:
        with suppress(UnknownIdError):
            store.delete(of, one.id)
    assert (store.num_bytes, len(store)) == (0, 0)


def test_reasoning_comes_back() -> None:
    for text in ("", "hm", "€\n" * 1000):
        assert unsealed(sealed(text) or "") == text
    for foreign in ("", "x", "gAAAAABo", "é", "=" * 5, "eA=="):
        assert unsealed(foreign) is None
    assert sealed("x" * (5 << 20)) is None

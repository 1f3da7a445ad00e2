"""Which turns leave a conversation that is too long: worked by hand, and against a search over all cuts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ktransformers.tokenizer.shortening import prompt_room, shorten

LETTERS = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}


def kept(roles: str, room: int, size: int = 10, nbytes: int = 10, max_len: int = 10) -> str | None:
    """What stays of turns of `size` tokens and `nbytes` each, as letters; None: nothing fits."""
    names = [LETTERS[role] for role in roles]

    def prompt_of(places: Sequence[int]) -> list[int] | int:
        return [at for at in places for _ in range(size)] if len(places) * size <= room else len(places) * size

    found = shorten(names, [nbytes] * len(roles), max_len, len(roles) * size, room, prompt_of)
    if found is None:
        return None
    places = list(dict.fromkeys(found.prompt_ids))
    assert found.num_dropped == len(roles) - len(places)
    return "".join(roles[at] for at in places)


@pytest.mark.parametrize(
    ("roles", "room", "left"),
    [
        ("suauau", 40, "suau"),
        ("suauau", 20, "su"),
        ("suauau", 19, None),
        ("uauau", 10, "u"),
        ("auau", 30, "uau"),  # an answer without a question, first
        ("su", 10, None),  # nothing may leave
        ("s", 5, None),
        ("sduasu", 40, "sdsu"),  # instructions stay wherever they are
        ("suatatauat", 70, "suat"),  # calls leave with their results, and with their question
        ("suatatat", 60, "suatat"),  # behind the last question, exchange by exchange
        ("suatatat", 40, "suat"),
        ("suatatat", 39, None),  # the latest exchange stays
        ("suaau", 20, "su"),
        ("uauatat", 50, "uatat"),
        ("uauatat", 40, "uat"),
    ],
)
def test_what_leaves(roles: str, room: int, left: str | None) -> None:
    assert kept(roles, room) == left


def test_the_next_prompts_begin_as_this_one_does() -> None:
    """Turns leave in groups of about a quarter of the context: so several turns in a row lose the same ones."""
    max_len, roles, cuts = 1000, "s", []
    for _ in range(60):
        roles += "u"
        left = roles if len(roles) * 25 <= 875 else kept(roles, 875, size=25, nbytes=100, max_len=max_len)
        assert left is not None
        cuts.append(len(roles) - len(left))
        roles += "a"
    # 1,000 bytes are five exchanges, and turns leave as soon as the prompt has more than 35 turns.
    assert cuts[:17] == [0] * 17
    assert cuts[17:] == [10 * (1 + at // 5) for at in range(43)]


@pytest.mark.parametrize("told", ["right", "least", "nothing"])
def test_fewest_groups_that_make_it_fit(told: str) -> None:
    """With turns of random sizes: what stays fits, at the least border that does, by a search over all.

    told: what is said of prompts that are too long, which only decides what is tried first.
    """
    draw = random.Random(5)
    for _ in range(300):
        sizes = [draw.randint(1, 50) for _ in range(draw.randint(1, 30))]
        for per_byte in (1, 3, lambda: draw.randint(0, 9)):
            tokens = [size * (per_byte if isinstance(per_byte, int) else per_byte()) for size in sizes]
            check_one(sizes, tokens, draw.randint(1, 400), draw.choice([1, 40, 100, 1000]), told)


def check_one(sizes: list[int], tokens: list[int], room: int, max_len: int, told: str) -> None:
    """sizes: bytes of each turn; tokens: of each turn."""
    roles = ["user" if at % 2 == 0 else "assistant" for at in range(len(sizes))]
    num_asked = 0

    def prompt_of(places: Sequence[int]) -> list[int] | int:
        nonlocal num_asked
        num_asked += 1
        count = sum(tokens[at] for at in places)
        return list(places) if count <= room else said(count)

    def said(count: int) -> int:
        return {"right": count, "least": room + 1, "nothing": 0}[told]

    last = max(at for at, role in enumerate(roles) if role == "user")
    borders = range(2, last + 1, 2)
    marks = [at for at in borders if sum(sizes[:at]) // max_len > sum(sizes[: at - 2]) // max_len]
    cuts = [*marks, *(at for at in borders if not marks or at > marks[-1])]
    want = next((at for at in cuts if sum(tokens[at:]) <= room), None)
    found = shorten(roles, sizes, max_len, said(sum(tokens)), room, prompt_of)
    assert (None if found is None else found.num_dropped) == want
    assert found is None or found.prompt_ids == list(range(found.num_dropped, len(sizes)))
    assert num_asked <= 4 + 2 * len(sizes).bit_length()


@pytest.mark.parametrize("room", [70_000, 30_000, 5_000, 500])
def test_few_prompts_are_made_of_a_long_conversation(room: int) -> None:
    """Of turns like those that people write, sizes say nearly how many tokens there are."""
    draw = random.Random(6)
    sizes = [draw.randint(20, 400) for _ in range(2000)]
    tokens = [max(size * draw.randint(20, 30) // 100, 1) for size in sizes]
    asked = []

    def prompt_of(places: Sequence[int]) -> list[int] | int:
        ids = [0] * sum(tokens[at] + 5 for at in places)
        asked.append(len(ids))
        return ids if len(ids) <= room else len(ids)

    roles = ["user", "assistant"] * 1000
    assert shorten(roles, sizes, 1 << 18, sum(tokens) + 10_000, room, prompt_of) is not None
    assert len(asked) <= 6


@pytest.mark.parametrize(
    ("max_len", "max_tokens", "room"), [(800, None, 700), (800, 20, 780), (800, 5000, 700), (4, None, 3), (1, None, 1)]
)
def test_room_for_an_answer(max_len: int, max_tokens: int | None, room: int) -> None:
    assert prompt_room(max_len, max_tokens) == room

"""What follows the last tokens where they stood before: against a search by hand over all places."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ktransformers.media.records import MEDIA_ID_BASE, media_ids
from ktransformers.scheduler.drafting.acceptance import AcceptanceRates
from ktransformers.scheduler.drafting.prompt_lookup import MAX_CANDIDATES, MAX_MATCH, MIN_MATCH, PACE, PromptLookup


class CountedRates(AcceptanceRates):
    """Keeps what it learns."""

    def __init__(self) -> None:
        super().__init__(MAX_MATCH)
        self.seen = list[tuple[int, bool]]()

    def add(self, match_len: int, was_right: bool, depth: int = 0, times: int = 1) -> None:
        super().add(match_len, was_right, depth, times)
        self.seen += [(min(match_len, MAX_MATCH), was_right)] * times

    def take(self) -> list[tuple[int, bool]]:
        seen, self.seen = self.seen, []
        return seen


def longest_match(ids: list[int]) -> tuple[int, int]:
    """(length, place of what follows) of the longest match of the last tokens among the latest places behind the same
    two, the latest of several; (0, 0): none."""
    best, seen = (0, 0), 0
    for place in range(len(ids) - 1, MIN_MATCH - 1, -1):
        length = 0
        while length < min(place, MAX_MATCH) and ids[place - 1 - length] == ids[-1 - length]:
            length += 1
        if length >= MIN_MATCH and seen < MAX_CANDIDATES:
            seen += 1
            best = max(best, (length, place), key=lambda found: found[0])
    return best


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 3), max_size=60))
def test_a_new_search_finds_the_longest_match(ids: list[int]) -> None:
    lookup = PromptLookup(ids)
    length, place = longest_match(ids)
    assert lookup.match_len == length
    if length:
        period = len(ids) - place
        assert lookup.draft(70) == [ids[place + i % period] for i in range(70)]
    else:
        assert lookup.draft(70) == []


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4)))
def test_a_match_goes_on_while_the_draft_is_right(prompt: list[int], answer: list[list[int]]) -> None:
    """Tokens come one by one or, where draft tokens were accepted, several at once."""
    rates = CountedRates()
    lookup, ids = PromptLookup(prompt, rates), list(prompt)
    for token_ids in answer:
        before, draft = lookup.match_len, lookup.draft(len(token_ids))
        num_right = next((at for at, one in enumerate(draft) if one != token_ids[at]), len(draft))
        lookup.extend(token_ids)
        ids += token_ids
        assert len(lookup) == len(ids)
        seen = [(min(before + at, MAX_MATCH), True) for at in range(num_right)]
        if before and num_right < len(token_ids):
            seen.append((min(before + num_right, MAX_MATCH), False))
        assert rates.take() == seen
        if before and num_right == len(token_ids):
            assert lookup.match_len == min(before + num_right, MAX_MATCH)
        else:
            assert lookup.match_len == longest_match(ids)[0]


def test_an_example() -> None:
    #                      the cat sat on the mat then the cat
    lookup = PromptLookup([7, 8, 9, 1, 7, 2, 3, 7, 8])
    assert (lookup.match_len, lookup.draft(3)) == (2, [9, 1, 7])
    lookup.extend([9])
    assert (lookup.match_len, lookup.draft(2)) == (3, [1, 7])
    lookup.extend([5])
    assert (lookup.match_len, lookup.draft(2)) == (0, [])


def test_a_long_prompt_is_taken_in_step_by_step() -> None:
    prompt = [*range(3 * PACE), 1, 2, 3]
    lookup = PromptLookup(prompt)
    steps = 0
    while not lookup.match_len:
        lookup.extend([4 + steps])
        steps += 1
    assert steps == 3
    assert lookup.draft(2) == [7, 8]
    assert len(lookup) == len(prompt) + 3


def test_all_ids_there_may_be() -> None:
    ids = [0, 0xFFFF, 0x10FFFF, 200_000, MEDIA_ID_BASE - 1]
    assert PromptLookup([*ids, 5, *ids[:2]]).draft(5) == [*ids[2:], 5, 0]


def test_pictures_are_matched_and_never_drafted() -> None:
    shown = media_ids(bytes(32), 4)
    before = PromptLookup([*shown, 7, 8, 9, 1, *shown])
    assert (before.match_len, before.draft(8)) == (4, [7, 8, 9, 1])
    assert len(before.chances(8)) == 4
    before.extend([7, 8, 9])
    assert (before.match_len, before.draft(3)) == (7, [1])
    before.extend([1])  # behind which the picture came
    assert (before.match_len, before.draft(3), before.chances(3)) == (0, [], ())

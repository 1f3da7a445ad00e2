"""Pseudo-ids of a picture's positions, by hashlib alone."""

from __future__ import annotations

from dataclasses import replace
from hashlib import shake_128

import pytest

from ktransformers.core import SamplingParams
from ktransformers.errors import ConfigError
from ktransformers.media.records import (
    MEDIA_ID_BASE,
    MediaItem,
    Sight,
    is_media_id,
    media_ids,
    num_media_ids,
    picture_stretches,
)
from ktransformers.scheduler.limits import Limits

DIGEST = bytes(range(32))


def test_ids_are_bits_of_the_digest_above_all_vocabularies() -> None:
    data = shake_128(DIGEST).digest(12)
    expected = [int.from_bytes(data[at : at + 4], "little") % 2**30 + 2**30 for at in (0, 4, 8)]
    assert media_ids(DIGEST, 3) == expected
    assert media_ids(DIGEST, 500)[:3] == expected
    assert all(MEDIA_ID_BASE <= one < 2**31 for one in media_ids(DIGEST, 500))


def test_ids_of_other_pictures_are_others() -> None:
    assert not set(media_ids(DIGEST, 300)) & set(media_ids(DIGEST[::-1], 300))


def test_an_id_is_a_tokens_or_a_pictures() -> None:
    assert [is_media_id(one) for one in (0, 262_143, MEDIA_ID_BASE - 1, MEDIA_ID_BASE)] == [False, False, False, True]
    assert num_media_ids([5, *media_ids(DIGEST, 7), 6]) == 7


def test_an_item_ends_behind_its_last_position() -> None:
    assert MediaItem(DIGEST, 4, 9).end == 13


LIMITS = Limits(max_len=64, vocab_size=100, is_models_limit=False)
PROMPT = [5, 6, *media_ids(DIGEST, 3), 7, *media_ids(DIGEST, 2), 8]


def test_a_prompt_may_hold_the_pictures_that_it_names() -> None:
    LIMITS.check(PROMPT, SamplingParams(), media=[MediaItem(DIGEST, 2, 6)])
    LIMITS.check(PROMPT, SamplingParams(), media=[MediaItem(DIGEST, 2, 3), MediaItem(DIGEST, 6, 2)])


@pytest.mark.parametrize(
    ("media", "words"),
    [
        ([], "names token"),
        ([MediaItem(DIGEST, 2, 3)], "names token"),
        ([MediaItem(DIGEST, 2, 30)], "positions 2 to 31 of a prompt of 9"),
        ([MediaItem(DIGEST, 2, 0)], "positions 2 to 1"),
        ([MediaItem(DIGEST, 6, 2), MediaItem(DIGEST, 2, 3)], "the one before it ends at 7"),
    ],
)
def test_pseudo_ids_are_a_pictures_or_refused(media: list[MediaItem], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LIMITS.check(PROMPT, SamplingParams(), media=media)


def test_stretches_are_neighbours_of_one_picture() -> None:
    apart = [MediaItem(DIGEST, 2, 3), MediaItem(DIGEST, 6, 2)]
    assert picture_stretches(PROMPT, apart) == picture_stretches(PROMPT, [MediaItem(DIGEST, 2, 6)]) == [(2, 5), (6, 8)]
    side_by_side = [MediaItem(DIGEST, 2, 1), MediaItem(DIGEST, 3, 2)]
    assert picture_stretches(PROMPT, side_by_side) == [(2, 3), (3, 5)]
    assert picture_stretches(PROMPT, []) == []


@pytest.mark.parametrize(("most", "is_refused"), [(3, False), (2, True)])
def test_pictures_that_have_to_be_whole_fit_a_step(most: int, is_refused: bool) -> None:
    limits = replace(LIMITS, max_picture_len=most, picture_sight=Sight.PICTURE)
    media = [MediaItem(DIGEST, 2, 6)]
    if not is_refused:
        limits.check(PROMPT, SamplingParams(), media=media)
        return
    with pytest.raises(ConfigError, match="a picture takes 3 positions, which this model computes in one step, and"):
        limits.check(PROMPT, SamplingParams(), media=media)

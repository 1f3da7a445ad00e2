"""Pseudo-ids of a picture's positions, by hashlib alone."""

from __future__ import annotations

from hashlib import shake_128

import pytest

from ktransformers.core import SamplingParams
from ktransformers.errors import ConfigError
from ktransformers.media.records import MEDIA_ID_BASE, MediaItem, is_media_id, media_ids, num_media_ids
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

"""Where the pictures of a sequence are, and the ids of their positions. Plain data: no torch, no pixels.

A position that shows a part of a picture has a pseudo-id in place of a token's: 30 bits of a digest of the picture and
of the place in it, above all vocabularies. So pages, prefixes, tiers, journals and sessions, which compare ids, need
not know which positions are pictures: equal ids are equal contents.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from hashlib import blake2b, shake_128
from struct import unpack

import msgspec

__all__ = [
    "MEDIA_ID_BASE",
    "MediaItem",
    "Sight",
    "is_media_id",
    "media_ids",
    "num_media_ids",
    "picture_stretches",
    "sight_salt",
    "whole_stretches",
]

MEDIA_ID_BASE = 1 << 30
"""The least pseudo-id. The largest fits into int32."""

_MASK = MEDIA_ID_BASE - 1


class Sight(StrEnum):
    """What positions of pictures see behind themselves; all of them see what is before.

    NOTHING: as positions of text. PICTURE: the rest of their picture. PICTURES: all pictures of the prompt, with the
    tokens around each. PROMPT: all of the prompt, whose texts do so, too. What a position sees has to be computed in
    one step with it. Of the last two, keys and values depend on what comes later, and so does `sight_salt`.
    """

    NOTHING = "nothing"
    PICTURE = "picture"
    PICTURES = "pictures"
    PROMPT = "prompt"


class MediaItem(msgspec.Struct, frozen=True):
    """A picture of a prompt, and where it stands.

    digest: 32 bytes of everything that decides what the tower makes of it: the name of its file in the store.
    start, length: positions from the first that shows a part of it to the last, with those around them that the family
    counts to the picture; those among them that show nothing (breaks between rows or tiles) have the ids of tokens.
    """

    digest: bytes
    start: int
    length: int

    @property
    def end(self) -> int:
        """The position behind its last one."""
        return self.start + self.length


def media_ids(digest: bytes, count: int) -> list[int]:
    """Return the pseudo-ids of a picture's positions, `count` of them, in their order."""
    numbers = unpack(f"<{count}I", shake_128(digest).digest(4 * count))
    return [MEDIA_ID_BASE + (number & _MASK) for number in numbers]


def is_media_id(token_id: int) -> bool:
    """Whether an id stands for a part of a picture."""
    return token_id >= MEDIA_ID_BASE


def num_media_ids(token_ids: Iterable[int]) -> int:
    """Return how many of these ids stand for parts of pictures."""
    return sum(map(is_media_id, token_ids))


def picture_stretches(token_ids: Sequence[int], media: Iterable[MediaItem]) -> list[tuple[int, int]]:
    """Return, in order, (first, last + 1) of all stretches of neighbouring positions that show one picture: families
    whose pictures see themselves as a whole do so within these."""
    found = list[tuple[int, int]]()
    for item in media:
        first = None
        for place in range(item.start, item.end + 1):
            is_shown = place < item.end and is_media_id(token_ids[place])
            if is_shown and first is None:
                first = place
            elif not is_shown and first is not None:
                found.append((first, place))
                first = None
    return found


def whole_stretches(token_ids: Sequence[int], media: Sequence[MediaItem], sight: Sight) -> list[tuple[int, int]]:
    """Return, in order, (first, last + 1) of all stretches of a prompt that one step has to compute."""
    if sight is Sight.NOTHING or not media:
        return []
    if sight is Sight.PICTURE:
        return picture_stretches(token_ids, media)
    return [(0, len(token_ids)) if sight is Sight.PROMPT else (media[0].start, media[-1].end)]


def sight_salt(token_ids: Sequence[int], media: Sequence[MediaItem], sight: Sight) -> str:
    """Return what keeps keys and values of a prompt apart from those of others that begin with the same ids and go on
    in another way; empty where ids say all."""
    if sight in (Sight.NOTHING, Sight.PICTURE) or not media:
        return ""
    end = whole_stretches(token_ids, media, sight)[0][1]
    return blake2b(array("q", token_ids[:end]).tobytes(), digest_size=16).hexdigest()

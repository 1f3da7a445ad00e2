"""A picture that is ready for a prompt, and who makes it ready."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ktransformers.errors import ConfigError
from ktransformers.media.records import MediaItem, is_media_id, media_ids

__all__ = ["PictureReader", "ReadPicture", "media_items", "texts_of", "with_media_ids"]


@dataclass(frozen=True, slots=True)
class ReadPicture:
    """A picture as a model's processor made it. Its tensors are in the store, under its digest.

    digest: 32 bytes, see MediaItem. text: what stands in the prompt for it: the tokens of its positions, and what the
    family writes around and between them. num_positions: those that the tower fills. width, height: pixels, upright.
    lead, trail: tokens in front of these and behind them that the family counts to the picture. closing: the end of
    `text` that only the last picture of a prompt has.
    """

    digest: bytes
    text: str
    num_positions: int
    width: int
    height: int
    lead: int = 0
    trail: int = 0
    closing: str = ""


class PictureReader(Protocol):
    """Reads pictures for one loaded model."""

    @property
    def placeholder(self) -> str:
        """The text that the model's chat template writes for one picture."""
        ...

    @property
    def position_token_ids(self) -> frozenset[int]:
        """The ids of tokens, in the text of a picture, whose positions the tower fills."""
        ...

    def read(self, data: bytes, detail: str | None = None) -> ReadPicture:
        """Read an encoded picture: PNG, JPEG, WebP, GIF and what else is allowed. Blocks; call it on a thread.

        detail: OpenAI's: low, high, auto; None: auto. Raises ConfigError, with words for the client, for what is no
        picture, or is larger than the limits.
        """
        ...


def with_media_ids(
    token_ids: Sequence[int], pictures: Sequence[ReadPicture], position_token_ids: frozenset[int]
) -> list[int]:
    """Return a prompt's ids with the pseudo-ids of its pictures in place of the tokens that hold their positions.

    Raises ConfigError where there are more or fewer of these than positions.
    """
    num_found = sum(one in position_token_ids for one in token_ids)
    num_wanted = sum(picture.num_positions for picture in pictures)
    if num_found != num_wanted:
        raise ConfigError(
            f"the prompt has {num_found} tokens for positions of pictures, and its pictures have {num_wanted}: such "
            "tokens may be spelled in its texts"
        )
    own = (one for picture in pictures for one in media_ids(picture.digest, picture.num_positions))
    return [next(own) if one in position_token_ids else one for one in token_ids]


def texts_of(pictures: Sequence[ReadPicture]) -> list[str]:
    """Return what stands in a prompt for each of its pictures."""
    return [one.text.removesuffix(one.closing) for one in pictures[:-1]] + [one.text for one in pictures[-1:]]


def media_items(prompt_ids: Sequence[int], pictures: Sequence[ReadPicture]) -> tuple[MediaItem, ...]:
    """Return where the pictures of a prompt stand, which are in their order in it."""
    places = (at for at, one in enumerate(prompt_ids) if is_media_id(one))
    return tuple(_item(picture, places) for picture in pictures)


def _item(picture: ReadPicture, places: Iterator[int]) -> MediaItem:
    own = [next(places) for _ in range(picture.num_positions)]
    return MediaItem(picture.digest, own[0] - picture.lead, picture.lead + own[-1] + 1 - own[0] + picture.trail)

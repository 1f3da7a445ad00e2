"""A picture that is ready for a prompt, and who makes it ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["PictureReader", "ReadPicture"]


@dataclass(frozen=True, slots=True)
class ReadPicture:
    """A picture as a model's processor made it. Its tensors are in the store, under its digest.

    digest: 32 bytes, see MediaItem. text: what stands in the prompt for it: the tokens of its positions, and what the
    family writes around and between them. num_positions: those that the tower fills. width, height: pixels, upright.
    """

    digest: bytes
    text: str
    num_positions: int
    width: int
    height: int


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

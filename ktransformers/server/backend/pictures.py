"""The pictures of a served model: who reads them, and whose files they are. The seam to `media/` and to towers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ktransformers.config import EngineConfig
from ktransformers.media.picture import PictureReader

__all__ = ["NO_TOWER", "PictureFiles", "PictureSupport", "ServedPictures", "picture_reader"]

NO_TOWER = "as its files hold no tower for images"
"""Why a model without one reads text only."""


class PictureFiles(Protocol):
    """The store of pictures that were read, as the server sees it."""

    @property
    def folder(self) -> Path:
        """The folder that engines find them in: EngineConfig.picture_folder."""
        ...

    def has(self, digest: bytes) -> bool:
        """Whether a picture is there, and stays for the moment."""
        ...


class ServedPictures(PictureReader, Protocol):
    """Reads the pictures of a served model, and owns the store that its engine finds them in."""

    @property
    def store(self) -> PictureFiles:
        """The store of what was read."""
        ...

    def hold(self, digests: Iterable[bytes]) -> None:
        """Keep the files of these pictures until they are released as often."""
        ...

    def release(self, digests: Iterable[bytes]) -> None:
        """Take a `hold` back."""
        ...

    def close(self) -> None:
        """End the process that decodes, and delete the store unless its folder was given."""
        ...


@dataclass(frozen=True, slots=True)
class PictureSupport:
    """What reads pictures for a model; or None, and why the model reads text only, as the end of a sentence."""

    reader: ServedPictures | None = None
    why_not: str = NO_TOWER


def picture_reader(config: EngineConfig) -> PictureSupport:
    """Start what reads pictures for this model, before its engine is started. Blocks.

    config.picture_folder: where the store outlives the server; None: in a private folder that `close` deletes.
    """
    return PictureSupport()

"""The pictures of a served model: who reads them, and whose files they are. The seam to `media/` and to towers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from ktransformers.config import EngineConfig
from ktransformers.engine.api.pictures import Pictures, why_no_pictures
from ktransformers.media.fetched import KnowingReader
from ktransformers.tokenizer import Tokenizer

__all__ = ["NO_TOWER", "PictureFiles", "PictureSupport", "ServedPictures", "picture_support", "why_text_only"]

NO_TOWER = "its files hold no tower for pictures"
"""Why a model reads text only, where nobody knows better."""


class PictureFiles(Protocol):
    """The store of pictures that were read, as the server sees it."""

    @property
    def folder(self) -> Path:
        """The folder that engines find them in: EngineConfig.picture_folder."""
        ...

    def has(self, digest: bytes) -> bool:
        """Whether a picture is there, and stays for the moment."""
        ...


class ServedPictures(KnowingReader, Protocol):
    """Reads the pictures of a served model, and knows the store that its engine finds them in."""

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


class PictureSupport(Protocol):
    """What a model that is to be loaded needs to read pictures: a store for its engine, then a reader.

    Made before the engine is, for `config` names the store's folder to it.
    """

    @property
    def config(self) -> EngineConfig:
        """What the engine is to be built of."""
        ...

    @property
    def why_not(self) -> str | None:
        """Why the model reads text only; None: it reads pictures."""
        ...

    @property
    def reader(self) -> ServedPictures | None:
        """Who reads pictures, once `attach` was called; None: nobody."""
        ...

    def attach(self, tokenizer: Tokenizer, *, has_tower: bool) -> None:
        """Take the tokenizer of the loaded model, and have it take pictures. has_tower: whether it was loaded with
        one."""
        ...

    def close(self) -> None:
        """End the process that decodes, and delete the store unless its folder was given. Safe to call twice."""
        ...


def why_text_only(config: EngineConfig) -> str | None:
    """Return why a model reads text only, by its files; None: it reads pictures."""
    return why_no_pictures(config)


def picture_support(config: EngineConfig) -> PictureSupport:
    """Return what a model needs to read pictures. Blocks. Raises ConfigError for a folder that others can enter.

    config.picture_folder: where the store outlives the server; None: in a private folder that `close` deletes.
    """
    return Pictures(config)

"""The pictures of one loaded model: whether it reads any, the folder of its store, and who reads them.

Pictures(config) ── .config, with picture_folder ──> build ──> attach(engine) ──> read ... close
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from ktransformers.config import EngineConfig
from ktransformers.engine.api.projector import gguf_of, projector_processor, write_processor
from ktransformers.engine.model.tower import projector_path
from ktransformers.engine.sequence.picture_parts import SentPicture
from ktransformers.errors import ConfigError, FormatError, UnsupportedError
from ktransformers.media.picture import PictureReader, ReadPicture
from ktransformers.media.reader import ChildReader
from ktransformers.media.records import MediaItem
from ktransformers.media.store import PictureStore
from ktransformers.tokenizer.tokenizer import Tokenizer

__all__ = ["Pictures", "as_served", "why_no_pictures"]

_log = logging.getLogger(__name__)

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_STAGED = "processor"

NO_TOWER = "it was loaded without a tower for pictures, as the log says"
"""Why a model reads text only whose files speak of pictures."""


def why_no_pictures(config: EngineConfig) -> str | None:
    """Return in words why a model is not to read pictures, or its files say nothing about them; None when it is. Reads
    headers only. Raises UnsupportedError or FormatError for a projector file that was named and is none."""
    if config.tower_device == "none":
        return "--tower_device none leaves its tower out"
    why_not = _why_no_processor(config)
    if why_not is None:
        return None
    try:
        return why_not if projector_processor(config) is None else None
    except (FormatError, UnsupportedError) as error:
        if config.mmproj is not None:
            raise
        return str(error)


def as_served(config: EngineConfig) -> EngineConfig:
    """Return what a model is opened with by those who plan or describe it only: with its tower, where `Pictures` would
    have it read pictures. Nothing is in the folder of its store."""
    return replace(config, picture_folder=Path("pictures") if why_no_pictures(config) is None else None)


def _why_no_processor(config: EngineConfig) -> str | None:
    """Why the model's folder has no processor of pictures; None when it has one."""
    folder = _folder(config)
    if folder is None or not (folder / "config.json").is_file():
        return "its folder holds no config.json of a model for images and text"
    try:
        values = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return f"{folder / 'config.json'} cannot be read"
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as known

    model_type = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(model_type, str) or model_type not in known:
        return f"its type, {model_type!r:.40}, has no tower for pictures"
    if not any((folder / name).is_file() for name in _PROCESSOR_FILES):
        return f"{folder} holds no {' or '.join(_PROCESSOR_FILES)}; copy them there from the original model"
    return None


def _folder(config: EngineConfig) -> Path | None:
    """Where config and processor of the model are."""
    if config.model_path is not None:
        return Path(config.model_path)
    path = config.gguf_path
    return None if path is None else Path(path) if Path(path).is_dir() else Path(path).parent


def _tower_key(config: EngineConfig) -> bytes:
    """What tells the tower of a GGUF from another one: names, sizes and times of the files beside it that may hold its
    weights. Nothing of safetensors, among which a model's identity knows the tower's."""
    path = gguf_of(config)
    if path is None:
        return b""
    folder, projector = _folder(config), projector_path(config, path)
    found = [] if projector is None else [projector]
    found += [] if folder is None else sorted(folder.glob("*.safetensors"))
    states = ((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in found)
    return blake2b(repr(list(states)).encode(), digest_size=32).digest()


def _own_folder(config: EngineConfig) -> Path | None:
    """The folder that a store is to have, which is there then; None: one that goes with the store."""
    if config.picture_folder is not None:
        config.picture_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return config.picture_folder


class Pictures:
    """The pictures of one model. why_not: why it reads none.

    given: with picture_folder where the store outlives the process. config: what the model is to be built of: that of
    a model that reads text only names no folder. Raises ConfigError for a folder that others can enter, and as
    `why_no_pictures`.
    """

    def __init__(self, given: EngineConfig):
        self._given, self._name = given, (_folder(given) or Path("the model")).name
        self.why_not = why_no_pictures(given)
        self.store = PictureStore(_own_folder(given)) if self.why_not is None else None
        self.config = replace(given, picture_folder=None if self.store is None else self.store.folder)
        self.reader: ChildReader | None = None

    def attach(self, tokenizer: Tokenizer, *, has_tower: bool = True) -> None:
        """Take the tokenizer of the model that was built, and have it take pictures; what reads them starts beside it.
        has_tower: whether it was built with one."""
        folder = _folder(self._given)
        if self.why_not is None and not has_tower:
            self.why_not = NO_TOWER
        if self.store is None or self.why_not is not None or folder is None:
            return
        try:
            staged = self._staged(folder, tokenizer, self.store)
        except (ConfigError, FormatError) as error:
            self.why_not = str(error)
            _log.warning("no pictures: %s", error)
            return
        self.reader = ChildReader(staged, self.store, _tower_key(self._given))
        tokenizer.use_pictures(self.reader)
        self.reader.start_ahead()

    def _staged(self, folder: Path, tokenizer: Tokenizer, store: PictureStore) -> Path:
        """The folder of the processor: the model's own or, where it has none, or its tokenizer is in another form (a
        GGUF file's, tiktoken's), one with the tokenizer that the model was loaded with. Raises ConfigError or
        FormatError."""
        made = store.folder / _STAGED
        own_is_missing = _why_no_processor(self._given) is not None
        processor = projector_processor(self._given) if own_is_missing else None
        if processor is not None:
            made.mkdir(mode=0o700, exist_ok=True)
            write_processor(made, processor, tokenizer)
            return made
        if (folder / "tokenizer.json").is_file():
            return folder
        made.mkdir(mode=0o700, exist_ok=True)
        tokenizer.backend.save_pretrained(made)
        for path in folder.glob("*config.json"):
            if not (made / path.name).exists():
                shutil.copyfile(path, made / path.name)
        return made

    def require(self) -> PictureReader:
        """Return who reads pictures. Raises UnsupportedError, which names the model, where it reads none."""
        if self.reader is None:
            raise UnsupportedError(f"{self._name} reads text only, no pictures: {self.why_not}")
        return self.reader

    def read(self, sent: Sequence[SentPicture]) -> list[ReadPicture]:
        """Read pictures, in their order. Blocks. Raises ConfigError, UnsupportedError as `require`."""
        if not sent:
            return []
        reader = self.require()
        return [reader.read(picture.data, picture.detail) for picture in sent]

    def require_all(self, media: Sequence[MediaItem]) -> None:
        """Raise ConfigError unless these pictures are in the store, and UnsupportedError as `require`."""
        self.require()
        if self.store is not None and not all(self.store.has(item.digest) for item in media):
            raise ConfigError(
                "the pictures of this session are gone: its cache can be used, but nothing of it computed again; send "
                "the conversation with its pictures"
            )

    @contextmanager
    def held(self, media: Sequence[MediaItem]) -> Iterator[None]:
        """Keep the files of these pictures meanwhile."""
        digests = [item.digest for item in media]
        if self.store is not None:
            self.store.hold(digests)
        try:
            yield
        finally:
            if self.store is not None:
                self.store.release(digests)

    def close(self) -> None:
        """End the reader's process, and delete the store. Safe to call twice."""
        if self.reader is not None:
            self.reader.close()
        elif self.store is not None:
            self.store.close()

"""A backend whose model reads pictures, and what reads them, without a tower or a decoder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktransformers.errors import ConfigError
from ktransformers.media.picture import ReadPicture
from ktransformers.media.reader import ChildReader, key_of
from ktransformers.media.records import Sight, media_ids
from ktransformers.media.store import PictureStore
from ktransformers.server.backend.base import ModelInfo
from ktransformers.tokenizer import Tokenizer
from tests.support.engines.fake_runner import byte_tokenizer
from tests.support.servers.scripted_backend import TEMPLATE, Script, ScriptedBackend

PAD = "\x01"
"""The token of a picture's positions."""

PNG = b"\x89PNG" + bytes(range(256))
"""As far as the reader below looks."""


class FakeStore(PictureStore):
    """Digests in place of files."""

    def __init__(self, folder: Path | None = None):
        self.folder, self.digests = folder or Path("/nowhere"), set[bytes]()

    def has(self, digest: bytes) -> bool:
        return digest in self.digests


class FakePictures(ChildReader):
    """Takes for a picture what begins as a PNG does; it has a position for each byte up to ten. calls: what was read,
    and with which detail."""

    placeholder = "<picture>"

    def __init__(self, store: FakeStore | None = None) -> None:
        self.store = store or FakeStore()
        self.calls: list[tuple[bytes, str | None]] = []
        self.held = Counter[bytes]()
        self.read_before = dict[tuple[bytes, str | None], ReadPicture]()

    def read(self, data: bytes, detail: str | None = None) -> ReadPicture:
        self.calls.append((data, detail))
        if data[:4] != PNG[:4]:
            raise ConfigError("it is no picture")
        digest = key_of(data)
        self.store.digests.add(digest)
        num_positions = min(len(data), 10)
        made = ReadPicture(digest, f"<v>{PAD * num_positions}</v>", num_positions, 16, 16)
        self.read_before[digest, detail] = made
        return made

    def known(self, key: bytes, detail: str | None = None) -> ReadPicture | None:
        return self.read_before.get((key, detail)) if self.store.has(key) else None

    @property
    def position_token_ids(self) -> frozenset[int]:
        return frozenset(TOKENIZER.encode(PAD))

    def hold(self, digests: Iterable[bytes]) -> None:
        self.held.update(digests)

    def release(self, digests: Iterable[bytes]) -> None:
        self.held.subtract(digests)


class PictureTokenizer(Tokenizer):
    """Writes each picture's text into its turn, as the real one does where templates take strings only."""

    def apply_chat_template(
        self, messages: Any, *more: Any, pictures: Sequence[ReadPicture] = (), **fields: Any
    ) -> Any:
        texts = iter(pictures)
        turns = [
            {**one, "content": one["content"] if isinstance(one["content"], str) else _text(one["content"], texts)}
            for one in messages
        ]
        ids = super().apply_chat_template(turns, *more, **fields)
        known = [id for one in pictures for id in media_ids(one.digest, one.num_positions)]
        waiting, pad = iter(known), self.encode(PAD)[0]
        made = [next(waiting) if id == pad else id for id in ids]
        assert next(waiting, None) is None
        return made


def _text(parts: Iterable[dict[str, str]], pictures: Any) -> str:
    return "".join(part["text"] if part["type"] == "text" else next(pictures).text for part in parts)


TOKENIZER = PictureTokenizer(byte_tokenizer(TEMPLATE).backend)


class PictureBackend(ScriptedBackend):
    """A ScriptedBackend that says "ok" to everything, with eyes unless `pictures` is None."""

    can_go_on = True
    max_picture_len: int = 0
    picture_sight = Sight.NOTHING

    def __init__(self, *scripts: Script, pictures: FakePictures | None = None):
        super().__init__(*(scripts or [Script(["ok"])] * 20))
        self.pictures = pictures

    @property
    def prompts(self) -> list[str]:
        """What was asked, with a # for each position of a picture."""
        shown = [[TOKENIZER.encode("#")[0] if id >= 1 << 30 else id for id in one.prompt_ids] for one in self.requests]
        return [TOKENIZER.decode(ids, skip_special_tokens=False) for ids in shown]

    @property
    def model(self) -> ModelInfo:
        found = replace(
            super().model,
            tokenizer=TOKENIZER,
            max_picture_len=self.max_picture_len,
            picture_sight=self.picture_sight,
        )
        return found if self.pictures is None else replace(found, pictures=self.pictures, no_pictures=None)

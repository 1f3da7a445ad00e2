"""Backends of models that read pictures: the engine is told the folder, requests the reader, and both end together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

from ktransformers.config import EngineConfig
from ktransformers.server.backend.interfaces import balance_serve, ktransformers
from ktransformers.server.backend.interfaces.transformers import TransformersInterface
from ktransformers.tokenizer import Tokenizer
from tests.support.models.demo import DEMO_GGUF
from tests.support.servers.balance_backend import backend, run
from tests.support.servers.picture_backend import FakePictures, FakeStore


@dataclass
class Eyes:
    """Support for pictures. tokenizer: that was attached."""

    config: EngineConfig
    reader: FakePictures
    why_not: str | None = None
    tokenizer: Tokenizer | None = None
    is_closed: bool = False

    def attach(self, tokenizer: Tokenizer, *, has_tower: bool) -> None:
        self.tokenizer = tokenizer

    def close(self) -> None:
        self.is_closed = True


def with_eyes(monkeypatch: pytest.MonkeyPatch, module: ModuleType, folder: Path) -> list[Eyes]:
    """Let a backend have eyes; returns those that it has got."""
    made: list[Eyes] = []

    def support(config: EngineConfig) -> Eyes:
        made.append(Eyes(replace(config, picture_folder=folder), FakePictures(FakeStore(folder))))
        return made[-1]

    monkeypatch.setattr(module, "Pictures", support)
    return made


def test_balance_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_eyes(monkeypatch, balance_serve, tmp_path)

    async def work() -> None:
        async with backend() as made:
            (eyes,) = found
            assert made.model.pictures is eyes.reader
            assert made.model.tokenizer is eyes.tokenizer
            assert made.model.modalities == ["text", "image"]
            assert made.supervisor._config.engine.picture_folder == tmp_path
            assert not eyes.is_closed
        assert eyes.is_closed

    run(work)


def test_ktransformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_eyes(monkeypatch, ktransformers, tmp_path)

    async def work() -> None:
        made = ktransformers.KTransformersInterface(EngineConfig(gguf_path=DEMO_GGUF, cache_lens=256))
        await made.start()
        (eyes,) = found
        assert made.model.pictures is eyes.reader
        assert made.model.tokenizer is eyes.tokenizer
        assert made._require().loop.engine.config.picture_folder == tmp_path
        await made.close()
        assert eyes.is_closed

    asyncio.run(work())


def test_an_engine_that_does_not_load_leaves_no_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_eyes(monkeypatch, ktransformers, tmp_path)

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(ktransformers, "open_loop", fail)
    made = ktransformers.KTransformersInterface(EngineConfig(gguf_path=DEMO_GGUF, cache_lens=256))
    with pytest.raises(RuntimeError):
        asyncio.run(made.start())
    assert [eyes.is_closed for eyes in found] == [True]


def test_the_transformers_backend_reads_text_only() -> None:
    async def work() -> None:
        made = TransformersInterface(EngineConfig(gguf_path=DEMO_GGUF, cache_lens=256))
        await made.start()
        assert made.model.modalities == ["text"]
        assert "balance_serve" in (made.model.no_pictures or "")
        await made.close()

    asyncio.run(work())

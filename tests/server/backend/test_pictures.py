"""Backends of models that read pictures: the engine is told the folder, requests the reader, and both end together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType

import pytest

from ktransformers.config import EngineConfig
from ktransformers.server.backend.interfaces import balance_serve, ktransformers
from ktransformers.server.backend.interfaces.transformers import TransformersInterface
from ktransformers.server.backend.pictures import PictureSupport
from tests.support.models.demo import DEMO_GGUF
from tests.support.servers.balance_backend import backend, run
from tests.support.servers.picture_backend import FakePictures, FakeStore


def with_eyes(monkeypatch: pytest.MonkeyPatch, module: ModuleType, pictures: FakePictures) -> list[EngineConfig]:
    """Let a backend find these pictures, and return what it asks for."""
    asked: list[EngineConfig] = []

    def reader(config: EngineConfig) -> PictureSupport:
        asked.append(config)
        return PictureSupport(pictures)

    monkeypatch.setattr(module, "picture_reader", reader)
    return asked


def test_balance_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = FakePictures(FakeStore(tmp_path))
    asked = with_eyes(monkeypatch, balance_serve, pictures)

    async def work() -> None:
        async with backend() as made:
            assert made.model.pictures is pictures
            assert made.model.modalities == ["text", "image"]
            assert made.supervisor._config.engine.picture_folder == tmp_path
            assert not pictures.is_closed
        assert pictures.is_closed

    run(work)
    assert len(asked) == 1


def test_ktransformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = FakePictures(FakeStore(tmp_path))
    with_eyes(monkeypatch, ktransformers, pictures)

    async def work() -> None:
        made = ktransformers.KTransformersInterface(EngineConfig(gguf_path=DEMO_GGUF, cache_lens=256))
        await made.start()
        assert made.model.pictures is pictures
        assert made._require().loop.engine.config.picture_folder == tmp_path
        await made.close()
        assert pictures.is_closed

    asyncio.run(work())


def test_an_engine_that_does_not_load_leaves_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = FakePictures()
    with_eyes(monkeypatch, ktransformers, pictures)

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(ktransformers, "open_loop", fail)
    made = ktransformers.KTransformersInterface(EngineConfig(gguf_path=DEMO_GGUF, cache_lens=256))
    with pytest.raises(RuntimeError):
        asyncio.run(made.start())
    assert pictures.is_closed


def test_the_transformers_backend_reads_text_only() -> None:
    async def work() -> None:
        made = TransformersInterface(EngineConfig(gguf_path=DEMO_GGUF, cache_lens=256))
        await made.start()
        assert made.model.modalities == ["text"]
        assert "balance_serve" in made.model.no_pictures
        await made.close()

    asyncio.run(work())

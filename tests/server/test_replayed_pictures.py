"""Requests with pictures that go on in the next server: what was read is not read again, unless its files are gone."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktransformers.core import TokenEvent
from ktransformers.media.picture import ReadPicture
from ktransformers.server.backend.base import GenerationRequest, ModelInfo
from tests.server.test_replay import KEEP, NUM_TOKENS, GoingBackend, Server, read, read_all, run
from tests.support.servers.asgi_client import Connection
from tests.support.servers.picture_backend import PNG, TOKENIZER, FakePictures, FakeStore

URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
WRONG = {"type": "image_url", "image_url": {"url": "data:,nothing"}}
RESULT = {"role": "tool", "tool_call_id": "a", "content": [WRONG]}


class SeeingBackend(GoingBackend):
    """With eyes. requests: what it was asked."""

    def __init__(self, pictures: FakePictures) -> None:
        super().__init__()
        self.pictures, self.requests = pictures, list[GenerationRequest]()

    @property
    def model(self) -> ModelInfo:
        return replace(super().model, tokenizer=TOKENIZER, max_len=4096, pictures=self.pictures, no_pictures=None)

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        async for event in super().inference(request):
            yield event


class ChangedPictures(FakePictures):
    """Reads the same picture otherwise."""

    def read(self, data: bytes, detail: str | None = None) -> ReadPicture:
        return super().read(data + b"!", detail)


def life(folder: Path, pictures: FakePictures) -> Server[SeeingBackend]:
    return Server(folder, SeeingBackend(pictures))


def ask(server: Server[Any], **more: Any) -> Connection:
    turns = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "What?"}]}, RESULT]
    body = {"messages": turns, "stream": True, "max_tokens": NUM_TOKENS, "seed": 4, **more}
    return server.open("POST", "/v1/chat/completions", body, **KEEP)


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_pictures_are_found_again(tmp_path: Path, is_kept: bool, n: int) -> None:
    async def work() -> None:
        store = FakeStore()
        server = await life(tmp_path, FakePictures(store)).start()
        server.backend.allow(4)
        first = await read(ask(server, n=n), 4)
        asked = server.backend.requests
        assert len(server.backend.pictures.calls) == 2
        assert set(server.backend.pictures.held.values()) == {1}
        await server.die()

        server = await life(tmp_path, FakePictures(store if is_kept else None)).start()
        connection = server.open("GET", "/v1/requests/mine/stream")
        server.backend.allow(n * NUM_TOKENS)
        whole = await read_all(await connection.begun())
        assert whole.startswith(first)
        assert len(server.backend.pictures.calls) == (0 if is_kept else 2)
        assert [one.media for one in server.backend.requests] == [one.media for one in asked]
        assert [one.prompt_ids for one in server.backend.requests] == [one.prompt_ids for one in asked]
        assert asked[0].media
        assert not +server.backend.pictures.held
        await server.die()

    run(work)


def test_a_picture_that_is_read_otherwise_ends_the_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        server = await life(tmp_path, FakePictures()).start()
        server.backend.allow(4)
        await read(ask(server), 4)
        await server.die()
        server = await life(tmp_path, ChangedPictures()).start()
        assert not server.backend.requests
        assert not +server.backend.pictures.held
        await server.die()

    run(work)
    assert "cannot go on after the restart: its pictures are gone" in caplog.text

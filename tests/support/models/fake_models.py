"""Several models without weights behind one gateway: each says its name, and loads, fails and ends as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import httpx

from ktransformers.core import FinishReason, GenerationStats, Progress, SamplingParams, TokenEvent
from ktransformers.engine.model.card import ModelCard
from ktransformers.errors import KTransformersError
from ktransformers.server.backend.base import GenerationRequest, ModelInfo
from ktransformers.server.config import ServerConfig
from ktransformers.server.multi_model.serving import Models, ModelToServe
from tests.support.engines.fake_runner import CHAT_TEMPLATE, byte_tokenizer
from tests.support.servers.asgi_client import Connection
from tests.support.servers.fake_backend import FakeBackend

TOKENIZER = byte_tokenizer(CHAT_TEMPLATE)


class Life:
    """What all loads of one model share. may_load, may_answer: gates. error: what the next loads raise."""

    def __init__(self, name: str):
        self.name = name
        self.may_load, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_load.set()
        self.may_answer.set()
        self.error: Exception | None = None
        self.num_loads = self.num_closed = 0
        self.asked: list[GenerationRequest] = []
        self.now: FakeModel | None = None

    def info(self) -> ModelInfo:
        card = ModelCard(family="fake", num_bytes=1000, digest=self.name * 8, num_parameters=30_500_000_000)
        params = SamplingParams(temperature=0)
        return ModelInfo(TOKENIZER, 256, TOKENIZER.vocab_size, (), params, None, f"the fake {self.name}", card=card)


class FakeModel(FakeBackend):
    """Answers with its name and then, once it may, with a full stop."""

    name: ClassVar[str] = "fake"
    can_suspend: ClassVar[bool] = True

    def __init__(self, life: Life):
        super().__init__(is_loaded=False)
        self.life = life
        self.gone: asyncio.Future[KTransformersError] = asyncio.get_running_loop().create_future()

    async def start(self, progress: Progress | None = None) -> None:
        self.life.num_loads += 1
        await self.life.may_load.wait()
        if self.life.error is not None:
            raise self.life.error
        self.life.now, self.is_loaded = self, True

    @property
    def model(self) -> ModelInfo:
        return replace(self.life.info(), description="loaded")

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        self.life.asked.append(request)
        stats = GenerationStats(prompt_len=len(request.prompt_ids), completion_len=1)
        yield TokenEvent(7, self.life.name, stats)
        await asyncio.wait(
            (asyncio.ensure_future(self.life.may_answer.wait()), self.gone), return_when="FIRST_COMPLETED"
        )
        if self.gone.done():
            raise self.gone.result()
        stats.completion_len = 2
        yield TokenEvent(TOKENIZER.eos_token_id, ".", stats, finish_reason=FinishReason.STOP, stop=2)

    def suspend(self, request_id: str) -> None:
        """It goes on all the same."""

    def resume(self, request_id: str) -> None:
        """It has gone on."""

    async def lost(self) -> KTransformersError:
        return await asyncio.shield(self.gone)

    async def close(self) -> None:
        self.is_loaded = False
        self.life.num_closed += 1


class Lab:
    """Models a, b, c ... of size 1 each, or of `sizes`, and a memory for some of them. The clock stands still."""

    def __init__(
        self,
        sizes: Mapping[str, int] | Sequence[str] = ("a", "b"),
        memory: int = 1,
        idle: float = float("inf"),
        kept: Sequence[str] = (),
        first: Sequence[str] = (),
        **config: Any,
    ):
        self.now = 1000.0
        found = sizes if isinstance(sizes, Mapping) else dict.fromkeys(sizes, 1)
        self.lives = {name: Life(name) for name in found}
        general = ServerConfig(**config)

        def to_serve(name: str) -> ModelToServe:
            names = (name, f"{name}:30b")
            return ModelToServe(
                config=replace(general, model_names=names, listed_names=names),
                kind=FakeModel,
                make=lambda: FakeModel(self.lives[name]),
                outline=self.lives[name].info(),
                nbytes={"cpu": found[name]},
                is_kept=name in kept,
                is_first=name in first,
            )

        models = [to_serve(name) for name in found]
        self.models = Models(models, general, {"cpu": memory}, idle, clock=lambda: self.now)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Connection:
        return Connection(
            self.models.app, method, path, body, {name.replace("_", "-"): v for name, v in headers.items()}
        )

    async def get(self, path: str, **more: Any) -> httpx.Response:
        return await self.send("GET", path, **more)

    async def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.models.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    def chat(self, model: str | None, stream: bool = False, **more: Any) -> Connection:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "stream": stream, **more}
        return self.ask("POST", "/v1/chat/completions", body if model is None else body | {"model": model})

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.models.manager.poke()

    @property
    def running(self) -> list[str]:
        return [name for name in self.lives if self.models.pool.state(name) == "running"]

    async def close(self) -> None:
        await self.models.stop()

"""The bundled model under several names, on real backends, behind one gateway in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx

from ktransformers.config import EngineConfig
from ktransformers.server.backend.base import BackendInterfaceBase
from ktransformers.server.backend.interfaces.balance_serve import BalanceServeInterface
from ktransformers.server.backend.interfaces.ktransformers import KTransformersInterface
from ktransformers.server.balance.supervisor import BalanceConfig
from ktransformers.server.config import ServerConfig
from ktransformers.server.multi_model.needs import ModelNeeds, ToPlan, pinned, plan_needs
from ktransformers.server.multi_model.outline import outline_of
from ktransformers.server.multi_model.serving import Models, ModelToServe
from tests.support.models.demo import DEMO_GGUF

CONFIG = EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=2048)


class Demo:
    """models: what serves. The clock stands still. made: the backends that were ever made, by name."""

    def __init__(self, balanced: Sequence[str], single: Sequence[str], num_at_once: int):
        self.now, self.made = 0.0, dict[str, list[BackendInterfaceBase]]()
        needs = plan_needs(ToPlan(CONFIG, page_size=64))
        config = ServerConfig(model_names=("x",))
        self.models = Models(
            [self._model(name, name in balanced, needs) for name in sorted((*balanced, *single))],
            config,
            {device: num_at_once * nbytes for device, nbytes in needs.nbytes.items()},
            idle_seconds=60.0,
            clock=lambda: self.now,
        )

    def _model(self, name: str, is_balanced: bool, needs: ModelNeeds) -> ModelToServe:
        engine = pinned(CONFIG, needs)

        def make() -> BackendInterfaceBase:
            if not is_balanced:
                made: BackendInterfaceBase = KTransformersInterface(engine)
            else:
                balance = BalanceConfig(engine, max_engine_restarts=0, has_spare_engine=False, log_level="error")
                made = BalanceServeInterface(balance)
            self.made.setdefault(name, []).append(made)
            return made

        return ModelToServe(
            config=ServerConfig(model_names=(name,), listed_names=(name,)),
            kind=BalanceServeInterface if is_balanced else KTransformersInterface,
            make=make,
            outline=replace(outline_of(engine, needs)),
            nbytes=needs.nbytes,
        )

    @property
    def running(self) -> list[str]:
        return [model.name for model in self.models.served if self.models.pool.state(model.name) == "running"]

    async def post(self, path: str, body: Any) -> Any:
        transport = httpx.ASGITransport(app=self.models.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.models.manager.poke()


@asynccontextmanager
async def demo_models(
    balanced: Sequence[str] = (), single: Sequence[str] = (), num_at_once: int = 1
) -> AsyncIterator[Demo]:
    async with asyncio.timeout(240):
        made = Demo(balanced, single, num_at_once)
        try:
            yield made
        finally:
            await made.models.stop()

"""What the manager does with the pool's decisions: nobody is counted twice or forgotten, whenever he leaves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from ktransformers.errors import EngineError, KTransformersError, LoadFailedError, NotReadyError
from ktransformers.server.multi_model.model_manager import ModelManager
from ktransformers.server.multi_model.pool import ModelPool, ModelState, PooledModel
from tests.support.servers.balance_backend import until


class Model:
    """gate: what a load waits for. error: what it raises."""

    def __init__(self) -> None:
        self.gate, self.error = asyncio.Event(), None
        self.is_open = False
        self.num_loads = 0

    async def start(self) -> None:
        assert not self.is_open
        self.is_open = True
        self.num_loads += 1
        try:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
        except BaseException:
            self.is_open = False
            raise

    async def lost(self) -> KTransformersError:
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.is_open = False


def run(
    work: Callable[[ModelManager, dict[str, Model]], Awaitable[None]], num_models: int = 2, num_at_once: int = 1
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            models = {name: Model() for name in "abcde"[:num_models]}
            pool = ModelPool([PooledModel(name, {"cpu": 1}) for name in models], {"cpu": num_at_once}, float("inf"))
            manager = ModelManager(pool, models, 1000)
            try:
                await work(manager, models)
            finally:
                await manager.close()
            assert not any(model.is_open for model in models.values())

    asyncio.run(main())


@pytest.mark.parametrize("num_turns", range(6))
def test_who_leaves_while_he_is_let_in_is_counted_out(num_turns: int) -> None:
    """He is cancelled so many turns of the event loop after the load has ended: before, while and after he hears."""

    async def work(manager: ModelManager, models: dict[str, Model]) -> None:
        entering = asyncio.create_task(manager.enter("a"))
        await until(lambda: models["a"].is_open)
        models["a"].gate.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        entering.cancel()
        (result,) = await asyncio.gather(entering, return_exceptions=True)
        await until(lambda: manager.pool.state("a") is ModelState.RUNNING)
        if result is None:
            manager.leave("a")
        assert (manager.pool.num_users("a"), manager.pool.num_waiting("a"), manager.num_waiting) == (0, 0, 0)

    run(work)


def test_all_who_wait_hear_of_a_load_that_fails_and_of_the_end() -> None:
    async def work(manager: ModelManager, models: dict[str, Model]) -> None:
        models["a"].error = EngineError("no")
        entering = [asyncio.create_task(manager.enter(name)) for name in "aab"]
        await until(lambda: models["a"].is_open)
        models["a"].gate.set()
        await until(lambda: models["b"].is_open)
        with pytest.raises(LoadFailedError, match="the model a could not be loaded"):
            await manager.enter("a")
        entering.append(asyncio.create_task(manager.enter("b")))
        await until(lambda: manager.num_waiting == 2)
        manager.drain()
        results = await asyncio.gather(*entering, return_exceptions=True)
        assert [type(one) for one in results] == [LoadFailedError, LoadFailedError, NotReadyError, NotReadyError]
        with pytest.raises(NotReadyError):
            await manager.enter("a")
        assert [manager.pool.num_waiting(name) for name in "ab"] == [0, 0]

    run(work)


def test_a_model_that_is_wanted_without_a_request() -> None:
    async def work(manager: ModelManager, models: dict[str, Model]) -> None:
        models["a"].gate.set()
        await manager.load("a")
        assert (manager.pool.state("a"), manager.pool.num_users("a")) == (ModelState.RUNNING, 0)
        models["b"].gate.set()
        models["b"].error = EngineError("no")
        with pytest.raises(LoadFailedError):
            await manager.load("b")

    run(work)


def test_any_crowd_that_comes_and_leaves_as_it_likes_leaves_nothing_behind(
    random_cases: Callable[[int, int], int],
) -> None:
    for seed in range(random_cases(20, 1000)):
        rng = random.Random(seed)

        async def visit(manager: ModelManager, name: str, rng: random.Random) -> None:
            await manager.enter(name)
            try:
                for _ in range(rng.randrange(4)):
                    assert manager.pool.state(name) is ModelState.RUNNING
                    await asyncio.sleep(0)
            finally:
                manager.leave(name)

        async def work(manager: ModelManager, models: dict[str, Model], rng: random.Random = rng) -> None:
            for model in models.values():
                model.gate.set()
            visits = []
            for _ in range(60):
                visits.append(asyncio.create_task(visit(manager, rng.choice(list(models)), rng)))
                if rng.random() < 0.3:
                    rng.choice(visits).cancel()
                if rng.random() < 0.5:
                    await asyncio.sleep(0)
                manager.pool.check_integrity()
                assert sum(model.is_open for model in models.values()) <= 2
            await asyncio.gather(*visits, return_exceptions=True)
            assert all(not manager.pool.num_users(name) and not manager.pool.num_waiting(name) for name in models)
            assert manager.num_waiting == 0

        run(work, num_models=4, num_at_once=2)

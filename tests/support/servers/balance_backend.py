"""balance_serve with an engine without a model: requests, and what their answers have to be."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from ktransformers.config import EngineConfig
from ktransformers.core import FinishReason, SamplingParams, TokenEvent
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.backend.interfaces.balance_serve import BalanceServeInterface
from ktransformers.server.backend.profiler import ProfileConfig
from ktransformers.server.balance.supervisor import BalanceConfig
from ktransformers.system.restarts import Clock
from tests.support.models.demo import DEMO_GGUF
from tests.support.servers.balance_fakes import MODEL_LEN, POISON
from tests.support.servers.fake_engine import VOCAB_SIZE, answer_alone, make_config, make_request

DEADLINE = 60.0


def run(work: Callable[[], Awaitable[None]], seconds: float = DEADLINE) -> None:
    async def main() -> None:
        async with asyncio.timeout(seconds):
            await work()

    asyncio.run(main())


@asynccontextmanager
async def backend(
    factory: str = "load",
    cache_lens: int = 4000,
    max_unread: int = 4096,
    clock: Clock | None = None,
    model: Path = DEMO_GGUF,
    chunk_size: int = 16,
    profile: ProfileConfig | None = None,
    prefix_cache: bool = True,
    **config: Any,
) -> AsyncIterator[BalanceServeInterface]:
    engine = EngineConfig(gguf_path=model, cache_lens=cache_lens, chunk_size=chunk_size, prefix_cache=prefix_cache)
    settings = {"page_size": 4, "max_batch_size": 8, "log_level": "error", "checks_integrity": True}
    settings |= {"has_spare_engine": False} | config
    balance = BalanceConfig(engine=engine, factory=f"tests.support.servers.balance_fakes:{factory}", **settings)
    made = BalanceServeInterface(balance, max_unread, clock, profile)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


def request(number: int, prompt: tuple[int, ...] | None = None, **fields: Any) -> GenerationRequest:
    rng = random.Random(number)
    params = SamplingParams(
        **{"seed": number, "max_tokens": rng.randint(1, 60), "ignore_eos": bool(number % 2), **fields.pop("params", {})}
    )
    ids = prompt or tuple(rng.choice([i for i in range(VOCAB_SIZE) if i != POISON]) for _ in range(rng.randint(1, 50)))
    return GenerationRequest(request_id=f"r{number}", prompt_ids=ids, params=params, **fields)


def alone(asked: GenerationRequest) -> tuple[list[int], FinishReason]:
    record = make_request("x", asked.prompt_ids)
    config = make_config(num_pages=1000, page_size=4, max_model_len=MODEL_LEN)
    return answer_alone(msgspec.structs.replace(record, params=asked.params), config)


async def collect(made: BalanceServeInterface, asked: GenerationRequest) -> list[TokenEvent]:
    async with aclosing(made.inference(asked)) as events:
        return [event async for event in events]


def check(events: list[TokenEvent], asked: GenerationRequest) -> None:
    tokens, reason = alone(asked)
    assert [event.token_id for event in events] == tokens, asked.request_id
    assert events[-1].finish_reason is reason
    stats = events[-1].stats
    assert (stats.prompt_len, stats.completion_len) == (len(asked.prompt_ids), len(tokens))
    assert stats.prefill_seconds > 0


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.001)


def gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True

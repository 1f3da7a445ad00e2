"""Everything at once: many requests, short of pages, some aborted, the engine lost on the way."""

from __future__ import annotations

import random

import pytest

from ktransformers.core import FinishReason
from tests.support.servers.fake_engine import Loop, make_config, make_request


@pytest.mark.every(5)
@pytest.mark.parametrize("chunk_size", [16, 256])
@pytest.mark.parametrize("max_batch_size", [1, 4, 32])
@pytest.mark.parametrize("has_prefix_cache", [True, False])
@pytest.mark.parametrize("max_itl_ratio", [0.0, 1.5])
def test_64_mixed_requests(chunk_size: int, max_batch_size: int, has_prefix_cache: bool, max_itl_ratio: float) -> None:
    """As the issue's test, in small: some aborted, the engine lost three times, pages short."""
    rng = random.Random(chunk_size + max_batch_size)
    config = make_config(
        num_pages=24,
        page_size=8,
        chunk_size=chunk_size,
        max_batch_size=max_batch_size,
        has_prefix_cache=has_prefix_cache,
        max_itl_ratio=max_itl_ratio,
    )
    loop = Loop(config)
    prefixes = [[rng.randrange(40) for _ in range(60)] for _ in range(4)]
    for i in range(64):
        prompt = rng.choice(prefixes)[: rng.randrange(1, 60)] + [rng.randrange(40) for _ in range(rng.randrange(1, 60))]
        loop.add(make_request(f"r{i}", prompt, rng.randrange(1, 40), seed=i, ignore_eos=i % 3 > 0))
    for step in range(1, 10_000):
        while loop.schedule() is not None:
            pass
        if loop.results:
            loop.commit()
        if step % 20 == 0:
            request_id = f"r{rng.randrange(64)}"
            update = loop.scheduler.finish(request_id, FinishReason.ABORT)
            if update is not None:
                loop.hear(update)
        if step in (15, 40, 60):
            loop.crash()
        if not loop.scheduler.has_requests:
            break
    loop.drain()
    loop.check_answers()
    stats = loop.scheduler.stats()
    assert len(loop.last) == 64
    assert stats.num_used_pages == 0
    assert (stats.prefix_hit_len > 0) == has_prefix_cache
    if max_batch_size == 32:
        assert stats.num_preemptions > 0

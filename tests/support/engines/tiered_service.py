"""Scheduler and executor in one process over host slots and files, which outlive them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ktransformers.cache.page_files import PageFiles
from ktransformers.cache.paged import PagedCache
from ktransformers.cache.tiers import PAGE, STATE
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import Engine
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.engine.step.kv_offload import TieredCache
from ktransformers.media.records import MediaItem
from ktransformers.scheduler.config import TierConfig
from ktransformers.scheduler.records import StepPlan, StepResult
from ktransformers.scheduler.tier_rates import Option, TierRates
from ktransformers.scheduler.tier_records import TierStats
from tests.support.engines.paged_loop import PagedLoop, scheduler_config

PAGE_SIZE = 16
FINGERPRINT = b"m" * 32


def tier_config(cache: PagedCache, **changes: object) -> TierConfig:
    layouts = TieredCache.layouts(cache)
    files = TieredCache.files(cache, FINGERPRINT, Path(), 1)
    has_states = STATE in layouts
    values = {
        "fingerprint": FINGERPRINT,
        "host_pages": 64,
        "page_bytes": layouts[PAGE].nbytes,
        "page_file_bytes": files.file_nbytes(PAGE),
        "host_states": 32 if has_states else 0,
        "state_bytes": layouts[STATE].nbytes if has_states else 0,
        "state_file_bytes": files.file_nbytes(STATE) if has_states else 0,
        "disk_bytes": 1 << 30,
    }
    return TierConfig(**(values | changes))  # type: ignore[arg-type]


class Patient(TierRates):
    """Prefers any copy to computing: what is faster for a tiny model is chance."""

    def best(self, options: Sequence[Option]) -> int:
        return len(options) - 1


class Service:
    """A scheduler and executors over the weights of `engine`, and over the files of `folder`.

    system: writes the files. rates: decide between fetching and computing. changes: of the TierConfig.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path | None = None,
        num_pages: int = 64,
        *,
        page_size: int = PAGE_SIZE,
        system: object = os,
        rates: TierRates | None = None,
        **changes: object,
    ):
        self.num_rows = 0
        has_states = engine.cache.num_states > 0
        num_states = 8 if has_states else 0
        probe = PagedCache(engine.cache.shapes, 1, page_size, 1)
        tiers = tier_config(probe, **({"disk_bytes": 0} if folder is None else {}), **changes)
        config = scheduler_config(
            engine,
            num_pages=num_pages,
            page_size=page_size,
            chunk_size=64,
            num_states=num_states,
            snapshot_interval=64 if has_states else 0,
            tiers=tiers if tiers.host_pages else None,
        )

        def executor() -> PagedExecutor:
            cache = PagedCache(engine.cache.shapes, num_pages, page_size, max(num_states, 1))
            made = PagedExecutor(engine.executor.runner, cache, engine.pool, engine.model.vocab_size)
            made.pictures = engine.executor.pictures
            if config.tiers is not None:
                files = None
                if folder is not None:
                    formats = TieredCache.files(cache, FINGERPRINT, folder, 0)._formats
                    files = PageFiles(folder, formats, system, config.tiers.disk_bytes)  # type: ignore[arg-type]
                made.tiers = TieredCache(cache, config.tiers, files=files)
            run = made.execute

            def counted(plan: StepPlan) -> StepResult:
                self.num_rows += plan.num_tokens
                return run(plan)

            made.execute = counted  # type: ignore[method-assign]
            return made

        self.loop = PagedLoop(config, executor)
        tiers_of = self.loop.scheduler._pages.kv_offload
        if tiers_of is not None:
            tiers_of.rates = rates or Patient()

    def answer(self, prompt: list[int], count: int = 20, media: Sequence[MediaItem] = ()) -> tuple[list[int], int]:
        """The tokens, and how many rows they took."""
        before = self.num_rows
        params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.9, seed=7)
        name = self.loop.add(prompt, params, media=media)
        self.loop.drain()
        return self.loop.answers[name].token_ids, self.num_rows - before

    def stats(self) -> TierStats:
        stats = self.loop.scheduler.stats().tiers
        assert stats is not None
        return stats

    def close(self) -> None:
        if self.loop.executor.tiers is not None:
            self.loop.executor.tiers.close()

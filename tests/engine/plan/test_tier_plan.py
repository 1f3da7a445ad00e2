"""What flags make of tiers, and the offline API with them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import msgspec
import pytest

from ktransformers.cache.paged import LayerShape
from ktransformers.cache.state import StateShape
from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.plan.tier_plan import check_tiers, tier_bytes
from ktransformers.errors import ConfigError, EngineError
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.scheduler import Scheduler
from ktransformers.scheduler.tier_records import TierStats
from ktransformers.server.backend.balance_stats import BalanceStats
from tests.support.models.demo import DEMO_GGUF

PAGE_SIZE = 16
SHAPES = [LayerShape(2, 4, 3), LayerShape.without_pages(StateShape({"conv": (3, 5)}))]


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    config = EngineConfig(cpu_memory_size_GB=1e-7)
    with pytest.raises(ConfigError, match=r"--cpu_memory_size_GB: .*; give it at least"):
        check_tiers(SHAPES, PAGE_SIZE, config)
    config = EngineConfig(cpu_memory_size_GB=1.0, kv_disk_path=Path("pages"), kv_disk_size_GB=1e-7)
    with pytest.raises(ConfigError, match=r"--kv_disk_size_GB: .*; give it at least"):
        check_tiers(SHAPES, PAGE_SIZE, config)
    check_tiers(SHAPES, PAGE_SIZE, EngineConfig(cpu_memory_size_GB=1.0))
    check_tiers(SHAPES, PAGE_SIZE, EngineConfig())


def test_tiers_without_a_prefix_cache_are_said_to_be_in_vain(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(cpu_memory_size_GB=1.0, prefix_cache=False)
    with caplog.at_level(logging.WARNING):
        check_tiers(SHAPES, PAGE_SIZE, config)
    assert "have no effect: --no_prefix_cache" in caplog.text
    assert tier_bytes(config) == 0


@pytest.mark.exhaustive
def test_llm_answers_from_the_files_of_another(tmp_path: Path) -> None:
    folder, prompt = tmp_path / "pages", list(range(5, 205))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    answers = []
    for _ in range(2):
        with LLM(DEMO_GGUF, page_size=16, cache_lens=1024, kv_disk_path=folder, cpu_memory_size_GB=0.05) as llm:
            (output,) = llm.generate([prompt], params)
            answers.append(output.token_ids)
            stats = llm._batches.stats().tiers  # type: ignore[union-attr]
            assert stats is not None
    assert answers[0] == answers[1]
    assert stats.disk_hit_len == 192
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_step_that_fails_leaves_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, params = list(range(5, 205)), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(DEMO_GGUF, page_size=16, cache_lens=1024, kv_disk_path=tmp_path / "pages") as llm:
        (first,) = llm.generate([prompt], params)
        llm._batches.stats()  # type: ignore[union-attr]
        executor = llm.engine.executor  # type: ignore[union-attr]
        with monkeypatch.context() as broken:
            broken.setattr(executor, "_forward", lambda rows, kept: 1 / 0)
            with pytest.raises(EngineError, match="division by zero"):
                llm.generate([prompt], params)
        (second,) = llm.generate([prompt], params)
        stats = llm._batches.stats().tiers  # type: ignore[union-attr]
    assert second.token_ids == first.token_ids
    assert stats is not None
    assert stats.disk_hit_len == 192


def test_steps_without_rows_are_in_no_profile(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    folder = tmp_path / "profile"
    options = {"page_size": 16, "cache_lens": 1024, "kv_disk_path": tmp_path / "pages", "profile": folder}
    with LLM(DEMO_GGUF, **options) as llm:  # type: ignore[arg-type]
        llm.generate([list(range(5, 105))], params)
        llm._batches.stats()  # type: ignore[union-attr]
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "rows" in line]
    assert [line["rows"] for line in steps] == [100, 1, 1]


def test_figures_are_shown_by_name() -> None:
    scheduler = Scheduler(SchedulerConfig(num_pages=4, page_size=4, chunk_size=8, max_batch_size=2, vocab_size=9))
    assert BalanceStats(num_running=0, num_waiting=0, scheduler=scheduler.stats()).tiers is None
    tiers = TierStats(host_bytes=1, max_host_bytes=2, disk_bytes=3, max_disk_bytes=4, disk_hit_len=5)
    stats = msgspec.structs.replace(scheduler.stats(), tiers=tiers)
    shown = BalanceStats(num_running=0, num_waiting=0, scheduler=stats).tiers
    assert shown is not None
    assert (shown["disk_bytes"], shown["disk_hit_len"], shown["num_read_errors"]) == (3, 5, 0)

"""Efficiency cores take part in steps of few rows only where they add to what is read, and each step says its rows."""

from __future__ import annotations

import logging

import pytest

from ktransformers import LLM
from ktransformers.config import bundled_model
from ktransformers.engine.model.threads import measure_slow_threads
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.topology import ThreadPlace


@pytest.mark.parametrize(("together", "rests"), [(80e9, True), (83e9, True), (84e9, False), (60e9, True)])
def test_reading_decides(together: float, rests: bool, caplog: pytest.LogCaptureFixture) -> None:
    rates = iter([80e9, together])
    caplog.set_level(logging.INFO)
    pool = WorkerPool(2, places=[ThreadPlace(0), ThreadPlace(0, is_slow=True)])
    measure_slow_threads(pool, lambda pool, nbytes, repeats: next(rates))
    assert pool.slow_rest == rests
    what = "rest in" if rests else "take part in"
    assert caplog.messages == [
        f"1 threads on performance cores read 80.0 GB/s, {together / 1e9:.1f} with 1 on efficiency cores, "
        f"which {what} steps of few rows"
    ]
    pool.close()


def test_one_kind_of_core_is_not_measured() -> None:
    pool = WorkerPool(2)
    measure_slow_threads(pool, lambda pool, nbytes, repeats: pytest.fail("nothing is to be read"))
    assert not pool.slow_rest
    pool.close()


def test_each_step_says_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    monkeypatch.setattr(WorkerPool, "begin_step", lambda self, num_rows: rows.append(num_rows))
    with LLM(str(bundled_model("there is one")), cache_lens=64, cpu_infer=1, speculative="off") as llm:
        rows.clear()
        llm.generate([1, 2, 3, 4, 5, 6, 7], max_tokens=3, ignore_eos=True)
    assert rows == [7, 1, 1]

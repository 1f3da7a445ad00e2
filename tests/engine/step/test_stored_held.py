"""Steps that a GPU holds until their tokens are known, whose experts are in files: a read that fails ends the answers
of its own step, and what is computed beside it is right. The GPU is made up (fake_gpus.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.kernels.types import QuantType
from ktransformers.scheduler.records import StepPlan, StepResult
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, rules_of, sequence_start, step_row
from tests.support.gguf.writer import write_gguf
from tests.support.models.tiny_models import tiny_model

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

A, B = 0, 1


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    write_gguf(tiny_model("qwen3_moe", seed=3), tmp_path / "model.gguf", QuantType.Q8_0, QuantType.Q8_0)
    config = EngineConfig(
        gguf_path=tmp_path / "model.gguf",
        optimize_config_path=rules_of("qwen3_moe", tmp_path, EXPERTS_ON_CPU, EXPERTS_ON_CPU),
        cache_lens=64,
        cpu_infer=1,
        self_check=False,
        hot_experts="off",
        experts_from="disk",
        experts_ram=1e-6,
    )
    hardware = fake_hardware(1, graphs=FakeGraphs())
    with closing(build_engine(config, page_size=4, max_batch_size=2, hardware=hardware)) as made:
        begin = [sequence_start(A, [5, 9]), sequence_start(B, [7, 3])]
        rows = [step_row(A, [5, 9], 0, [0]), step_row(B, [7, 3], 0, [1])]
        made.executor.execute(StepPlan(step_id=1, ended=[], starts=begin, rows=rows))
        yield made


def steps(engine: Engine, before: Callable[[int], None]) -> tuple[StepResult, StepResult]:
    """A step of A, and one of B that is launched while that runs, and held. before: called before each is computed."""
    executor = engine.executor
    first = StepPlan(step_id=2, ended=[], starts=[], rows=[step_row(A, [8], 2, [0])])
    second = StepPlan(step_id=3, ended=[], starts=[], rows=[step_row(B, [4], 2, [1])])

    def meanwhile() -> None:
        executor.prepare(second)
        assert executor._held is not None
        before(B)

    before(A)
    results = executor.execute(first, meanwhile), executor.execute(second)
    engine.expert_files.store.handle._fail_next(0)  # type: ignore[union-attr]
    return results


def fails(engine: Engine, which: int | None) -> Callable[[int], None]:
    """Lets all reads of one step fail, of which no expert is in memory."""
    assert engine.expert_files is not None
    store = engine.expert_files.store

    def before(run_id: int) -> None:
        for layer in range(2):
            for expert in range(8):
                if store.hold(layer, expert) is not None:
                    store.release(layer, expert, is_kept=False)
        store.handle._fail_next(100 if run_id == which else 0)

    return before


def token_of(result: StepResult) -> int | None:
    (row,) = result.results
    return row.token_id


def test_each_step_has_its_own_error(engine: Engine) -> None:
    plain = steps(engine, fails(engine, None))
    assert [result.failed for result in plain] == [[], []]
    held = steps(engine, fails(engine, B))
    assert not held[0].failed
    assert token_of(held[0]) == token_of(plain[0])
    assert [run_id for run_id, _ in held[1].failed] == [B]
    running = steps(engine, fails(engine, A))
    assert [run_id for run_id, _ in running[0].failed] == [A]
    assert "model.gguf cannot be read" in running[0].failed[0][1]
    assert not running[1].failed
    assert token_of(running[1]) == token_of(plain[1])
    again = steps(engine, fails(engine, None))
    assert [token_of(result) for result in again] == [token_of(result) for result in plain]

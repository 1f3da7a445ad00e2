"""Experts in three tiers: slots of a GPU, slots in RAM, files. The GPU is made up (fake_gpus.py).

Whatever lies where, results are those of the same model with all experts in RAM and the same slots on the GPU.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import build_engine, plan_model
from ktransformers.errors import KernelError, WeightError
from ktransformers.kernels.cpu.expert_store import ReadError
from ktransformers.kernels.types import QuantType
from ktransformers.scheduler.records import StepPlan
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, Gpu, rules_of, sequence_start, step_row
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.tiny_models import tiny_model

pytest.importorskip("triton")

from ktransformers.engine.model.hot_file import HotFile
from ktransformers.engine.step.hot import HotGpu
from ktransformers.operators.experts.gpu_slots import HotPool
from tests.support.engines.inline_device import EagerCopies

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

SLOTS = 3  # of each of two layers of 8 experts
IDS = [5, 9, 5, 9, 3, 5, 9, 8, 1, 5]


class TieredMachine(Gpu):
    """Its copies are made at once."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = EagerCopies()  # type: ignore[assignment]
        self.graphs = FakeGraphs()


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_gguf(tiny_model("qwen3_moe", seed=3), path, QuantType.Q8_0, QuantType.Q8_0)
    return path


@pytest.fixture
def config(model_path: Path, tmp_path: Path) -> EngineConfig:
    rules = rules_of("qwen3_moe", tmp_path, EXPERTS_ON_CPU, EXPERTS_ON_CPU)
    return EngineConfig(
        gguf_path=model_path,
        optimize_config_path=rules,
        cache_lens=64,
        cpu_infer=1,
        self_check=False,
        hot_experts=str(SLOTS),
        experts_from="disk",
    )


def pool_of(engine: StaticEngine, name: str = "cuda:0") -> HotPool:
    (follower,) = engine.plan.devices[name].followers
    assert isinstance(follower, HotGpu)
    (pool,) = follower.pools
    return pool.slots


def step(engine: StaticEngine, token: int, position: int) -> torch.Tensor:
    return engine.runner.forward([token], position, [0]).clone()


def read_something(engine: StaticEngine) -> None:
    for token in range(20):
        step(engine, token, 0)


def check_slots(pool: HotPool) -> None:
    """Each slot that the map names has its expert's bytes, as the file has them."""
    pool.policy.check_integrity()
    assert (pool.slot_of.numpy() == pool.policy.slot_of).all()
    for layer, expert in np.argwhere(pool.policy.slot_of >= 0).tolist():
        slot, host = pool.policy.slot_of[layer, expert], pool.hosts[layer]
        (addresses,) = host.read([expert])
        for part, matrix, address in zip(host.projections, pool.matrices, addresses, strict=True):
            assert matrix.data[slot].numpy().tobytes() == ctypes.string_at(address, part.nbytes)
        host.release(expert, is_kept=False)


def test_steps_are_those_of_experts_in_ram(config: EngineConfig) -> None:
    """As the uploads follow the picks, and all experts of a step are in RAM when it is over, they are the same ones,
    and so are all bits."""
    gpu, plain_gpu = TieredMachine(), TieredMachine()
    plain = static_engine(replace(config, experts_from="ram"), hardware=plain_gpu.hardware(graphs=plain_gpu.graphs))
    wants = [step(plain, token, position) for position, token in enumerate(IDS)]
    wanted = pool_of(plain).policy
    engine = static_engine(config, hardware=gpu.hardware(graphs=gpu.graphs))
    pool = pool_of(engine)
    first = pool.policy.slot_of.copy()
    check_slots(pool)
    for position, (token, want) in enumerate(zip(IDS, wants, strict=True)):
        assert torch.equal(step(engine, token, position), want), position
    assert gpu.graphs.replays == plain_gpu.graphs.replays == len(IDS)
    assert pool.policy.totals == wanted.totals
    assert pool.policy.totals.uploads > 0
    assert (pool.policy.slot_of == wanted.slot_of).all()
    assert (pool.policy.slot_of != first).any()
    check_slots(pool)
    plain.close()
    assert gpu.driver.pinned_ranges
    engine.close()
    assert gpu.driver.pinned_ranges == {}
    assert not pool._sources


def test_a_read_that_fails(config: EngineConfig) -> None:
    """The step fails; slots and map are what they were to be, and experts change places in the next steps."""
    engine = static_engine(replace(config, experts_ram=1e-6), hardware=TieredMachine().hardware())
    pool = pool_of(engine)
    engine.expert_files.store.fill(wait=True)
    assert engine.expert_files.store.stats().num_slots == 6  # of a token's 4 experts, and 2 that are read meanwhile
    engine.expert_files.store.handle._fail_next(1)
    with pytest.raises(ReadError, match=r"model\.gguf"):
        read_something(engine)
    for position, token in enumerate(IDS):
        step(engine, token, position)
    assert pool.policy.totals.uploads > 0
    check_slots(pool)
    engine.close()


def test_answers_in_a_step_that_fails_end(config: EngineConfig) -> None:
    """With an error that names the file; the service goes on, and experts change places as before."""
    config = replace(config, experts_ram=1e-6, use_cuda_graph=False)
    paged = build_engine(config, page_size=4, max_batch_size=2, hardware=TieredMachine().hardware())
    assert paged.expert_files is not None
    store = paged.expert_files.store
    store.fill(wait=True)
    (gpu,) = paged.hot.gpus
    (pool,) = gpu.pools
    failed, run_id = list[tuple[int, str]](), 0
    while not failed:
        store.handle._fail_next(1)
        starts = [sequence_start(run_id, [3 + run_id, 5])]
        rows = [step_row(run_id, starts[0].token_ids, 0, [0])]
        ended = [run_id - 1] if run_id else []
        result = paged.executor.execute(StepPlan(step_id=run_id, ended=ended, starts=starts, rows=rows))
        failed, run_id = result.failed, run_id + 1
    assert [who for who, _ in failed] == [run_id - 1]
    assert "model.gguf cannot be read" in failed[0][1]
    check_slots(pool.slots)
    uploads = pool.slots.policy.totals.uploads
    starts = [sequence_start(run_id, [5, 9])]
    rows, ended = [step_row(run_id, [5, 9], 0, [0])], [run_id - 1]
    store.handle._fail_next(0)
    for position in range(2, 12):
        result = paged.executor.execute(StepPlan(step_id=run_id + position, ended=ended, starts=starts, rows=rows))
        assert not result.failed
        starts, ended, rows = [], [], [step_row(run_id, [5 + 4 * (position % 2)], position, [0, 1, 2])]
    assert pool.slots.policy.totals.uploads > uploads
    check_slots(pool.slots)
    paged.close()
    assert not pool.slots._sources


def test_a_read_that_fails_while_slots_are_filled(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, begin = TieredMachine(), HotPool.begin

    def failing(pool: HotPool, scores: object = None) -> None:
        (store,) = {host._store for host in pool.hosts}  # type: ignore[attr-defined]
        store.handle._fail_next(1)
        begin(pool)

    monkeypatch.setattr(HotPool, "begin", failing)
    with pytest.raises(WeightError, match=r"model\.gguf cannot be read"):
        static_engine(config, hardware=gpu.hardware())
    assert gpu.driver.pinned_ranges == {}


def test_memory_that_cannot_be_pinned(
    config: EngineConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = TieredMachine()

    def refuse(address: int, nbytes: int) -> None:
        raise KernelError("no")

    monkeypatch.setattr(gpu.driver, "pin", refuse)
    engine = static_engine(config, hardware=gpu.hardware())
    assert "no experts get slots on cuda:0: their memory cannot be pinned (no)" in caplog.text
    step(engine, 5, 0)
    engine.close()


def test_two_gpus_copy_from_one_store(config: EngineConfig) -> None:
    gpu = TieredMachine()
    config = replace(config, spread_layers=True, use_cuda_graph=False)
    engine = static_engine(config, hardware=gpu.hardware(num_gpus=2))
    assert len(gpu.driver.pinned_ranges) == 1
    for position, token in enumerate(IDS):
        step(engine, token, position)
    pools = [pool_of(engine, name) for name in ("cuda:0", "cuda:1")]
    assert sum(pool.policy.totals.uploads for pool in pools) > 0
    for pool in pools:
        check_slots(pool)
    engine.close()
    assert gpu.driver.pinned_ranges == {}


def test_what_is_learned_counts_all_picks(config: EngineConfig) -> None:
    """Those on the GPU, too; the store, which does not see them, keeps nothing of these layers."""
    engine = static_engine(config, hardware=TieredMachine().hardware())
    for position, token in enumerate(IDS):
        step(engine, token, position)
    scores = pool_of(engine).policy.scores()
    file = HotFile(engine.identified.sampled.digests)
    engine.close()
    learned = file.read()
    assert sorted(learned) == [0, 1]
    assert np.abs(np.stack([learned[0], learned[1]]) - scores).max() <= 5e-4


def test_what_is_said(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plan = plan_model(config, hardware=fake_hardware())
    notes = {entry.note for entry in plan.entries if entry.stored_experts}
    assert notes == {f"{SLOTS} of 8 hot on cuda:0; on the disk, those used most in RAM"}
    assert "the CPU computes those without a slot on a GPU, in long prompts all" in caplog.text

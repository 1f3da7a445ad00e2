"""Long prompts on memory that slots of experts lend: the same bits as in steps of chunk_size, and the slots come back.

The GPU is made up (fake_gpus.py); the rates are those of a CPU so slow that the GPU gets all experts.
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
from ktransformers.engine.load.builder import Engine, build_engine, plan_model
from ktransformers.kernels.cpu import MoeKernel
from ktransformers.operators.experts.split import CpuRate, PrefillRates
from ktransformers.operators.experts.streamed import ExpertPrefill
from ktransformers.optimize.streaming import LONG_PROMPTS
from ktransformers.scheduler.records import ScheduledSequence, StepPlan
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, Gpu, rules_of, sequence_start, step_row
from tests.support.engines.inline_device import EagerCopies
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")

from ktransformers.engine.step import expert_streaming as module
from ktransformers.operators.experts.gpu_slots import HotPool

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

CHUNK, SLOTS = 16, 6
SLOW = CpuRate((1,), (1.0,))
RATES = PrefillRates(1e-3, 0.0, SLOW, SLOW)


@pytest.fixture(autouse=True)
def _given_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def calibrate(prefill: ExpertPrefill, kernel: MoeKernel, expert_nbytes: int, file: object) -> None:
        prefill.rates, prefill.threshold = RATES, max(CHUNK, prefill.least_rows)

    monkeypatch.setattr(module, "calibrate", calibrate)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_safetensors(tiny_model("qwen3_moe", seed=3), path)
    return path


@pytest.fixture
def config(model_path: Path, tmp_path: Path) -> EngineConfig:
    rules = rules_of("qwen3_moe", tmp_path, EXPERTS_ON_CPU, EXPERTS_ON_CPU)
    options = {"cache_lens": 96, "cpu_infer": 1, "cpu_quant": "q8_0", "hot_experts": str(SLOTS), "chunk_size": CHUNK}
    return EngineConfig(model_path=model_path, optimize_config_path=rules, **{"lend_slots": True, **options})  # type: ignore[arg-type]


def prompt(count: int) -> list[int]:
    return torch.randint(3, 100, (count,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.parametrize("lend", [None, True])
@pytest.mark.parametrize("place", ["cpu", "off", "slots"])
def test_slots_that_are_asked_to_lend_and_are_not_there(
    lend: bool | None, place: str, config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, lend_slots=lend, hot_experts="off" if place == "off" else config.hot_experts)
    hardware = fake_hardware().without_gpus() if place == "cpu" else fake_hardware()
    plan_model(config, hardware=hardware)
    said = caplog.text.count("--lend_slots has no effect: no GPU has slots for experts")
    assert said == (lend is True and place != "slots")


class LendingGpu(Gpu):
    """Its copies are made at once."""

    def __init__(self) -> None:
        super().__init__()
        self.copies, self.graphs = EagerCopies(), FakeGraphs()  # type: ignore[assignment]


def pool_of(engine: Engine | StaticEngine) -> HotPool:
    (lending,) = engine.hot.lending
    pool: HotPool = lending.pool
    return pool


def check_slots(pool: HotPool) -> None:
    """Each slot that the map names has its expert's bytes."""
    pool.policy.check_integrity()
    assert (pool.slot_of.numpy() == pool.policy.slot_of).all()
    for layer, expert in np.argwhere(pool.policy.slot_of >= 0).tolist():
        for part, matrix in zip(pool.hosts[layer].projections, pool.matrices, strict=True):
            got = matrix.data[pool.policy.slot_of[layer, expert]].numpy().tobytes()
            assert got == ctypes.string_at(part.addresses[expert], part.nbytes)


def num_filled(pool: HotPool) -> int:
    """Slots that have an expert, or wait for one."""
    return int((pool.policy.slot_of >= 0).sum()) + sum(len(one.uploads) for one in pool._on_the_way)


def test_a_long_step_has_the_bits_of_short_ones(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    """And copies fewer experts; decoding goes on with the slots that are left."""
    caplog.set_level(logging.INFO)
    gpu, ids = LendingGpu(), prompt(2 * CHUNK)
    engine = static_engine(config, hardware=gpu.hardware(graphs=gpu.graphs))
    steps, pool = engine.hot.long_steps, pool_of(engine)
    assert (steps.rows, steps.num_slots) == (4 * CHUNK, 2)  # a block of results does not fit into one projection
    assert engine.scheduler_config.long_chunk_size == steps.rows
    assert CHUNK < engine.scheduler_config.long_prompt == steps.least_tokens <= steps.rows
    assert f"from {steps.least_tokens} tokens of prompts on, {steps.num_slots} of {2 * SLOTS} slots" in caplog.text
    before = gpu.copies.num_bytes
    parts = [engine.runner.forward(ids[at : at + CHUNK], at, range(CHUNK)).clone() for at in (0, CHUNK)]
    short = gpu.copies.num_bytes - before
    engine.hot.lend(True)
    check_slots(pool)
    assert num_filled(pool) == 2 * SLOTS - steps.num_slots
    before = gpu.copies.num_bytes
    whole = engine.runner.forward(ids, 0, range(len(ids))).clone()
    assert torch.equal(whole, torch.cat(parts))
    assert gpu.copies.num_bytes - before < short
    for position in range(len(ids), len(ids) + 4):  # steps that are no long ones, but that the scheduler counts so
        engine.hot.lend(True)
        engine.runner.forward([5], position, [0])
    check_slots(pool)
    assert num_filled(pool) == 2 * SLOTS - steps.num_slots
    for position in range(len(ids) + 4, len(ids) + 8):
        engine.hot.lend(False)
        engine.runner.forward([5], position, [0])
    check_slots(pool)
    assert num_filled(pool) == 2 * SLOTS
    said = [record.getMessage() for record in caplog.records if "lent" in record.getMessage()]
    assert said[-1] == f"the {steps.num_slots} lent slots are filled again"
    again = engine.runner.forward(ids[:CHUNK], 0, range(CHUNK))
    assert torch.equal(again, parts[0])
    engine.close()


def test_beside_a_decode_and_interrupted(config: EngineConfig) -> None:
    """A long step with the row of another sequence, behind which the prompt is given up: the slots come back."""
    gpu, ids = LendingGpu(), prompt(2 * CHUNK - 1)
    engine = build_engine(replace(config, use_cuda_graph=False), page_size=4, max_batch_size=2, hardware=gpu.hardware())
    pool, execute = pool_of(engine), engine.executor.execute
    starts = [sequence_start(0, [3, 5]), sequence_start(1, ids)]
    execute(StepPlan(step_id=1, starts=starts[:1], rows=[step_row(0, [3, 5], 0, [0])], ended=[]))
    rows = [step_row(0, [7], 2, [0]), step_row(1, ids, 0, list(range(1, 9)))]
    beside = execute(StepPlan(step_id=2, starts=starts[1:], rows=rows, ended=[], is_long=True))
    assert pool.policy.num_lent == engine.hot.long_steps.num_slots > 0
    check_slots(pool)
    alone = []
    for number, row in enumerate(rows):  # the same again, each alone, on slots that are lent and not
        starts = [sequence_start(10 + number, ids)] if number else []
        row = replace_run(row, 10) if number else row
        plan = StepPlan(step_id=3 + number, starts=starts, rows=[row], ended=[1], is_long=bool(number))
        alone.append(execute(plan).results[0].token_id)
    assert [result.token_id for result in beside.results] == alone
    for step in range(5, 8):
        execute(StepPlan(step_id=step, starts=[], rows=[step_row(0, [7], 2, [0])], ended=[11] if step == 5 else []))
    assert num_filled(pool) == 2 * SLOTS
    check_slots(pool)
    engine.close()


def replace_run(row: ScheduledSequence, first: int) -> ScheduledSequence:
    return step_row(first + row.run_id, list(row.token_ids), row.start, list(row.block_table))


def test_the_plan_has_room_for_long_steps(config: EngineConfig) -> None:
    plan = plan_model(config, hardware=fake_hardware())
    assert plan.extra_bytes[LONG_PROMPTS] == {"cuda:0": 0}  # the least that there is for activations has it
    assert LONG_PROMPTS not in plan_model(replace(config, hot_experts="off"), hardware=fake_hardware()).extra_bytes
    moved = plan_model(replace(config, optimize_config_path=None), hardware=fake_hardware())
    assert LONG_PROMPTS not in moved.extra_bytes  # all experts are there
    two = plan_model(replace(config, spread_layers=True), hardware=fake_hardware(num_gpus=2))
    assert LONG_PROMPTS not in two.extra_bytes


@pytest.mark.parametrize("model_type", ["qwen3_next", "deepseek_v3", "gpt_oss"])
def test_blocks_of_a_step_are_steps(model_type: str, tmp_path: Path) -> None:
    """States of recurrent layers, latent attention, windows: in blocks as in steps of their rows, bit for bit."""
    if model_type == "qwen3_next":
        recurrent_model(model_type).save_pretrained(tmp_path)
    else:
        write_safetensors(tiny_model(model_type, seed=1), tmp_path)
    config = EngineConfig(
        model_path=tmp_path, lend_slots=True, cache_lens=64, cpu_infer=1, self_check=False, use_cuda_graph=False
    )
    engine, ids = static_engine(config, hardware=fake_hardware()), prompt(20)
    want = [engine.runner.forward(ids[at : at + 8], at, range(len(ids[at : at + 8]))).clone() for at in (0, 8, 16)]
    engine.runner.steps._pass.block_rows = 8
    assert torch.equal(engine.runner.forward(ids, 0, range(20)), torch.cat(want))
    engine.close()

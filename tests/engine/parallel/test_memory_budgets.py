"""What stages of one machine have of it. By hand."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import pytest

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.load.worker import _build
from ktransformers.engine.model.opened import open_model
from ktransformers.engine.parallel.pipeline.memory_budgets import stage_memory_budgets
from ktransformers.engine.parallel.pipeline.stages import stage_weights
from ktransformers.engine.parallel.ranks.driver import Driver
from ktransformers.engine.parallel.ranks.messages import Begin, Start, decode
from ktransformers.engine.parallel.ranks.ranks import Worker
from ktransformers.engine.parallel.ranks.worker_handles import LocalWorker
from ktransformers.errors import CapacityError
from ktransformers.optimize.machine import Machine
from ktransformers.system.child import read_frame
from tests.support.engines.cut_models import HARDWARE
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.models.tiny_models import tiny_model, write_safetensors

GIB = 2**30
CONTEXT = 640 * 2**20


def machine(ram: int, *gpus: int) -> Machine:
    return Machine(99 * GIB, ram, {"cpu": ram, **{f"cuda:{i}": free for i, free in enumerate(gpus)}})


def test_each_stage_has_a_gpu_of_its_own() -> None:
    """And what its weights are of the RAM, of which an eighth is divided evenly."""
    memory_budgets = stage_memory_budgets(machine(64 * GIB, 10 * GIB, 20 * GIB), [3, 1])
    assert [budget.gpus for budget in memory_budgets] == [(0,), (1,)]
    assert memory_budgets[0].free == {"cpu": 4 * GIB + 42 * GIB, "cuda:0": 10 * GIB}
    assert memory_budgets[1].free == {"cpu": 4 * GIB + 14 * GIB, "cuda:1": 20 * GIB}
    assert memory_budgets[1].free_by_own_names == {"cpu": 18 * GIB, "cuda:0": 20 * GIB}


@pytest.mark.parametrize(
    ("num_gpus", "size", "gpus"),
    [
        (1, 1, [(0,)]),
        (1, 3, [(0,), (0,), (0,)]),
        (2, 3, [(0,), (0,), (1,)]),
        (4, 2, [(0, 1), (2, 3)]),
        (5, 2, [(0, 1), (2, 3, 4)]),
        (0, 2, [(), ()]),
    ],
)
def test_gpus_of_stages(num_gpus: int, size: int, gpus: list[tuple[int, ...]]) -> None:
    assert [budget.gpus for budget in stage_memory_budgets(machine(GIB, *[GIB] * num_gpus), [1] * size)] == gpus


def test_stages_on_one_gpu_divide_what_is_left_of_it() -> None:
    """By each process more a driver's context is taken."""
    free = 16 * GIB + CONTEXT
    first, second = stage_memory_budgets(machine(16 * GIB, free), [1, 1])
    assert first == second
    assert first.free == {"cpu": 8 * GIB, "cuda:0": 8 * GIB}
    memory_budgets = stage_memory_budgets(machine(0, 24 * GIB + 2 * CONTEXT), [1, 0, 1])
    assert [budget.free["cuda:0"] for budget in memory_budgets] == [23 * GIB // 2, GIB, 23 * GIB // 2]
    assert stage_memory_budgets(machine(GIB, CONTEXT // 2), [1, 1])[0].free["cuda:0"] == 0


def test_weights_of_stages_are_those_of_the_model(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", seed=1, num_hidden_layers=3)
    write_safetensors(model, tmp_path)
    opened = open_model(EngineConfig(model_path=tmp_path, pipeline_layers="1,2"))
    one, two = (sum(p.numel() for p in part.parameters()) for part in (model.model.layers[:1], model.model.layers[1:]))
    embedding, head = model.model.embed_tokens.weight.numel(), model.lm_head.weight.numel()
    assert stage_weights(opened, 2) == [embedding + one, two + head]


@pytest.mark.exhaustive
def test_stages_plan_with_their_rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver, and what the other one is told, which sees 4 GiB."""
    write_safetensors(tiny_model("llama", seed=1), tmp_path)
    told: list[bytes] = []
    tell = LocalWorker.send
    monkeypatch.setattr(LocalWorker, "send", lambda self, data: (told.append(data), tell(self, data))[1])
    config = EngineConfig(model_path=tmp_path, cache_lens=96, cpu_infer=1, pipeline=2, self_check=False)
    hardware = fake_hardware(gpu_bytes=2 * GIB + CONTEXT)
    ranks = Driver(config, None, HARDWARE)
    with closing(build_engine(config, page_size=8, max_batch_size=4, ranks=ranks, hardware=hardware)) as engine:
        assert engine.plan.capacity["cuda:0"] == GIB
    start = decode(read_frame(io.BytesIO(told[0])), Start)
    assert start.memory_budget == {"cpu": 2 * GIB, "cuda:0": GIB}


def test_a_stage_keeps_to_its_room(tmp_path: Path) -> None:
    write_safetensors(tiny_model("llama", seed=1), tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=96, cpu_infer=1, pipeline=2, self_check=False, use_cuda=True)
    budget = {"cpu": GIB, "cuda:0": 1 << 10}
    start = Start(1, "stage 1", config, 8, 4, 0, HARDWARE, "error", memory_budget=budget)
    with pytest.raises(CapacityError, match="cuda:0"):
        _build(start, Worker(start, lambda: Begin("", [], False), lambda message: None))

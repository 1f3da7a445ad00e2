"""CpuProfilingRuntime over whole models: what a step records, by layers and parts, and that it changes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.sequence import SequenceRunner
from ktransformers.config import EngineConfig
from ktransformers.engine.model.card import ModelCard
from ktransformers.engine.sequence.profiled import card_meta
from ktransformers.engine.step.step_runtime import module_scopes
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool, profile
from ktransformers.optimize.machine_speed import CpuSpeed, MachineSpeed, SpeedFile
from ktransformers.profiling import records
from ktransformers.profiling.runtime import CpuProfilingRuntime, ModuleScope
from tests.support.checks.native_records import Experts, Op, StepBegin, StepEnd, records_in
from tests.support.engines.runners import fused_runner, random_ids, runner_of
from tests.support.models.tiny_models import tiny_model

FAMILIES = {
    "llama": {"norm", "linear", "attention", "mlp", "lm_head"},
    "qwen3_moe": {"norm", "linear", "attention", "router", "experts", "lm_head"},
    "qwen2_moe": {"norm", "linear", "attention", "router", "experts", "shared_experts", "lm_head"},
    "deepseek_v3": {"norm", "linear", "attention", "router", "experts", "shared_experts", "mlp", "lm_head"},
}


def runtime_of(runner: SequenceRunner) -> CpuProfilingRuntime:
    return CpuProfilingRuntime(runner.pool, module_scopes(runner.model))


def num_layers(runner: SequenceRunner) -> int:
    return int(runner.model.config.num_hidden_layers)


def step(runner: SequenceRunner, runtime: CpuProfilingRuntime, ids: Sequence[int], start: int = 0) -> torch.Tensor:
    runtime.begin_step(5 + start, len(ids), [])
    logits = runner.forward(ids, start, range(len(ids)))
    runtime.end_step()
    return logits.clone()


@pytest.mark.parametrize("make", [runner_of, fused_runner])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_recorded_by_layer_and_part_and_stays_the_same(family: str, make: type) -> None:
    runner = make(tiny_model(family))
    runtime, ids = runtime_of(runner), random_ids(runner.vocab_size, 6)
    plain = step(runner, runtime, ids)
    assert runtime.drain() == b""
    runtime.start()
    before = time.monotonic_ns()
    recorded = step(runner, runtime, ids)
    after = time.monotonic_ns()
    runtime.stop()
    assert torch.equal(plain, recorded)
    assert torch.equal(plain, step(runner, runtime, ids))
    begun, *found, ended = records_in(runtime.drain())
    assert isinstance(begun, StepBegin)
    assert isinstance(ended, StepEnd)
    assert (begun.step, begun.rows, ended.step) == (5, 6, 5)
    assert before <= begun.time_ns <= ended.time_ns <= after
    ops = [record for record in found if isinstance(record, Op)]
    assert {op.part for op in ops} - {"embedding", "other"} == FAMILIES[family]
    for layer in range(num_layers(runner)):
        assert {"norm", "attention", "linear"} <= {op.part for op in ops if op.layer == layer}
    assert {op.part for op in ops if op.layer < 0} <= {"norm", "embedding", "lm_head"}  # the last norm
    last = begun.time_ns
    for op in ops:  # one after the other, on one thread
        assert last <= op.begin_ns
        last = op.begin_ns + op.duration_ns
        assert op.busy_ns <= op.duration_ns  # a pool of one thread
    assert last <= ended.time_ns
    assert runtime.dropped == 0


@pytest.mark.parametrize("make", [runner_of, fused_runner])
def test_calls_of_experts_are_told_for_each_layer(make: type) -> None:
    runner = make(tiny_model("qwen3_moe"))
    runtime = runtime_of(runner)
    runtime.start()
    step(runner, runtime, random_ids(runner.vocab_size, 6))
    calls = [record for record in records_in(runtime.drain()) if isinstance(record, Experts)]
    assert [call.layer for call in calls] == list(range(num_layers(runner)))
    top_k = runner.model.config.num_experts_per_tok
    for call in calls:
        assert sorted(call.ids) == list(range(6))
        chosen = [expert for ids in call.ids.values() for expert in ids]
        assert call.counts == [chosen.count(expert) for expert in range(len(call.counts))]
        assert sum(call.counts) == 6 * top_k
    runtime.stop()


def test_both_ways_of_running_a_layer_read_the_same_bytes() -> None:
    """Module by module and in native calls: by part, but for the norm of residual sums and what is placed."""
    sums = []
    for make in (runner_of, fused_runner):
        runner = make(tiny_model("qwen2_moe"))
        runtime = runtime_of(runner)
        runtime.start()
        step(runner, runtime, random_ids(runner.vocab_size, 4))
        of_part: dict[str, int] = {}
        for op in records_in(runtime.drain()):
            if isinstance(op, Op) and op.part in FAMILIES["qwen2_moe"] - {"norm", "attention"}:
                of_part[op.part] = of_part.get(op.part, 0) + op.bytes
        sums.append(of_part)
        runtime.stop()
    assert sums[0] == sums[1]
    assert all(sums[0].values())


class Failing(nn.Module):
    def forward(self, pool: WorkerPool) -> None:
        cpu.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-6, pool)
        raise RuntimeError("on purpose")


def test_scopes_end_with_their_module_even_when_it_fails() -> None:
    pool, module = WorkerPool(1), Failing()
    runtime = CpuProfilingRuntime(pool, [ModuleScope(module, 2, "mlp")])
    runtime.start()
    with pytest.raises(RuntimeError, match="on purpose"):
        module(pool)
    cpu.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-6, pool)
    runtime.stop()
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    found = [(op.layer, op.part) for op in records_in(runtime.drain()) if isinstance(op, Op)]
    assert found == [(2, "mlp"), (-1, "norm")]
    pool.close()


def test_a_second_profile_begins_empty() -> None:
    pool = WorkerPool(1)
    runtime = CpuProfilingRuntime(pool, ring_bytes=4096)
    runtime.start()
    for _ in range(100):
        cpu.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-6, pool)
    runtime.start()  # on already
    assert runtime.dropped == 100 - 64
    runtime.stop()
    runtime.stop()
    runtime.start()
    assert (runtime.drain(), runtime.dropped) == (b"", 0)
    pool.close()


def test_kernels_and_readers_have_the_same_parts() -> None:
    assert (*profile.PARTS, records.TOWER) == records.PARTS


def test_a_profile_knows_what_doctor_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = EngineConfig()
    before = card_meta(ModelCard(), config, "transformers").machine
    SpeedFile().write(MachineSpeed(0.0, 0.0, CpuSpeed(2, "avx2", {1: 20e9, 2: 42.54e9})))
    after = card_meta(ModelCard(), config, "transformers").machine
    assert (before["memory_gbps"], after["memory_gbps"]) == (None, 42.5)

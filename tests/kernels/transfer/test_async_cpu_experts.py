"""Experts in the order of a stream: equal to MoeKernel.forward, replayed, padded, failing, closed, forked, idle."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ktransformers.errors import EngineError
from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.cpu.expert_counts import ExpertCounts
from ktransformers.kernels.cpu.profile import PoolProfile
from ktransformers.kernels.transfer.async_cpu_experts import (
    AsyncCpuExperts,
    EnqueueMethod,
    StreamShape,
    begin_hold,
    choose_enqueue_method,
    end_hold,
)
from ktransformers.kernels.types import Activation, ActivationSpec, ExpertWeights, QuantType
from tests.support.checks.native_records import Experts, Op, records_in
from tests.support.engines.fake_stream import PATIENCE, FakeDriver

EXPERTS, HIDDEN, WIDTH, TOP_K = 4, 64, 32, 2
ROOT = Path(__file__).parents[3]
SHAPES = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
METHODS = pytest.mark.parametrize("method", EnqueueMethod)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@pytest.fixture(scope="module")
def kernels(make_weight, pool):
    def layer(seed):
        def some(rows, cols, first):
            return [make_weight(QuantType.Q8_0, rows, cols, seed=seed + first + e) for e in range(EXPERTS)]

        weights = ExpertWeights(some(WIDTH, HIDDEN, 0), some(WIDTH, HIDDEN, 10), some(HIDDEN, WIDTH, 20))
        return MoeKernel(weights, ActivationSpec(), pool)

    return [layer(100 * i) for i in range(3)]


@pytest.fixture
def driver():
    made = FakeDriver()
    yield made
    made.stop()


def make_experts(kernels, driver, method, max_tokens=8, dtype=torch.float32, hidden=HIDDEN):
    experts = AsyncCpuExperts(kernels[0].pool, StreamShape(max_tokens, TOP_K, hidden, dtype), driver, method)
    assert [experts.add_layer(kernel) for kernel in kernels] == list(range(len(kernels)))
    return experts


def inputs(tokens, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    ids = torch.randint(0, EXPERTS + 1, (tokens, TOP_K), generator=generator, dtype=torch.int32)
    return x, ids, torch.rand(tokens, TOP_K, generator=generator)


def expected(kernel, x, ids, weights):
    return kernel.forward(x.float(), ids, weights).to(x.dtype)


@METHODS
@DTYPES
def test_equals_the_kernel_over_layers_and_rounds(kernels, driver, method, dtype):
    experts = make_experts(kernels, driver, method, dtype=dtype)
    counts = ExpertCounts()
    for kernel in kernels:
        counts.watch(kernel)
    before, rounds = counts.totals(), []
    for i in range(60):
        x, ids, weights = inputs(1 + i % 8, seed=i, dtype=dtype)
        ids = ids.long() if i % 2 else ids
        out = torch.full_like(x, float("nan"))
        experts.submit(i % 3, x, ids, weights)
        assert experts.collect(out) is out
        rounds.append((i % 3, x, ids, weights, out))
    driver.synchronize()
    told = counts.totals()
    for layer, x, ids, weights, out in rounds:
        assert torch.equal(out, expected(kernels[layer], x, ids, weights))
    assert experts.num_forwards == 60
    pairs, calls, touched = (now - then for now, then in zip(told, before, strict=True))
    assert calls == 60
    assert pairs == sum(int((ids != EXPERTS).sum()) for _, _, ids, _, _ in rounds)
    assert touched == sum(len(set(ids.flatten().tolist()) - {EXPERTS}) for _, _, ids, _, _ in rounds)
    assert experts.busy_seconds > 0
    experts.check()
    experts.close()


@METHODS
@DTYPES
def test_what_the_coordinator_does_is_recorded(make_weight, pool, driver, method, dtype):
    """Under the layer's number in the model; the first operation of a forward says how long it was due."""
    own = WorkerPool(2)
    parts = [[make_weight(QuantType.Q8_0, *shape, seed=e) for e in range(EXPERTS)] for shape in SHAPES]
    kernels = [MoeKernel(ExpertWeights(*parts), ActivationSpec(), own, layer) for layer in (4, 7)]
    experts = make_experts(kernels, driver, method, dtype=dtype)
    x, ids, weights = inputs(3, dtype=dtype)
    plain, recorded = torch.empty_like(x), torch.empty_like(x)
    experts.submit(1, x, ids, weights)
    experts.collect(plain)
    driver.synchronize()
    profile = PoolProfile(own)
    experts.submit(1, x, ids, weights)
    experts.collect(recorded)
    driver.synchronize()
    experts.close()
    assert torch.equal(plain, recorded)
    found = records_in(profile.drain())
    (call,) = (record for record in found if isinstance(record, Experts))
    assert (call.layer, call.rows) == (7, 3)
    assert call.ids == {i: [-1 if e == EXPERTS else e for e in row] for i, row in enumerate(ids.tolist())}
    ops = [record for record in found if isinstance(record, Op)]
    assert {(op.layer, op.part, op.rows) for op in ops} == {(7, "experts", 3)}
    assert all(op.op != 0 for op in ops)  # rows to fp32 and back: of so few they are not worth a record
    assert ops[0].wait_ns > 0
    own.close()


@METHODS
def test_a_captured_step_replays_with_other_inputs_and_fewer_tokens(kernels, driver, method):
    experts = make_experts(kernels, driver, method, dtype=torch.bfloat16)
    x, ids, weights = inputs(4, dtype=torch.bfloat16)
    outs = [torch.zeros_like(x) for _ in kernels]
    with driver.capture() as graph:
        for layer, out in enumerate(outs):
            experts.submit(layer, x, ids, weights)
            experts.collect(out)
    driver.synchronize()
    assert experts.num_forwards == 0
    count = experts.captured()
    assert (count, experts.captured()) == (3, 0)
    for round_number in range(40):
        tokens = round_number % 5
        for static, new in zip((x, ids, weights), inputs(4, round_number, torch.bfloat16), strict=True):
            static.copy_(new)
        experts.expect(count)
        experts.set_rows(tokens)
        driver.replay(graph)
        driver.synchronize()
        for layer, out in enumerate(outs):
            assert torch.equal(out[:tokens], expected(kernels[layer], x[:tokens], ids[:tokens], weights[:tokens]))
            assert not out[tokens:].any()
    experts.check()
    experts.expect(count)
    experts.set_rows(5)  # more tokens than the graph has rows
    driver.replay(graph)
    driver.synchronize()
    with pytest.raises(EngineError, match="num_tokens is 5, but the batch has 4 rows"):
        experts.check()
    experts.close()


@METHODS
def test_many_rows_are_converted_on_the_pool(kernels, driver, method):
    experts = make_experts(kernels, driver, method, max_tokens=1500, dtype=torch.bfloat16)
    x, ids, weights = inputs(1500, dtype=torch.bfloat16)
    out = torch.zeros_like(x)
    experts.submit(1, x, ids, weights)
    experts.collect(out)
    driver.synchronize()
    assert torch.equal(out, expected(kernels[1], x, ids, weights))
    experts.close()


def test_rounding_is_that_of_torch(make_weight, pool, driver):
    """An identity: down(relu(up(x))), so that what comes out is bf16(fp32 sums of bf16 values)."""
    eye = [make_weight(QuantType.F32, HIDDEN, HIDDEN)]
    torch.from_numpy(eye[0].data.numpy().view("float32")).view(HIDDEN, HIDDEN).copy_(torch.eye(HIDDEN))
    kernel = MoeKernel(ExpertWeights(None, eye, eye), ActivationSpec(Activation.RELU), pool)
    experts = AsyncCpuExperts(pool, StreamShape(64, 1, HIDDEN), driver, EnqueueMethod.HOST)
    experts.add_layer(kernel)
    x = torch.rand(64, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[0, :3] = torch.tensor([float("inf"), 3.3895e38, 1e-40])
    ids, weights = torch.zeros(64, 1, dtype=torch.int32), 1 + torch.arange(64.0).view(64, 1) / 64
    weights[1] = float("nan")
    out = torch.zeros_like(x)
    experts.submit(0, x, ids, weights)
    experts.collect(out)
    driver.synchronize()
    want = kernel.forward(x.float(), ids, weights)
    assert torch.equal(out.view(torch.int16)[2:], want.bfloat16().view(torch.int16)[2:])
    assert out[:2].isnan().equal(want[:2].isnan())
    assert torch.equal(out[:2].nan_to_num(), want[:2].bfloat16().nan_to_num())
    experts.close()


@METHODS
def test_an_error_is_kept_and_the_next_forward_is_right(kernels, driver, method):
    experts = make_experts(kernels, driver, method)
    x, ids, weights = inputs(3)
    bad = ids.clone()
    bad[1, 1] = 77
    first, second = torch.full_like(x, float("nan")), torch.zeros_like(x)
    experts.submit(2, x, bad, weights)
    experts.collect(first)
    experts.submit(0, x, ids, weights)
    experts.collect(second)
    driver.synchronize()
    with pytest.raises(EngineError, match=r"layer 2 .*topk_ids\[1, 1\] is 77"):
        experts.check()
    experts.check()
    assert not first.any()
    assert torch.equal(second, expected(kernels[0], x, ids, weights))
    experts.close()


@METHODS
def test_a_submit_that_was_not_collected_is_waited_for(kernels, driver, method):
    experts = make_experts(kernels, driver, method)
    x, ids, weights = inputs(3)
    out = torch.zeros_like(x)
    experts.submit(0, x, ids, weights)
    experts.submit(1, x, ids, weights)
    experts.collect(out)
    with pytest.raises(RuntimeError, match="collect without submit"):
        experts.collect(out)
    driver.synchronize()
    assert torch.equal(out, expected(kernels[1], x, ids, weights))
    assert experts.num_forwards == 2
    experts.close()


def test_arguments(kernels, driver, make_weight):
    experts = make_experts(kernels, driver, EnqueueMethod.HOST)
    x, ids, weights = inputs(3)
    with pytest.raises(ValueError, match="hidden_states must be"):
        experts.submit(0, x[:, :-1], ids, weights)
    with pytest.raises(ValueError, match=r"topk_ids must be \[3, 2\]"):
        experts.submit(0, x, ids[:2], weights)
    with pytest.raises(ValueError, match="topk_weights must be"):
        experts.submit(0, x, ids, weights[:, :1])
    with pytest.raises(ValueError, match="9 tokens do not fit"):
        experts.submit(0, *inputs(9))
    with pytest.raises(IndexError, match="layer 3 of a stream with 3 layers"):
        experts.submit(3, x, ids, weights)
    experts.submit(0, x, ids, weights)
    with pytest.raises(ValueError, match="out must be"):
        experts.collect(x[:2])
    experts.collect(torch.empty_like(x))
    driver.synchronize()
    experts.close()
    with pytest.raises(TypeError, match="bf16 or fp32"):
        AsyncCpuExperts(kernels[0].pool, StreamShape(1, 1, 8, torch.float16), driver)
    other = AsyncCpuExperts(kernels[0].pool, StreamShape(1, 1, 32), driver)
    with pytest.raises(ValueError, match="hidden size is 64, the stream's 32"):
        other.add_layer(kernels[0])
    other.close()
    with pytest.raises(ValueError, match="max_tokens must be between 1 and 1048575"):
        AsyncCpuExperts(kernels[0].pool, StreamShape(1 << 20, 1, 1), driver)


def test_the_method_is_the_driver_s_and_said_once(driver, caplog):
    with caplog.at_level(logging.INFO):
        assert choose_enqueue_method(driver) is EnqueueMethod.MEMORY
        driver.memory_reason = "too old"
        assert choose_enqueue_method(driver) is EnqueueMethod.HOST
    assert [record.message for record in caplog.records] == [
        "CPU experts are handed over by stream memory operations",
        "CPU experts are handed over by host functions (too old)",
    ]


@METHODS
def test_after_closing_nothing_hangs(kernels, driver, method):
    experts = make_experts(kernels, driver, method)
    x, ids, weights = inputs(2)
    handle = experts._handle
    experts.submit(0, x, ids, weights)
    experts.collect(torch.empty_like(x))
    driver.synchronize()
    word = handle.word_of(0, 2, False)
    handle.close()
    with pytest.raises(RuntimeError, match="closed"):
        handle.expect(1)
    if method is EnqueueMethod.HOST:
        call = handle.call_of(word)
        driver.launch_host_func(handle.submit_address, call)
        driver.launch_host_func(handle.wait_address, call)
        driver.synchronize()
        with pytest.raises(EngineError, match="closed"):
            experts.check()
    experts.close()
    experts.close()
    with pytest.raises(RuntimeError, match="closed"):
        experts.submit(0, x, ids, weights)
    assert handle.num_forwards == 1


@METHODS
def test_closing_while_the_stream_waits(kernels, driver, method):
    experts = make_experts(kernels, driver, method, max_tokens=512)
    x, ids, weights = inputs(512)
    for _ in range(30):
        experts.submit(0, x, ids, weights)
        experts.collect(torch.empty_like(x))
    finished = threading.Event()
    driver.enqueue(finished.set)
    experts._handle.close()  # in the middle
    assert method is EnqueueMethod.MEMORY or finished.wait(PATIENCE)
    ran = experts.num_forwards
    assert ran <= 30
    assert experts._handle.num_forwards == ran
    while not finished.is_set():  # what the stream asks for by the word after the end is answered by nobody
        experts._word[0] = 0
    driver.synchronize()


@METHODS
def test_an_idle_stream_uses_no_cpu(kernels, driver, method):
    experts = make_experts(kernels, driver, method)
    x, ids, weights = inputs(2)
    experts.submit(0, x, ids, weights)
    experts.collect(torch.empty_like(x))
    driver.synchronize()
    own, all_threads = time.thread_time(), time.process_time()
    while time.thread_time() - own < 0.3:
        pass
    assert time.process_time() - all_threads - (time.thread_time() - own) < 0.03
    experts.close()


PROGRAM = """
import os, torch
from ktransformers.kernels.transfer.async_cpu_experts import EnqueueMethod, AsyncCpuExperts, StreamShape
from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.types import ActivationSpec, ExpertWeights
from ktransformers.kernels.types import RawTensor
from tests.support.engines.fake_stream import FakeDriver
weight = RawTensor.from_tensor(torch.ones(64, 64))
pool = WorkerPool(3)
kernel = MoeKernel(ExpertWeights([weight], [weight], [weight]), ActivationSpec(), pool)
arguments = torch.ones(2, 64), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
want = kernel.forward(*arguments)

def run(pool, kernel):
    driver = FakeDriver()
    experts = AsyncCpuExperts(pool, StreamShape(2, 1, 64, torch.float32), driver, EnqueueMethod.METHOD)
    layer, out = experts.add_layer(kernel), torch.zeros(2, 64)
    experts.submit(layer, *arguments)
    experts.collect(out)
    driver.synchronize()
    assert torch.equal(out, want)
    return experts

experts = run(pool, kernel)
if FORKS:
    child = os.fork()
    if child == 0:
        try:
            experts.submit(0, *arguments)
        except RuntimeError as error:
            assert "fork" in str(error), error
            experts._finalizer()
            own = WorkerPool(2)
            run(own, MoeKernel(kernel.weights, ActivationSpec(), own))
            os._exit(0)
        os._exit(4)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
print("done")
"""


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize("method", ["HOST", "MEMORY"])
@pytest.mark.parametrize("forks", [False, True], ids=["exit", "fork"])
def test_fork_and_exit_in_a_fresh_process(method, forks):
    program = PROGRAM.replace("METHOD", method).replace("FORKS", str(forks))
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"


def test_a_stream_that_is_collected_waits_for_no_held_step(kernels, driver, monkeypatch):
    """Which goes on only once the host does: the device is waited for behind it."""
    left, waits = make_experts(kernels, driver, EnqueueMethod.MEMORY), []
    monkeypatch.setattr(driver, "synchronize", lambda: waits.append(None))
    begin_hold()
    del left
    gc.collect()
    assert not waits
    end_hold()
    assert len(waits) == 1


def test_many_streams_come_and_go(kernels, driver):
    x, ids, weights = inputs(2)
    before = set(threading.enumerate())
    for i in range(20):
        experts = make_experts(kernels, driver, list(EnqueueMethod)[i % 2])
        out = torch.zeros_like(x)
        experts.submit(0, x, ids, weights)
        experts.collect(out)
        driver.synchronize()
        assert torch.equal(out, expected(kernels[0], x, ids, weights))
        del experts
    assert set(threading.enumerate()) <= before  # those of earlier tests may end meanwhile


def test_two_streams_share_a_pool(kernels):
    drivers = [FakeDriver(), FakeDriver()]
    streams = [make_experts(kernels, driver, EnqueueMethod.MEMORY) for driver in drivers]
    done = []
    for i in range(40):
        x, ids, weights = inputs(1 + i % 8, seed=i)
        out = torch.zeros_like(x)
        streams[i % 2].submit(i % 3, x, ids, weights)
        streams[i % 2].collect(out)
        done.append((i % 3, x, ids, weights, out))
    for driver, stream in zip(drivers, streams, strict=True):
        driver.synchronize()
        stream.close()
        driver.stop()
    for layer, x, ids, weights, out in done:
        assert torch.equal(out, expected(kernels[layer], x, ids, weights))


def test_a_closed_pool_is_an_error_not_a_hang(make_weight, driver):
    pool = WorkerPool(2)
    weight = make_weight(QuantType.F32, HIDDEN, HIDDEN)
    kernel = MoeKernel(ExpertWeights([weight], [weight], [weight]), ActivationSpec(), pool)
    experts = AsyncCpuExperts(pool, StreamShape(2, 1, HIDDEN, torch.float32), driver, EnqueueMethod.MEMORY)
    experts.add_layer(kernel)
    pool.close()
    out = torch.ones(1, HIDDEN)
    experts.submit(0, out.clone(), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    experts.collect(out)
    driver.synchronize()
    assert not out.any()
    with pytest.raises(EngineError, match="closed: make a new one"):
        experts.check()
    experts.close()

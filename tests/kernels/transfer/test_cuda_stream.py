"""Experts in the order of a real stream: both ways of handing over, eager and captured; decode graphs around them."""

from __future__ import annotations

import gc

import pytest
import torch

from ktransformers.engine.step.cuda_graph_runner import CUDAGraphRunner
from ktransformers.engine.step.cuda_graphs import CudaGraphs
from ktransformers.engine.step.decode_inputs import DecodeInputs, StaticInputs
from ktransformers.errors import EngineError, KernelError
from ktransformers.kernels.cpu import MoeKernel
from ktransformers.kernels.transfer.async_cpu_experts import AsyncCpuExperts, EnqueueMethod, StreamShape
from ktransformers.kernels.transfer.cuda import CudaDriver
from ktransformers.kernels.types import ActivationSpec, ExpertWeights, QuantType

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EXPERTS, HIDDEN, WIDTH, TOP_K, LAYERS = 8, 256, 96, 2, 3


@pytest.fixture(scope="module")
def kernels(make_weight, pool):
    def some(rows, cols, seed):
        return [make_weight(QuantType.Q8_0, rows, cols, seed=seed + e) for e in range(EXPERTS)]

    parts = [(some(WIDTH, HIDDEN, i), some(WIDTH, HIDDEN, 50 + i), some(HIDDEN, WIDTH, 90 + i)) for i in range(LAYERS)]
    return [MoeKernel(ExpertWeights(*part), ActivationSpec(), pool) for part in parts]


@pytest.fixture(params=[(method, kernel) for method in EnqueueMethod for kernel in (True, False)], ids=str)
def experts(request, kernels):
    method, uses_kernels = request.param
    driver = CudaDriver("cuda", uses_kernels)
    if method is EnqueueMethod.MEMORY and driver.memory_operations() is not None:
        pytest.skip(driver.memory_operations())
    made = AsyncCpuExperts(kernels[0].pool, StreamShape(100, TOP_K, HIDDEN), driver, method)
    for kernel in kernels:
        made.add_layer(kernel)
    yield made
    made.close()


def inputs(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(0, EXPERTS + 1, (tokens, TOP_K), generator=generator)
    return x, ids, torch.rand(tokens, TOP_K, generator=generator)


def expected(kernel, x, ids, weights):
    return kernel.forward(x.float(), ids, weights).bfloat16()


def test_the_driver_reports_its_errors():
    driver = CudaDriver("cuda")
    with pytest.raises(KernelError, match="cuMemHostGetDevicePointer_v2 failed"):
        driver.device_address(torch.zeros(1))
    with pytest.raises(KernelError, match="no CUDA device"):
        CudaDriver("cpu")


def test_eager_steps_run_ahead(experts, kernels):
    """Nothing is waited for until the end; sizes on both sides of where copies change their way."""
    done = []
    for i in range(60):
        x, ids, weights = inputs((1, 4, 64, 65, 100)[i % 5], i)
        out = torch.empty_like(x, device="cuda")
        experts.submit(i % LAYERS, x.cuda(), ids.cuda(), weights.cuda())
        done.append((i % LAYERS, x, ids, weights, experts.collect(out)))
    torch.cuda.synchronize()
    for layer, x, ids, weights, out in done:
        assert torch.equal(out.cpu(), expected(kernels[layer], x, ids, weights))
    experts.check()


def test_an_error_is_raised_by_check_and_the_stream_goes_on(experts, kernels):
    x, ids, weights = inputs(4, 0)
    bad = ids.clone()
    bad[2, 0] = 99
    for routing in (bad, ids):
        experts.submit(1, x.cuda(), routing.cuda(), weights.cuda())
        out = experts.collect(torch.empty_like(x, device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(EngineError, match=r"topk_ids\[2, 0\] is 99"):
        experts.check()
    assert torch.equal(out.cpu(), expected(kernels[1], x, ids, weights))


def test_decode_graphs_equal_eager_steps(experts, kernels):
    """x + experts(x) over the layers; routing depends on the token. Graph and eager agree bit for bit."""
    embedding = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    weights = torch.full((8, TOP_K), 0.5, device="cuda")
    device = torch.device("cuda", torch.cuda.current_device())

    def run(step: DecodeInputs) -> torch.Tensor:
        tokens = step.hidden_states[:, 0].long()
        x = embedding[tokens]
        ids = (tokens[:, None] + torch.arange(TOP_K, device="cuda")) % EXPERTS
        for layer in range(LAYERS):
            experts.submit(layer, x, ids, weights[: len(x)])
            shared = torch.tanh(x)  # what runs beside the CPU
            x = x + shared + experts.collect(torch.empty_like(x))
        return x.float()

    def make(size: int) -> StaticInputs:
        return StaticInputs(size, 3, device, 1, torch.float32)

    graphs = CUDAGraphRunner(run, (1, 2, 4), make, CudaGraphs([device]), lambda: [experts])
    assert graphs.reason is None
    assert graphs.batch_sizes == (1, 2, 4)
    for number in range(200):
        rows = 1 + number % 4
        tokens = (torch.arange(rows) * 7 + number) % 50
        row = torch.arange(rows, dtype=torch.int32)
        step = DecodeInputs(tokens[:, None].float(), tokens, tokens, row, row, torch.zeros(rows, 3, dtype=torch.int32))
        got = graphs.forward(step).clone()
        if number % 10 == 0:
            assert torch.equal(got, run(step.to(device)))
    torch.cuda.synchronize()
    experts.check()


def test_a_step_that_synchronizes_is_not_captured():
    device = torch.device("cuda", torch.cuda.current_device())

    def run(step: DecodeInputs) -> torch.Tensor:
        return torch.full((step.num_rows, 2), float(step.hidden_states.sum().item()), device=device)

    graphs = CUDAGraphRunner(run, (1, 2), lambda size: StaticInputs(size, 1, device, 1), CudaGraphs([device]))
    assert graphs.batch_sizes == ()
    assert graphs.reason is not None
    row = torch.zeros(1, dtype=torch.int32)
    step = DecodeInputs(torch.tensor([[7.0]]), torch.tensor([0]), torch.tensor([0]), row, row, torch.zeros(1, 1).int())
    assert graphs.forward(step).tolist() == [[7.0, 7.0]]


def test_graphs_of_a_lost_engine_do_not_end_a_capture():
    """Destroyed on the capturing thread, one of them would; here a cycle keeps it, and every allocation collects."""
    device = torch.device("cuda", torch.cuda.current_device())
    graphs, x = CudaGraphs([device]), torch.ones(4, device="cuda")
    for work in (lambda: x + 1, lambda: x + 2):
        graphs.warm_up(work)
    lost, _ = graphs.capture(lambda: x + 1)
    cycle = [lost]
    cycle.append(cycle)
    gc.collect()
    thresholds = gc.get_threshold()

    def work() -> torch.Tensor:
        gc.set_threshold(1, 1, 1)
        assert len([[] for _ in range(100)]) == 100
        return x + 2

    try:
        del lost, cycle
        graph, result = graphs.capture(work)
    finally:
        gc.set_threshold(*thresholds)
    graphs.launch(graph, lambda: None)
    graphs.wait()
    assert result.tolist() == [3.0] * 4

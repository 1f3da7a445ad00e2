"""Measures what predictions need of a GPU: memory, products, PCIe both ways, launches, enqueueing work of the CPU.

Products are the kernels' own, replayed from a graph over weights larger than the L2 cache, in the shapes of an
attention projection and of a layer of experts. What a launch takes is not counted, nor attention to a few positions:
they are part of what a layer costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

import torch

from ktransformers.bench.common.bandwidth import measure_gpu
from ktransformers.bench.gpu.attention_case import MODELS, AttentionCase, AttentionModel, StepShape
from ktransformers.bench.gpu.device import BF16, Gpu
from ktransformers.bench.gpu.hand_over import HandOverWork, measure_hand_over
from ktransformers.bench.gpu.random_matrices import random_matrices, random_weights
from ktransformers.bench.probe.steps import gpu_step_costs
from ktransformers.config import EngineConfig
from ktransformers.engine.step.graph_sizes import GRAPH_ROWS
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.triton.experts.matrices import ExpertMatrices, MoeMatrices, RoutedRows
from ktransformers.kernels.triton.experts.moe import moe
from ktransformers.kernels.triton.experts.workspace import DIGIT_TOKENS, VECTOR_TOKENS, MoeWorkspace
from ktransformers.kernels.triton.linear.linear import Workspace, linear
from ktransformers.kernels.triton.quant.dequant import WeightMatrix
from ktransformers.kernels.triton.quant.repack import GpuLayout
from ktransformers.kernels.types import QuantType
from ktransformers.optimize.machine_speed import Curve, GpuSpeed

__all__ = ["probe_gpu", "probe_pcie"]

_ROWS, _COLS = 5120, 2048
_TOKENS = (1, 16, 64, 512, 2048)
# Where one kernel ends another begins, slower or faster.
_EXPERT_TOKENS = tuple(sorted({*_TOKENS, VECTOR_TOKENS, DIGIT_TOKENS}))
_EXPERTS, _TOP_K, _WIDTH = 128, 8, 768
_MODELS = {"grouped": "qwen3-30b-a3b", "latent": "deepseek-v2-lite"}
_DECODES, _PROMPTS, _LENGTHS = (1, 4, 16), (512, 2048), (64, 1024)
_SETS = 8  # of keys and values
_TYPES = (QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.MXFP4)
_MATMUL = 4096
_PCIE_BYTES = 256 << 20


def probe_gpu(name: str, threads: int, say: Callable[[str], None] = lambda text: None) -> GpuSpeed:
    """Measure everything of the GPU "cuda:N". threads: of the CPU, which experts are handed over to.

    say: called with the name of what is next.
    """
    with torch.cuda.device(name), torch.inference_mode():
        gpu = Gpu()
        say(f"memory of {name}, PCIe")
        read, (to_gpu, from_gpu) = measure_gpu(name), probe_pcie(name)
        say(f"products of {name}")
        one = torch.zeros(1, device=gpu.device)
        launch = 1e-6 * gpu.graph_us([partial(one.add_, 1.0)] * 100)
        curves = {qtype.name: _curve(gpu, qtype, launch) for qtype in _TYPES} | {"BF16": _bf16_curve(gpu, launch)}
        say(f"experts of {name}")
        experts = {qtype.name: _expert_curve(gpu, qtype, launch) for qtype in _TYPES}
        a, b = gpu.randn(_MATMUL, _MATMUL), gpu.randn(_MATMUL, _MATMUL)
        matmul = 2e6 * _MATMUL**3 / gpu.median_us(lambda: a @ b)
        say(f"attention of {name}")
        attention = {kind: _attention_curve(gpu, kind, launch) for kind in _MODELS}
        say(f"hand-overs of {name}")
        with closing(WorkerPool(threads)) as pool:
            hand_over = measure_hand_over(pool, HandOverWork(("empty",), (1,), 24, threads, 0, 50.0))
    say(f"steps of small models on {name}")
    costs = gpu_step_costs(threads, EngineConfig(use_cuda=True))
    return GpuSpeed(
        name=torch.cuda.get_device_name(name),
        read=read,
        matmul=matmul,
        to_gpu=to_gpu,
        from_gpu=from_gpu,
        launch=launch,
        hand_over=hand_over,
        linear=curves,
        experts=experts,
        attention=attention,
        steps=costs.decode,
        replayed=costs.replayed,
        replayed_rows=max(GRAPH_ROWS),
        launches=costs.launched,
    )


def probe_pcie(name: str, nbytes: int = _PCIE_BYTES) -> tuple[float, float]:
    """Measure the bytes a second to the GPU and from it, out of pinned memory; the best of a few copies."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=name)

    def rate(copy: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(4):
            torch.cuda.synchronize(name)
            began = time.perf_counter()
            copy()
            torch.cuda.synchronize(name)
            best = min(best, time.perf_counter() - began)
        return nbytes / best

    there_rate = rate(lambda: there.copy_(host, non_blocking=True))
    return there_rate, rate(lambda: host.copy_(there, non_blocking=True))


def _curve(gpu: Gpu, qtype: QuantType, launch: float) -> Curve:
    """Matrices [_ROWS, _COLS], by the rows they are multiplied with."""
    weights = random_weights(gpu, qtype, _ROWS, _COLS)
    seconds = []
    for count in _TOKENS:
        x, out = gpu.randn(count, _COLS), torch.empty(count, _ROWS, dtype=BF16, device=gpu.device)
        space = Workspace.allocate(gpu.device, count)
        matrices = [WeightMatrix(one, qtype, _ROWS, _COLS, GpuLayout.PLANES) for one in weights]
        calls = [partial(linear, x, one, out=out, workspace=space) for one in matrices]
        seconds.append(_beyond(gpu, calls, launch) / weights[0].numel())
    return Curve(tuple(map(float, _TOKENS)), tuple(seconds))


def _bf16_curve(gpu: Gpu, launch: float) -> Curve:
    nbytes = 2 * _ROWS * _COLS
    weights = [gpu.randn(_ROWS, _COLS) for _ in range(gpu.copies(nbytes))]
    seconds = []
    for count in _TOKENS:
        x = gpu.randn(count, _COLS)
        seconds.append(_beyond(gpu, [partial(torch.nn.functional.linear, x, one) for one in weights], launch) / nbytes)
    return Curve(tuple(map(float, _TOKENS)), tuple(seconds))


def _beyond(gpu: Gpu, calls: Sequence[Callable[[], object]], launch: float) -> float:
    return max(1e-6 * gpu.graph_us(calls) - launch, 0.0)


def _expert_curve(gpu: Gpu, qtype: QuantType, launch: float) -> Curve:
    """A layer of experts on even routing, by the rows of a touched one. Consecutive calls take different experts."""
    up, down = ((_WIDTH, _COLS), (_COLS, _WIDTH))
    gate, up_matrices, down_matrices = (_experts(gpu, qtype, *shape) for shape in (up, up, down))
    each = gate.nbytes + up_matrices.nbytes + down_matrices.nbytes
    points: dict[float, float] = {}
    for tokens in _EXPERT_TOKENS:
        order = torch.stack([torch.randperm(_EXPERTS) for _ in range(tokens)]).to(gpu.device, torch.int32)
        starts = range(0, _EXPERTS, _TOP_K * (4 if tokens > 64 else 1))
        routings = [order[:, i : i + _TOP_K].contiguous() for i in starts]
        touched = sum(len(set(one.flatten().tolist())) for one in routings) / len(routings)
        x, weights = gpu.randn(tokens, _COLS), torch.full((tokens, _TOP_K), 1.0 / _TOP_K, device=gpu.device)
        out = torch.empty_like(x)
        space = MoeWorkspace.allocate(x, _TOP_K, _EXPERTS, up_matrices, down_matrices)
        experts = MoeMatrices(gate, up_matrices, down_matrices)
        calls = [partial(moe, RoutedRows(x, ids, weights), experts, out, workspace=space) for ids in routings]
        points[tokens * _TOP_K / touched] = _beyond(gpu, calls, 2 * launch) / (touched * each)
    return Curve(tuple(points), tuple(points.values()))


def _experts(gpu: Gpu, qtype: QuantType, rows: int, cols: int) -> ExpertMatrices:
    return ExpertMatrices(random_matrices(gpu, qtype, rows, cols, _EXPERTS), qtype, rows, cols, GpuLayout.PLANES)


def _attention_curve(gpu: Gpu, kind: str, launch: float) -> Curve:
    """Seconds of a multiplication, by the rows of a step: of decode steps, and for grouped heads of prompts' too."""
    model = next(one for one in MODELS if one.name == _MODELS[kind])
    points = {}
    for batch in _DECODES:
        few, many = (_attention_seconds(gpu, model, StepShape(batch, 1, length)) for length in _LENGTHS)
        points[batch] = max(many - few, 0.0) / (batch * (_LENGTHS[1] - _LENGTHS[0]))
    for rows in () if model.is_latent else _PROMPTS:
        seconds = _attention_seconds(gpu, model, StepShape(1, rows, rows)) - launch
        points[rows] = max(seconds, 0.0) / (rows * (rows + 1) / 2)
    width = model.heads * (model.dim + model.dim_v)
    return Curve(tuple(map(float, points)), tuple(seconds / width for seconds in points.values()))


def _attention_seconds(gpu: Gpu, model: AttentionModel, step: StepShape) -> float:
    case = AttentionCase(gpu, model, step, _SETS)
    return 1e-6 * gpu.graph_us([partial(case.call, index) for index in range(_SETS)])

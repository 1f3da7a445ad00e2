"""Sets up what streams routed experts to the GPUs in large prefill steps: pinned memory, buffers, rates.

Knows plans, loaded operators and devices; not steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ktransformers.errors import KernelError
from ktransformers.kernels.cpu import MoeKernel
from ktransformers.kernels.transfer.async_cpu_experts import AsyncCpuExperts, StreamShape
from ktransformers.kernels.transfer.copies import CopyQueue, CudaCopies, PinnedRanges
from ktransformers.kernels.transfer.cuda import CudaDriver, StreamDriver
from ktransformers.kernels.types import PackedTensor
from ktransformers.operators.base import ExpertStats
from ktransformers.operators.device import Device
from ktransformers.operators.experts.host_experts import HostExperts
from ktransformers.operators.experts.rates import RatesFile, calibrate
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.experts.staging import Staging, StagingSize
from ktransformers.operators.experts.streamed import ExpertPrefill, PrefillLayer, PrefillShape
from ktransformers.optimize.plan import Plan
from ktransformers.optimize.streaming import Streaming
from ktransformers.system.cpu_names import cpu_name

__all__ = ["PrefillDriver", "PrefillStream", "PrefillTools", "cuda_tools", "open_prefill", "open_prefills"]

logger = logging.getLogger(__name__)


class PrefillDriver(StreamDriver, Protocol):
    """A StreamDriver that also pins memory in place."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin `nbytes` of memory at `address`. Raises KernelError where that cannot be."""
        ...

    def unpin(self, address: int) -> None:
        """Unpin the memory that was pinned at `address`."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillTools:
    """The functions that stand for CUDA here; tests have their own. name: of the device, as people know it."""

    driver: PrefillDriver
    copies: CopyQueue
    name: str


_ANY_ROWS = 1 << 30


def cuda_tools(device: Device, kernel_rows: int = _ANY_ROWS) -> PrefillTools | None:
    """Return the tools of a CUDA device, None for another.

    kernel_rows: of hidden states and results, up to which kernels copy them: a copy engine may finish the experts that
    are queued for the next layer before it turns to a result that this one waits for.
    """
    if device.torch_device.type != "cuda":
        return None
    driver = CudaDriver(device.torch_device, kernel_rows=kernel_rows)
    return PrefillTools(driver, CudaCopies(driver), torch.cuda.get_device_name(device.torch_device))


@dataclass(slots=True)
class PrefillStream:
    """The experts of one GPU's layers, ready to be streamed to it."""

    prefill: ExpertPrefill
    pinned: PinnedRanges

    def check(self) -> None:
        """Raise EngineError when the CPU's part failed in a step, which is over."""
        self.prefill.check()

    def close(self) -> None:
        """Wait for the device and give the pinned memory back. Nothing may be submitted afterwards."""
        self.prefill.close()
        self.pinned.close()


def open_prefill(
    device: Device,
    kernels: Sequence[MoeKernel],
    shape: PrefillShape,
    size: StagingSize,
    tools: PrefillTools,
    stats: ExpertStats | None = None,
    *,
    least_rows: int = 2,
    remembers: bool = True,
) -> PrefillStream | None:
    """Pin the experts of some layers, in the order in which steps run them, and calibrate.

    least_rows: see ExpertPrefill. remembers: whether rates are read from the user's cache folder and kept there.
    Returns None, with a logged warning, where memory cannot be pinned. Raises CapacityError when the buffers do not
    fit.
    """
    hosts, pool = [HostExperts(kernel.weights) for kernel in kernels], kernels[0].pool
    try:
        pieces = {piece for host in hosts for piece in host.pieces()}
        pinned = PinnedRanges(tools.driver, pieces, hosts)
    except KernelError as error:
        logger.warning("experts are not streamed to %s: their memory cannot be pinned (%s)", device.name, error)
        return None
    cpu: AsyncCpuExperts | None = None
    try:
        staging = Staging(size, device.torch_device, tools.copies)
        dtype = torch.bfloat16 if device.dtype is torch.bfloat16 else torch.float32
        cpu = AsyncCpuExperts(pool, StreamShape(shape.most_rows, shape.top_k, shape.hidden_size, dtype), tools.driver)
        prefill = ExpertPrefill(device, shape, staging, cpu, tools.driver, stats, least_rows)
        for kernel in kernels:
            prefill.add_layer(kernel)
        key = {
            "gpu": tools.name,
            "cpu": cpu_name(),
            "isa": pool.isa.value,
            "threads": pool.num_threads,
            "bf16": any(part[0].wants_bf16 for part in (kernels[0].weights.up,) if isinstance(part[0], PackedTensor)),
            "experts": [shape.num_experts, shape.top_k],
            "projections": [[int(p.qtype), p.rows, p.cols] for p in hosts[0].projections],
            "staging": [size.num_buffers, size.nbytes],
        }
        calibrate(prefill, kernels[0], hosts[0].expert_nbytes, RatesFile(key) if remembers else None)
    except BaseException:
        if cpu is not None:
            cpu.close()
        pinned.close()
        raise
    return PrefillStream(prefill, pinned)


def open_prefills(
    plan: Plan,
    streamings: Sequence[Streaming],
    tools_of: Callable[[Device], PrefillTools | None],
    max_batch_size: int,
    slots: Mapping[str, int] | None = None,
) -> dict[str, PrefillLayer]:
    """Open what streams the loaded experts of a plan, by key, in steps of more rows than decode steps have.

    slots: how many of each layer's experts are going to have a slot on the GPU, by key. Errors as `open_prefill`;
    `Devices.close` ends it.
    """
    layers: dict[str, PrefillLayer] = {}
    for streaming in streamings:
        device = plan.devices[streaming.device]
        tools = tools_of(device)
        operators = [plan.operators[key] for key in streaming.keys]
        experts = [operator for operator in operators if isinstance(operator, KTransformersExperts)]
        kernels = [one.kernel for one in experts if one.kernel is not None]
        if tools is None or len(kernels) != len(operators):
            logger.info("experts are not streamed to %s: it is no CUDA device", device.name)
            continue
        stats = experts[0].config.expert_stats
        held = sum((slots or {}).get(key, 0) for key in streaming.keys) // len(streaming.keys)
        shape, size, least = replace(streaming.shape, num_held=held), streaming.size, max_batch_size + 1
        stream = open_prefill(device, kernels, shape, size, tools, stats, least_rows=least)
        if stream is None:
            continue
        device.services.append(stream)
        layers |= {key: PrefillLayer(stream.prefill, number) for number, key in enumerate(streaming.keys)}
    return layers

"""Devices by the names of placements ("cpu", "cuda:1"): a torch device, a type for activations, which kernels.

Tests map "cuda:N" to torch's CPU, where the Triton kernels run in Triton's interpreter; nothing outside this module
knows. On the CPU activations are fp32; on a GPU they are bf16, and so is its K/V cache.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.transfer.async_cpu_experts import AsyncCpuExperts, StreamShape
from ktransformers.kernels.transfer.cuda import CudaDriver, StreamDriver
from ktransformers.kernels.triton.common import runtime
from ktransformers.kernels.triton.experts.matrices import ExpertMatrices
from ktransformers.kernels.triton.experts.workspace import MoeWorkspace, uses_gemv
from ktransformers.kernels.triton.linear.linear import SPLIT_ROWS, Workspace
from ktransformers.operators.gpu_timers import GpuTimers
from ktransformers.operators.usage import ExpertUsage

__all__ = [
    "CPU",
    "STREAM_ROWS",
    "Device",
    "DeviceService",
    "Devices",
    "StepFollower",
    "cuda_memory",
    "distinct",
    "to_input",
    "use",
]

logger = logging.getLogger(__name__)

STREAM_ROWS = 512
"""Rows up to which experts on the CPU run in the order of a GPU's stream."""

_LEAST_CAPABILITY = (8, 0)  # of a GPU that has products of bf16
_COUNTERS = 1 << 14


class DeviceService(Protocol):
    """A service that works beside a device for the operators there."""

    def check(self) -> None:
        """Raise EngineError for what failed in a step, which is over."""
        ...

    def close(self) -> None:
        """Stop the service, once nothing uses it any more."""
        ...


class StepFollower(DeviceService, Protocol):
    """A DeviceService that follows steps, whether they are replayed or not. Called by the thread that runs them."""

    def launched(self) -> None:
        """Note that a step was launched, which is not over."""
        ...

    def finished(self, num_rows: int) -> None:
        """Note that the step launched last is over, and had so many rows."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """Device on which operators run, with its name, type of tensors and kernels.

    name: as placements spell it. torch_device: where its tensors are. dtype: of activations, dense weights and cache.
    is_gpu: whether modules on it run on Triton kernels and torch rather than on the native CPU kernels. make_driver:
    access to its streams. services: what else works for it, async_cpu_experts aside; followers: those that follow
    steps.
    """

    name: str
    torch_device: torch.device
    dtype: torch.dtype
    is_gpu: bool
    make_driver: Callable[[torch.device], StreamDriver] = CudaDriver
    services: list[DeviceService] = field(default_factory=list, compare=False, repr=False)
    followers: list[StepFollower] = field(default_factory=list, compare=False, repr=False)
    _scratch: dict[object, object] = field(default_factory=dict, compare=False, repr=False)
    _usages: dict[int, ExpertUsage] = field(default_factory=dict, compare=False, repr=False)

    @property
    def matmul_dtype(self) -> torch.dtype:
        """Type of the activations that quantized products read: fp16 where `dtype` is fp32, which none of them
        reads.
        """
        return torch.float16 if self.dtype is torch.float32 else self.dtype

    def to_device(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` on this device: floats in `dtype`, integers and complex numbers as they are. No copy of what is
        here already.

        What an operator does first: kernels launched next go to this device.
        """
        use(self.torch_device)
        return x.to(self.torch_device, self.dtype) if x.is_floating_point() else x.to(self.torch_device)

    def move(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` on this device, in its own type."""
        return x.to(self.torch_device)

    def begin_step(self, slots: torch.Tensor) -> None:
        """Begin a step. slots: int64 [T], where its rows go in the cache, on this device; negative for padding."""
        self._scratch["slots"] = slots

    def slots_of(self, num_rows: int) -> torch.Tensor | None:
        """Return the slots of the step's rows; None for rows that are not the step's."""
        slots = self._scratch.get("slots")
        return slots if isinstance(slots, torch.Tensor) and len(slots) == num_rows else None

    def expert_usage(self, num_layers: int, num_experts: int) -> ExpertUsage:
        """Return the counter of experts used on this device; all layers with so many experts share one."""
        made = self._usages.get(num_experts)
        if made is None:
            made = self._usages[num_experts] = ExpertUsage(num_layers, num_experts, self.torch_device)
        return made

    @property
    def usages(self) -> list[ExpertUsage]:
        """The counters of experts that expert_usage made."""
        return list(self._usages.values())

    @property
    def gpu_timers(self) -> GpuTimers | None:
        """Timers of the parts of steps on this device, while they are on; else None."""
        made = self._scratch.get("marks")
        return made if isinstance(made, GpuTimers) and made.is_on else None

    def make_gpu_timers(self) -> GpuTimers:
        """Return the timers of this device, off until they are begun."""
        made = self._scratch.get("marks")
        if not isinstance(made, GpuTimers):
            made = self._scratch["marks"] = GpuTimers(self.torch_device)
        return made

    def time_part(self, part: str, layer: int | None = None) -> None:
        """Time what this device does from here on as this part of a step, and of this layer (None: as before)."""
        marks = self.gpu_timers
        if marks is not None:
            marks.at(part, layer)

    def linear_workspace(self) -> Workspace:
        """Return memory of the quantized products, which run one after another on this device."""
        made = self._scratch.get("linear")
        if not isinstance(made, Workspace):
            made = self._scratch["linear"] = Workspace.allocate(self.torch_device, SPLIT_ROWS)
        return made

    def counters(self) -> torch.Tensor:
        """Return counters, int32, all 0 between launches, for kernels whose last program does something for all; one
        after another.
        """
        made = self._scratch.get("counters")
        if not isinstance(made, torch.Tensor):
            made = self._scratch["counters"] = torch.zeros(_COUNTERS, dtype=torch.int32, device=self.torch_device)
        return made

    def latent_workspace(self, numel: int) -> torch.Tensor:
        """Return uninitialized values of `dtype`, at least `numel`: for one layer's expanded keys and values after
        another's.
        """
        made = self._scratch.get("latent")
        if not isinstance(made, torch.Tensor) or made.numel() < numel:
            made = self._scratch["latent"] = torch.empty(numel, dtype=self.dtype, device=self.torch_device)
        return made

    def moe_workspace(
        self, x: torch.Tensor, top_k: int, experts: int, up: ExpertMatrices, down: ExpertMatrices
    ) -> MoeWorkspace:
        """Return memory of one layer's experts for x [T, H]; kept, and shared by all layers, for as few rows as decode
        has.
        """
        if not uses_gemv(x.shape[0], up, down):
            return MoeWorkspace.allocate(x, top_k, experts, up, down)
        shape = ("moe", x.shape[0], x.dtype, top_k, up.rows, down.rows)
        made = self._scratch.get(shape)
        if not isinstance(made, MoeWorkspace):
            made = self._scratch[shape] = MoeWorkspace.allocate(x, top_k, experts, up, down)
        return made

    def async_cpu_expert_stream(self, top_k: int, hidden_size: int, pool: WorkerPool) -> AsyncCpuExperts:
        """Return what enqueues experts on the CPU in this GPU's stream; all layers of these sizes share one."""
        shape = StreamShape(STREAM_ROWS, top_k, hidden_size, self.dtype)
        made = self._scratch.get((shape, pool))
        if not isinstance(made, AsyncCpuExperts):
            made = self._scratch[shape, pool] = AsyncCpuExperts(pool, shape, self.make_driver(self.torch_device))
        return made

    def async_cpu_experts(self) -> list[AsyncCpuExperts]:
        """Return the async CPU experts that were made for this device."""
        return [made for made in self._scratch.values() if isinstance(made, AsyncCpuExperts)]

    def workspace_nbytes(self) -> int:
        """Return the bytes that a GPU holds beside weights and cache: workspaces of small steps, and room for a prefill
        step.
        """
        return _STEP_BYTES if self.is_gpu else 0


_STEP_BYTES = 512 << 20  # activations of a prefill step and the allocator's slack
CPU = Device("cpu", torch.device("cpu"), torch.float32, is_gpu=False)


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one model by name. gpu: makes the Device of "cuda:N" (tests give their own)."""

    gpu: Callable[[str], Device] = lambda name: Device(name, torch.device(name), torch.bfloat16, is_gpu=True)
    _made: dict[str, Device] = field(default_factory=lambda: {"cpu": CPU}, compare=False, repr=False)
    _others: list[Devices] = field(default_factory=list, compare=False, repr=False)
    _behind: list[Callable[[], None]] = field(default_factory=list, compare=False, repr=False)

    def __getitem__(self, name: str) -> Device:
        device = self._made.get(name)
        if device is None:
            device = self._made[name] = self.gpu(name)
        return device

    def async_cpu_experts(self) -> list[AsyncCpuExperts]:
        """Return the async CPU experts of all devices."""
        return [stream for device in self._made.values() for stream in device.async_cpu_experts()]

    def usages(self) -> list[ExpertUsage]:
        """Return the counters of all devices that have experts."""
        return [usage for device in self._made.values() for usage in device.usages]

    def close_with_this(self, other: Devices) -> None:
        """Have `close` close the devices of another model, which computes with this one's threads, first."""
        self._others.append(other)

    def close_behind(self, close: Callable[[], None]) -> None:
        """Have `close` call this once nothing runs beside the devices any more."""
        self._behind.append(close)

    def close(self) -> None:
        """Stop what runs beside the devices. Graphs must not be replayed any more."""
        while self._others:
            self._others.pop().close()
        for device in self._made.values():
            while device.followers:
                device.followers.pop().close()
            while device.services:
                device.services.pop().close()
        for stream in self.async_cpu_experts():
            stream.close()
        while self._behind:
            self._behind.pop()()


def use(device: torch.device) -> None:
    """Launch Triton kernels on `device` from now on: unlike torch's, they go to the current device of the process."""
    if device.type == "cuda" and device.index is not None and torch.cuda.current_device() != device.index:
        torch.cuda.set_device(device)


def to_input(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `result` where the input `like` of an operator is, and in its type."""
    return result.to(like.device, like.dtype)


def cuda_memory() -> Mapping[str, int]:
    """Return {"cuda:N": free bytes} of every CUDA device that the kernels can run on; empty when there is none."""
    if not torch.cuda.is_available() or runtime.available() is not None:
        return {}
    return {f"cuda:{i}": torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()) if _is_usable(i)}


@functools.cache
def _is_usable(index: int) -> bool:
    """Whether a device multiplies bf16; one line for one that does not."""
    capability = torch.cuda.get_device_capability(index)
    if capability < _LEAST_CAPABILITY:
        name, numbers = torch.cuda.get_device_name(index), ".".join(map(str, capability))
        logger.warning("cuda:%d (%s) is left alone: its compute capability is %s, below 8.0", index, name, numbers)
    return capability >= _LEAST_CAPABILITY


def distinct(devices: Sequence[Device]) -> list[Device]:
    """Return each device once, in order of first use."""
    return list({device.name: device for device in devices}.values())

"""CUDA calls that torch lacks: host functions and memory operations on a stream, memory that is pinned where it is. The
only ctypes on CUDA.

Calls go to the driver's own library, which every machine with a driver has, so no toolkit is needed to build or run.
Knows streams and addresses; not experts, graphs or models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from ktransformers.errors import KernelError
from ktransformers.kernels.triton.common import runtime
from ktransformers.kernels.triton.common.convert import CopySignal, convert_rows, wait_for_word

__all__ = ["CudaDriver", "StreamDriver"]

_ATTRIBUTE_64_BIT_MEMORY_OPERATIONS = 122  # of the second version of these calls, which needs no module parameter
_WAIT_EQUAL = 1
_FOR_ALL_CONTEXTS = 1  # CU_MEMHOSTREGISTER_PORTABLE
_KERNEL_ROWS = 64  # copied by one kernel, which starts sooner than three copy engines; these are faster for more


class StreamDriver(Protocol):
    """Driver calls on the stream that is current in torch when a method is called; tests have one without a device."""

    def is_capturing(self) -> bool:
        """Whether the stream's work is recorded into a graph rather than run."""
        ...

    def launch_host_func(self, function: int, argument: int) -> None:
        """Call the C function `void(void *)` at an address, on a thread of the driver's, when the stream gets there."""
        ...

    def write_value(self, address: int, value: int) -> None:
        """Write 32 bits after everything before on the stream is done and visible. address: of `device_address`."""
        ...

    def wait_value(self, address: int, value: int) -> None:
        """Let the stream wait until the 32 bits at `address` are `value`."""
        ...

    def memory_operations(self) -> str | None:
        """Return why write_value and wait_value cannot be used, or None when they can."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate zeros on the CPU in memory that the device reads and writes."""
        ...

    def device_address(self, tensor: Tensor) -> int:
        """Return the address at which the device finds a tensor of `pinned`."""
        ...

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy up to three matrices [T, any] between the device and pinned memory, converted to the targets' types."""
        ...

    def copy_and_signal(self, targets: Sequence[Tensor], sources: Sequence[Tensor], address: int, value: int) -> None:
        """Copy as `copy` does, to pinned memory, and write behind it as `write_value` does."""
        self.copy(targets, sources)
        self.write_value(address, value)

    def synchronize(self) -> None:
        """Return when all work of the device is done."""
        ...


def _load_driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError(f"libcuda.so.1 cannot be loaded ({error}): install NVIDIA's driver") from error
    pointer, address, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint
    signatures = {
        "cuLaunchHostFunc": (pointer, pointer, pointer),
        "cuStreamWriteValue32_v2": (pointer, address, ctypes.c_uint32, number),
        "cuStreamWaitValue32_v2": (pointer, address, ctypes.c_uint32, number),
        "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(address), pointer, number),
        "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
        "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
        "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
        "cuMemHostRegister_v2": (pointer, ctypes.c_size_t, number),
        "cuMemHostUnregister": (pointer,),
        "cuMemcpyHtoDAsync_v2": (address, pointer, ctypes.c_size_t, pointer),
    }
    for name, arguments in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            raise KernelError(f"libcuda.so.1 has no {name}: a driver for CUDA 12 or later is needed")
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


class CudaDriver(StreamDriver):
    """The StreamDriver of a CUDA device. Raises KernelError when a call fails, with the driver's own words.

    uses_kernels: whether Triton kernels make small copies, up to kernel_rows rows, and wait for values, where there is
    Triton, rather than copy engines and the stream's own operation.
    """

    def __init__(self, device: torch.device | str, uses_kernels: bool = True, kernel_rows: int = _KERNEL_ROWS) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise KernelError(f"{self.device} is no CUDA device")
        self._library, self._kernel_rows = _load_driver(), kernel_rows
        self._uses_kernels = uses_kernels and runtime.available() is None and not runtime.is_interpreted()
        torch.cuda.synchronize(self.device)  # makes the device's context current in this thread
        self._counter: Tensor | None = None  # of kernels that write values: there once memory operations are known

    @property
    def waits_by_kernel(self) -> bool:
        """Whether wait_value is a kernel that sees a value at once, rather than an operation of the stream's."""
        return self._uses_kernels

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(result, ctypes.byref(text))
        words = text.value.decode() if text.value else "unknown error"
        raise KernelError(f"{name} failed on {self.device} with error {result}: {words}")

    def _call_on_stream(self, name: str, *arguments: object) -> None:
        with torch.cuda.device(self.device):
            self._call(name, int(torch.cuda.current_stream(self.device).cuda_stream), *arguments)

    @override
    def is_capturing(self) -> bool:
        with torch.cuda.device(self.device):
            return bool(torch.cuda.is_current_stream_capturing())

    @override
    def launch_host_func(self, function: int, argument: int) -> None:
        self._call_on_stream("cuLaunchHostFunc", function, argument)

    @override
    def write_value(self, address: int, value: int) -> None:
        self._call_on_stream("cuStreamWriteValue32_v2", address, value, 0)

    @override
    def wait_value(self, address: int, value: int) -> None:
        if self._uses_kernels:
            with torch.cuda.device(self.device):
                wait_for_word(address, value)
            return
        self._call_on_stream("cuStreamWaitValue32_v2", address, value, _WAIT_EQUAL)

    @override
    def memory_operations(self) -> str | None:
        ordinal, answer = ctypes.c_int(), ctypes.c_int()
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        self._call("cuDeviceGet", ctypes.byref(ordinal), index)
        self._call("cuDeviceGetAttribute", ctypes.byref(answer), _ATTRIBUTE_64_BIT_MEMORY_OPERATIONS, ordinal)
        if not answer.value:
            return "the device has no stream memory operations"
        try:
            return self._try_memory_operations()
        except RuntimeError as error:
            return f"stream memory operations failed: {error}"

    def _try_memory_operations(self) -> str | None:
        """Writes and waits once as they are and once in a graph. Waits only for what was written before."""
        word = self.pinned((1,), torch.int32)
        address = self.device_address(word)

        def write(value: int) -> None:
            self.write_value(address, value)
            self.wait_value(address, value)

        with torch.inference_mode(False):
            self._counter = torch.zeros(1, dtype=torch.int32, device=self.device)
        make_stream: Any = torch.cuda.Stream  # has no types
        stream = make_stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            write(1)
            stream.synchronize()
            if word.item() != 1:
                return "stream memory operations do not reach pinned memory"
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                write(2)
            graph.replay()
            torch.cuda.synchronize(self.device)
        return None if word.item() == 2 else "stream memory operations have no effect in a CUDA graph"

    @override
    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    @override
    def device_address(self, tensor: Tensor) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), tensor.data_ptr(), 0)
        return int(address.value)

    @override
    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        rows = sources[0].shape[0]
        if self._uses_kernels and rows <= self._kernel_rows:
            with torch.cuda.device(self.device):
                convert_rows(targets, sources)
            return
        for target, source in zip(targets, sources, strict=True):
            if source.dtype != target.dtype and source.device.type == "cuda":
                source = source.to(target.dtype)
            target.copy_(source, non_blocking=True)

    @override
    def copy_and_signal(self, targets: Sequence[Tensor], sources: Sequence[Tensor], address: int, value: int) -> None:
        is_small = self._uses_kernels and 0 < sources[0].shape[0] <= self._kernel_rows
        counter = self._counter if is_small else None
        if counter is None:
            super().copy_and_signal(targets, sources, address, value)
            return
        with torch.cuda.device(self.device):
            convert_rows(targets, sources, CopySignal(counter, address, value))

    @override
    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def pin(self, address: int, nbytes: int) -> None:
        """Lock memory that is allocated already, so that copies from it run at full speed beside everything else."""
        with torch.cuda.device(self.device):
            self._call("cuMemHostRegister_v2", address, nbytes, _FOR_ALL_CONTEXTS)

    def unpin(self, address: int) -> None:
        """Unlock memory that `pin` locked. No copy may be under way."""
        with torch.cuda.device(self.device):
            self._call("cuMemHostUnregister", address)

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from pinned memory on a stream, given by its handle."""
        self._call("cuMemcpyHtoDAsync_v2", target, source, nbytes, stream)

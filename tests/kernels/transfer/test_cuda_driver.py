"""The driver's library where it is missing, too old, or fails: messages that say what to do. Needs no device."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from ktransformers.errors import KernelError
from ktransformers.kernels.transfer import cuda
from ktransformers.kernels.transfer.cuda import CudaDriver

NAMES = (
    "cuLaunchHostFunc",
    "cuStreamWriteValue32_v2",
    "cuStreamWaitValue32_v2",
    "cuMemHostGetDevicePointer_v2",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuGetErrorString",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyHtoDAsync_v2",
)


class Function:
    """Checks its arguments as ctypes does, and gives `result`."""

    def __init__(self, result=0, text=b""):
        self.result, self.text, self.argtypes, self.calls = result, text, (), []

    def __call__(self, *arguments):
        for kind, argument in zip(self.argtypes, arguments, strict=True):
            kind.from_param(argument)
        self.calls.append(arguments)
        if self.text:
            arguments[1]._obj.value = self.text
        return self.result


def use_library(monkeypatch, library):
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def test_without_a_driver(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(KernelError, match=r"libcuda.so.1 cannot be loaded .*install NVIDIA's driver"):
        CudaDriver("cuda")
    with pytest.raises(KernelError, match="cpu is no CUDA device"):
        CudaDriver("cpu")


def test_an_old_driver(monkeypatch):
    use_library(monkeypatch, SimpleNamespace(cuLaunchHostFunc=Function()))
    with pytest.raises(KernelError, match="no cuStreamWriteValue32_v2: a driver for CUDA 12"):
        CudaDriver("cuda")


def test_failing_calls_and_missing_operations(monkeypatch):
    library = SimpleNamespace(**{name: Function() for name in NAMES})
    use_library(monkeypatch, library)
    driver = CudaDriver("cuda:0")
    assert driver.memory_operations() == "the device has no stream memory operations"  # the attribute stays 0
    assert library.cuDeviceGetAttribute.calls[0][1] == 122
    library.cuMemHostGetDevicePointer_v2.result = 1
    library.cuGetErrorString.text = b"invalid argument"
    with pytest.raises(KernelError, match="cuMemHostGetDevicePointer_v2 failed on cuda:0 with error 1: invalid arg"):
        driver.device_address(torch.zeros(1))

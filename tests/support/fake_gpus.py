"""GPUs for machines without one: "cuda:N" is torch's CPU, and Triton kernels run in Triton's interpreter.

tests/conftest.py chooses the interpreter. With a GPU there is none, and "cuda:N" is the GPU, whatever N.
"""

from __future__ import annotations

import torch

from ktransformers.engine.builder import Hardware
from ktransformers.operators.device import Device, Devices
from ktransformers.optimize.machine import Machine

GIB = 1 << 30


def fake_hardware(num_gpus: int = 1, dtype: torch.dtype = torch.float32, gpu_bytes: int = 4 * GIB) -> Hardware:
    """A machine with GPUs that compute in `dtype`."""
    names = [f"cuda:{i}" for i in range(num_gpus)]
    machine = Machine(8 * GIB, 4 * GIB, {"cpu": 4 * GIB, **dict.fromkeys(names, gpu_bytes)})
    where = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return Hardware(machine, Devices(lambda name: Device(name, where, dtype, is_gpu=True)))

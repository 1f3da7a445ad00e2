"""GPUs for machines without one: "cuda:N" is torch's CPU, and Triton kernels run in Triton's interpreter.

Import this before Triton is imported anywhere: the interpreter is chosen then. On a machine with a GPU the same tests
run on it, in bf16.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from ktransformers.engine.builder import Hardware
from ktransformers.operators.device import Device, Devices
from ktransformers.optimize.machine import Machine

GIB = 1 << 30


def fake_hardware(num_gpus: int = 1, dtype: torch.dtype = torch.float32, gpu_bytes: int = 4 * GIB) -> Hardware:
    """A machine with GPUs that compute in `dtype`."""
    names = [f"cuda:{i}" for i in range(num_gpus)]
    machine = Machine(8 * GIB, 4 * GIB, {"cpu": 4 * GIB, **dict.fromkeys(names, gpu_bytes)})
    return Hardware(machine, Devices(lambda name: Device(name, torch.device("cpu"), dtype, is_gpu=True)))

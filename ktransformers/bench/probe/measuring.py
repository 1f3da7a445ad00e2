"""The measurement of a machine: read from its file, or made now and kept there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from ktransformers.bench.probe.cpu import FULL, ProbeSizes, probe_cpu
from ktransformers.errors import KTransformersError
from ktransformers.optimize.machine_speed import GpuSpeed, MachineSpeed, SpeedFile
from ktransformers.system.cores import usable_cores

__all__ = ["known_or_measured", "measure_machine"]

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


def measure_machine(say: Say = lambda text: None, sizes: ProbeSizes = FULL) -> MachineSpeed:
    """Measure the CPU and all GPUs of this machine, in some seconds.

    A GPU that cannot be measured is missing, with one logged line.
    """
    began, at = time.perf_counter(), time.time()
    cpu = probe_cpu(sizes=sizes, say=say)
    gpus = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = _gpu(f"cuda:{index}", say)
        if found is not None:
            gpus[f"cuda:{index}"] = found
    return MachineSpeed(at, time.perf_counter() - began, cpu, gpus)


def _gpu(name: str, say: Say) -> GpuSpeed | None:
    from ktransformers.bench.probe.gpu import probe_gpu  # Triton is heavy, and not everywhere
    from ktransformers.kernels.triton.common.compiling import loading

    try:
        with loading():  # kernels are compiled on the way, which nobody waits for
            return probe_gpu(name, usable_cores(), say)
    except (KTransformersError, RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        logger.warning("%s cannot be measured, so nothing that runs there is predicted: %s", name, first)
        return None


def known_or_measured(file: SpeedFile, *, is_anew: bool = False, say: Say = lambda text: None) -> MachineSpeed:
    """Return the measurement that the file holds, unless `is_anew`; else measure, and keep it there."""
    known = None if is_anew else file.read()
    if known is None:
        known = measure_machine(say)
        file.write(known)
    return known

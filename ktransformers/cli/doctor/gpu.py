"""The checks of doctor about GPUs and about what runs on them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import partial

from ktransformers.cli.doctor.findings import Check, Finding, ok, problem, warning

__all__ = ["flashinfer", "gpu", "gpu_checks", "judge_gpu", "triton"]

GIB = 1 << 30
_LEAST_CAPABILITY = (8, 0)


def names() -> list[str]:
    """Return the names of all CUDA devices, such as "cuda:0"; none where torch is missing."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError):
        return []
    return [f"cuda:{index}" for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]


def gpu_checks() -> list[Check]:
    """Return the checks of GPUs in the order of the report."""
    found = names()
    if not found:
        return [Check("gpu", lambda: [ok("gpu", "none that torch sees: everything runs on the CPU")])]
    return [
        *(Check(name, partial(gpu, name)) for name in found),
        *(Check(f"{name} streams", partial(streams, name)) for name in found),
        Check("triton", triton),
        Check("flashinfer", partial(flashinfer, found)),
    ]


def gpu(name: str) -> Iterable[Finding]:
    """Report a GPU's compute capability and memory."""
    import torch

    device = torch.device(name)
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    shown = torch.cuda.get_device_name(device)
    return [judge_gpu(name, shown, torch.cuda.get_device_capability(device), free + own, total)]


def judge_gpu(name: str, shown: str, capability: tuple[int, int], free: int, total: int) -> Finding:
    """Judge a GPU by its compute capability and its memory. free, total: bytes."""
    numbers = ".".join(map(str, capability))
    text = f"{shown}, compute capability {numbers}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if capability < _LEAST_CAPABILITY:
        return warning(name, f"{text}; it is left alone, because it has no bf16 (8.0 has)",
                       "nothing to mend: the CPU does the work")  # fmt: skip
    if free < 0.9 * total:
        used = (total - free) / GIB
        return warning(name, f"{text}: {used:.1f} GiB are taken by others", "nvidia-smi shows by whom")
    return ok(name, text)


def streams(name: str) -> Iterable[Finding]:
    """Report how a GPU's stream starts the CPU's experts: by stream memory operations or host functions."""
    from ktransformers.kernels.transfer.cuda import CudaDriver

    reason = CudaDriver(name).memory_operations()
    how = "stream memory operations" if reason is None else f"host functions ({reason})"
    return [ok(f"{name} streams", how)]


def triton() -> Iterable[Finding]:
    """Check that Triton is installed: every kernel on a GPU is compiled by it."""
    from ktransformers.kernels.triton.common import runtime

    if runtime.triton is None:
        return [problem("triton", "is not installed: no GPU can be used", "pip install triton")]
    if runtime.is_interpreted():
        return [warning("triton", f"{runtime.triton.__version__}, interpreted on the CPU", "unset TRITON_INTERPRET")]
    return [ok("triton", f"{runtime.triton.__version__}, kernels of modules on cuda")]


def flashinfer(found: list[str]) -> Iterable[Finding]:
    """Report whether FlashInfer, an optional backend for attention of prefill steps, can run on the GPUs `found`."""
    import torch

    from ktransformers.kernels import flashinfer as wrapped

    reasons = [wrapped.why_not(torch.device(name)) for name in found]
    against = "; ".join(dict.fromkeys(reason for reason in reasons if reason is not None))
    text = f"not used: {against}" if against else f"{wrapped.version()}, attention of prefill steps, if it proves right"
    return [ok("flashinfer", text)]

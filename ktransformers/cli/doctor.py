"""`ktransformers doctor`: what this machine and this installation have. Exits with 0: it reports, it does not judge."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ktransformers.cli.options import version
from ktransformers.config import DEMO_MODEL_PATH, physical_cores

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what this machine and this installation have",
        description="Show versions, the native extension, instruction sets, cores, memory, GPUs and what runs on them.",
    )
    parser.set_defaults(run=run)


def _module_version(name: str) -> str:
    try:
        return str(getattr(importlib.import_module(name), "__version__", "present"))
    except ImportError as error:
        return f"missing ({error})"


def _native() -> str:
    try:
        from ktransformers.kernels import native
    except ImportError as error:
        return f"missing ({error}); build it with `pip install .`"
    tiers = ", ".join(isa.name.lower() for isa in native.available_isas())
    active = native.active_isa()
    bf16 = "can" if native.has_bf16(active) else "cannot"
    return (
        f"present; instruction sets: {tiers}; active: {active.name.lower()}, which {bf16} multiply bf16 (--cpu_prefill)"
    )


def _memory() -> str:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return "unknown (no /proc/meminfo)"
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    return f"{kib['MemTotal'] / 2**20:.1f} GiB, {kib['MemAvailable'] / 2**20:.1f} GiB available"


def _cuda() -> str:
    try:
        import torch
    except ImportError:
        return "unknown (torch is missing)"
    return str(torch.cuda.device_count()) if torch.cuda.is_available() else "none"


def _triton() -> str:
    from ktransformers.kernels.triton import runtime

    reason = runtime.available()
    if reason is not None:
        return f"not used: {reason}"
    where = "interpreted on the CPU" if runtime.is_interpreted() else "kernels of modules on cuda"
    return f"{runtime.triton.__version__}; {where}"


def _flashinfer() -> str:
    import torch

    from ktransformers.kernels import flashinfer

    reasons = [flashinfer.why_not(torch.device(name)) for name in _gpus() or ["cpu"]]
    against = "; ".join(dict.fromkeys(reason for reason in reasons if reason is not None))
    return (
        f"not used: {against}" if against else f"{flashinfer.version()}; attention of prefill steps, if it proves right"
    )


def _gpus() -> list[str]:
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]


def _gpu(name: str) -> str:
    import torch

    device = torch.device(name)
    free, total = torch.cuda.mem_get_info(device)
    capability = ".".join(str(part) for part in torch.cuda.get_device_capability(device))
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return f"{torch.cuda.get_device_name(device)}, compute capability {capability}, {memory}"


def _stream_memory(name: str) -> str:
    """How a GPU hands experts over to the CPU."""
    from ktransformers.kernels.cuda import CudaDriver

    reason = CudaDriver(name).memory_operations()
    return f"host functions ({reason})" if reason is not None else "stream memory operations"


def _demo_model() -> str:
    found = sorted(DEMO_MODEL_PATH.glob("*.gguf"))
    return str(found[0]) if found else f"missing (no *.gguf in {DEMO_MODEL_PATH})"


def _checked(check: Callable[[], str]) -> str:
    """A check's answer; its failure is an answer too, since this command is for machines on which things fail."""
    from ktransformers.errors import KTransformersError

    try:
        return check()
    except (KTransformersError, ImportError, OSError, RuntimeError, ValueError, AttributeError, LookupError) as error:
        return f"failed: {error}"


def _gpu_checks() -> list[tuple[str, Callable[[], str]]]:
    """Two lines for each CUDA device."""
    try:
        names = _gpus()
    except ImportError:
        return []
    checks: list[tuple[str, Callable[[], str]]] = []
    for name in names:
        checks.append((name, partial(_gpu, name)))
        checks.append((f"{name} streams", partial(_stream_memory, name)))
    return checks


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("ktransformers", version),
        ("python", platform.python_version),
        ("system", platform.platform),
        ("torch", lambda: _module_version("torch")),
        ("transformers", lambda: _module_version("transformers")),
        ("native extension", _native),
        ("cores", lambda: f"{physical_cores()} physical, {os.cpu_count()} logical"),
        ("memory", _memory),
        ("triton", _triton),
        ("flashinfer", _flashinfer),
        ("cuda devices", _cuda),
        *_gpu_checks(),
        ("demo model", _demo_model),
    ]
    for name, check in checks:
        print(f"{name + ':':<18}{_checked(check)}")
    return 0

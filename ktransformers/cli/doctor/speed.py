"""The findings of doctor about measured speed at best: memory, registers, experts, GPUs. Measures nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from ktransformers.cli.doctor.findings import Finding, ok, warning
from ktransformers.optimize.machine_speed import CpuSpeed, GpuSpeed, MachineSpeed

__all__ = ["speed_findings"]

_UNEVEN = 0.7  # of the fastest node: less, and modules are missing
_CROWDED = 0.6  # of so many times one core: less, and cores are shared with others
_SLOW_PCIE = 10e9  # bytes a second: less than 16 lanes of PCIe 3


def speed_findings(speed: MachineSpeed, path: Path | None = None) -> Iterator[Finding]:
    """Yield the measured speed of the machine in the order of the report. path: where the measurement is kept."""
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(speed.measured_at))
    kept = "" if path is None else f", kept in {path}"
    yield ok("measured", f"on {at}, in {speed.took:.0f} s{kept}; --measure does it again")
    yield _reading(speed.cpu)
    yield from _nodes(speed.cpu)
    yield _registers(speed.cpu)
    yield _experts(speed.cpu)
    for name, gpu in speed.gpus.items():
        yield from _gpu(name, gpu)


def _reading(cpu: CpuSpeed) -> Finding:
    rates = ", ".join(f"{rate / 1e9:.1f} by {count}" for count, rate in cpu.read.items())
    text = f"GB/s read: {rates} thread{'s' if cpu.threads > 1 else ''}"
    best = max(cpu.read, key=lambda count: cpu.read[count])
    if cpu.read[cpu.threads] < 0.8 * cpu.read[best]:
        return warning("read bandwidth", f"{text}; {best} are faster than all",
                       f"--cpu_infer {best}, or look for other programs (top) and measure again")  # fmt: skip
    return ok("read bandwidth", text)


def _nodes(cpu: CpuSpeed) -> Iterator[Finding]:
    if not cpu.node_read:
        return
    text = "GB/s read by each node alone: " + ", ".join(f"{rate / 1e9:.1f}" for rate in cpu.node_read.values())
    slowest = min(cpu.node_read, key=lambda node: cpu.node_read[node])
    if cpu.node_read[slowest] < _UNEVEN * max(cpu.node_read.values()):
        yield warning("node bandwidth", f"{text}; node {slowest} has fewer modules, or others use it",
                      "sudo dmidecode -t memory shows which slots are empty; numastat -m who uses it")  # fmt: skip
    else:
        yield ok("node bandwidth", text)


def _registers(cpu: CpuSpeed) -> Finding:
    shown = [
        f"{name} {peak.all / 1e12:.2f} (a core {peak.one / 1e12:.3f})"
        for name, peak in cpu.peaks.items()
        if peak.all > 0
    ]
    text = f"{cpu.isa}, in registers, 10^12 operations/s: {', '.join(shown)}"
    crowded = [name for name, peak in cpu.peaks.items() if peak.all < _CROWDED * cpu.threads * peak.one]
    if crowded:
        return warning("arithmetic", f"{text}; together cores do less than {_CROWDED:.0%} of what one does alone",
                       "look for other programs (top), power limits and heat (turbostat)")  # fmt: skip
    return ok("arithmetic", text)


def _experts(cpu: CpuSpeed) -> Finding:
    shown = ", ".join(f"{name} {1e-9 / curve.of(1.0):.1f}" for name, curve in cpu.experts.items())
    return ok("experts", f"GB/s of weights that one token's experts read: {shown}")


def _gpu(name: str, gpu: GpuSpeed) -> Iterator[Finding]:
    yield ok(f"{name} speed", f"memory {gpu.read / 1e9:,.0f} GB/s, products {gpu.matmul / 1e12:.0f} TFLOP/s of bf16, a "
             f"launch {1e6 * gpu.launch:.1f} us, handing over to the CPU {1e6 * gpu.hand_over:.0f} us")  # fmt: skip
    text = f"{gpu.to_gpu / 1e9:.1f} GB/s to it, {gpu.from_gpu / 1e9:.1f} GB/s from it, pinned"
    if min(gpu.to_gpu, gpu.from_gpu) < _SLOW_PCIE:
        yield warning(f"{name} pcie", text,
                      "nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current,pcie.link.width.max "
                      "--format=csv under load; a slot with 16 lanes of the processor is faster")  # fmt: skip
    else:
        yield ok(f"{name} pcie", text)

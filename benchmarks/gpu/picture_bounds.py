"""The least time that a machine needs for the first token behind a picture: operations over peaks, bytes over rates."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Self

import torch

from ktransformers.bench.common.machine import machine_facts
from ktransformers.bench.common.report import Record
from ktransformers.bench.gpu.device import Gpu
from ktransformers.bench.loading.files import FileShape
from ktransformers.bench.probe.gpu import probe_pcie
from ktransformers.config import EngineConfig
from ktransformers.kernels.cpu import WorkerPool, limits
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.plan import Plan
from ktransformers.system.cores import usable_cores

__all__ = ["Hardware", "PictureBounds", "expert_nbytes", "text_flop"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a machine does at best. Operations a second: of fp32 and int8 on the CPU, of bf16 on the GPU, which is a
    large product's; bytes a second: read from RAM and from the GPU's memory, and copied to the GPU. 0: no GPU.
    """

    machine: Record
    cpu_fp32: float
    cpu_int8: float
    ram: float
    gpu_bf16: float = 0.0
    vram: float = 0.0
    pcie: float = 0.0

    @classmethod
    def measured(cls, config: EngineConfig) -> Self:
        """Measure it, the GPU unless the config leaves it out."""
        with closing(WorkerPool(config.cpu_infer or usable_cores())) as pool:
            machine = machine_facts(pool)
            cpu = limits.fp32_peak(pool), machine["int8_peak_top_s"] * 1e12, machine["read_bandwidth_gb_s"] * 1e9
        if config.use_cuda is False or not torch.cuda.is_available():
            return cls(machine, *cpu)
        facts, (pcie, _) = Gpu().facts(), probe_pcie("cuda:0")
        torch.cuda.empty_cache()
        rates = {"matmul_tflop_s": facts["matmul_tflop_s"], "copy_gb_s": facts["copy_gb_s"], "pcie_gb_s": pcie / 1e9}
        return cls(machine | rates, *cpu, facts["matmul_tflop_s"] * 1e12, facts["copy_gb_s"] * 1e9, pcie)


def text_flop(shape: FileShape, num_tokens: int) -> tuple[float, float]:
    """Return the floating-point operations of routed experts, and of all else, for a prompt of so many tokens: those of
    products of matrices in layers. Attention is causal."""
    queries, keys, top_k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, min(8, shape.experts)
    experts = 2.0 * num_tokens * shape.layers * top_k * 3 * shape.hidden * shape.width
    projections = 2 * shape.hidden * (queries + keys) + shape.hidden * shape.experts
    attention = queries * (num_tokens + 1)
    return experts, 2.0 * num_tokens * shape.layers * (projections + attention)


def expert_nbytes(plan: Plan) -> dict[str, int]:
    """Return the bytes of routed experts that a plan has in "ram" and in "vram"."""
    entries = (one for one in plan.entries if isinstance(plan.operators.get(one.key), KTransformersExperts))
    found = [entry.nbytes for entry in entries]
    in_ram = sum(nbytes.get("cpu", 0) for nbytes in found)
    return {"ram": in_ram, "vram": sum(sum(nbytes.values()) for nbytes in found) - in_ram}


@dataclass(frozen=True, slots=True)
class PictureBounds:
    """Seconds at least. tower, dense: operations at the peak. vram_experts: those in the GPU's memory, operations or
    bytes, whichever take longer. ram_experts: those in RAM, some on the CPU while others are copied to the GPU.
    tower_flop, text_flop: operations. nbytes: of experts, all of which a long prompt touches.
    """

    tower: float
    dense: float
    vram_experts: float
    ram_experts: float
    tower_flop: float
    text_flop: float
    nbytes: dict[str, int]

    @classmethod
    def of(
        cls, hardware: Hardware, nbytes: Mapping[str, int], text: tuple[float, float], tower: float, *, on_gpu: bool
    ) -> PictureBounds:
        """Return the bounds of work on a machine. nbytes: see expert_nbytes. text: see text_flop; tower: its
        operations. on_gpu: whether it runs there."""
        experts, dense = text
        in_ram, in_vram = nbytes["ram"], nbytes["vram"]
        share = in_ram / (in_ram + in_vram)
        vram = max(experts * (1 - share) / hardware.gpu_bf16, in_vram / hardware.vram) if in_vram else 0.0
        cpu = max(experts * share / hardware.cpu_int8, in_ram / hardware.ram)
        copied = max(experts * share / hardware.gpu_bf16, in_ram / hardware.pcie) if hardware.pcie else 0.0
        ram = cpu * copied / (cpu + copied) if copied and cpu else cpu
        return cls(
            tower=tower / (hardware.gpu_bf16 if on_gpu else hardware.cpu_fp32),
            dense=dense / (hardware.gpu_bf16 or hardware.cpu_int8),
            vram_experts=vram,
            ram_experts=ram,
            tower_flop=tower,
            text_flop=experts + dense,
            nbytes=dict(nbytes),
        )

    @property
    def milliseconds(self) -> dict[str, float]:
        """By the names of a table's columns."""
        text = self.dense + self.vram_experts + self.ram_experts
        return {
            "tower_ms": 1e3 * self.tower,
            "text_ms": 1e3 * text,
            "first_token_ms": 1e3 * (self.tower + text),
        }

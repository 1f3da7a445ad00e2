"""How near the CPU kernels come to the numbers of the weights: one expert, against double precision.

The reference is the dequantized weights times the fp32 rows, all in fp64. Weights and rows are random, of zero mean.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ktransformers.kernels import reference
from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.types import ActivationSpec, ExpertWeight, ExpertWeights, Fp8Matrix, PackedTensor, RawTensor
from ktransformers.operators.linear.packed import pack_experts

__all__ = ["relative_errors", "with_wish"]

_TOKENS = 64  # enough for products of bf16


def with_wish(weights: ExpertWeights, wants_bf16: bool) -> ExpertWeights:
    """The same repacked weights, with another PackedTensor.wants_bf16."""

    def changed(part: ExpertWeight) -> ExpertWeight:
        return replace(part, wants_bf16=wants_bf16) if isinstance(part, PackedTensor) else part

    gate, up, down = ([changed(part) for part in parts or ()] for parts in (weights.gate, weights.up, weights.down))
    return ExpertWeights(gate or None, up, down)


def relative_errors(gate: ExpertWeight, up: ExpertWeight, down: ExpertWeight, pool: WorkerPool) -> dict[str, float]:
    """|got - want| / |want| of an expert's outputs, by cpu_prefill. gate, up [I, H], down [H, I]: not repacked."""
    rows = torch.randn(_TOKENS, up.shape[1], generator=torch.Generator().manual_seed(0))
    wide = []
    for part in (gate, up, down):
        assert isinstance(part, (RawTensor, Fp8Matrix)), "repacked weights cannot be dequantized"
        wide.append(reference.dequantize(part).double())
    want = (torch.nn.functional.silu(rows.double() @ wide[0].T) * (rows.double() @ wide[1].T)) @ wide[2].T
    weights = pack_experts(ExpertWeights([gate], [up], [down]), pool)
    ids, ones = torch.zeros(_TOKENS, 1, dtype=torch.int64), torch.ones(_TOKENS, 1)
    errors = {}
    for name in ("int8", "bf16"):
        got = MoeKernel(with_wish(weights, name == "bf16"), ActivationSpec(), pool).forward(rows, ids, ones)
        errors[name] = float((got.double() - want).norm() / want.norm())
    return errors

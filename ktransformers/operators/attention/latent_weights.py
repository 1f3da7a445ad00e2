"""The up-projections of latent attention as they are absorbed: one matrix for keys and one for values of each head."""

from __future__ import annotations

import torch

from ktransformers.kernels import cpu
from ktransformers.kernels.types import GroupType, QuantType, RawTensor
from ktransformers.operators.attention.latent_spec import LatentSpec

__all__ = ["TWO_BYTE", "split_up_projections"]

TWO_BYTE = frozenset({QuantType.F16, QuantType.BF16})
"""Types whose matrices can be transposed as they are."""


def split_up_projections(merged: RawTensor, spec: LatentSpec, pool: cpu.WorkerPool) -> tuple[RawTensor, RawTensor]:
    """Split kv_b [H * (N + V), R] into k_b [H, R, N] and v_b [H, V, R]."""
    heads, nope, v_dim, rank = spec.num_heads, spec.nope_dim, spec.v_dim, spec.rank
    if isinstance(merged.qtype, GroupType):  # which kernels read fast when packed only
        merged = RawTensor.from_tensor(cpu.dequantize_rows(merged, torch.arange(merged.rows), pool))
    rows = merged.data.view(heads, nope + v_dim, merged.row_bytes)
    v_b = RawTensor(rows[:, nope:].contiguous().view(-1), merged.qtype, (heads, v_dim, rank))
    if merged.qtype in TWO_BYTE:
        k_bytes, k_type = rows[:, :nope].contiguous().view(torch.int16), merged.qtype
    else:
        ids = torch.arange(merged.rows).view(heads, -1)[:, :nope].reshape(-1)
        k_bytes, k_type = cpu.dequantize_rows(merged, ids, pool).view(heads, nope, rank), QuantType.F32
    transposed = k_bytes.view(heads, nope, rank).transpose(1, 2).contiguous()
    return RawTensor(transposed.view(torch.uint8).view(-1), k_type, (heads, rank, nope)), v_b

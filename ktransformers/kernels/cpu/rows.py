"""Kernels that go row by row or element by element: embedding lookups, norms, activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ktransformers.kernels.cpu.base import WorkerPool, check_tensor, check_weight, output
from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import ActivationSpec, RawTensor
from ktransformers.kernels.untraced import untraced

__all__ = ["activate", "dequantize_rows", "gather_rows", "rms_norm"]


@untraced
def dequantize_rows(weight: RawTensor, ids: Tensor, pool: WorkerPool, out: Tensor | None = None) -> Tensor:
    """Return rows `ids` of a weight as fp32, equal bit for bit to `gguf.quants.dequantize`: an embedding lookup.

    weight: [N, K]. ids: int64 [T]. out: [T, K], made when None. Raises IndexError for an id outside 0 .. N - 1.
    """
    check_weight("weight", weight, 2)
    rows, cols = weight.shape
    check_tensor("ids", ids, (None,), torch.int64)
    result = output(out, (ids.shape[0], cols))
    extension.dequantize_rows(
        pool.handle,
        weight.data.data_ptr(),
        int(weight.qtype),
        rows,
        cols,
        ids.data_ptr(),
        ids.shape[0],
        result.data_ptr(),
    )
    return result


@untraced
def gather_rows(parts: Sequence[RawTensor], ids: Tensor, pool: WorkerPool, out: Tensor | None = None) -> Tensor:
    """Return rows `ids` as `dequantize_rows` does, of a table in parts that lie anywhere and are mostly on a disk: all
    pages that are asked for are read at once.

    parts: [N, K] each, of one type and width; rows are counted over them all. ids: int64 [T]. out: [T, K], made when
    None. Raises IndexError for an id outside of them, ValueError for parts that differ.
    """
    for part in parts:
        check_weight("parts", part, 2)
    kinds = {(part.qtype, part.cols) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"the parts of a table have one type and width, got {len(kinds)}")
    ((qtype, cols),) = kinds
    check_tensor("ids", ids, (None,), torch.int64)
    result = output(out, (ids.shape[0], cols))
    places = [(part.data.data_ptr(), part.rows) for part in parts]
    extension.gather_rows(pool.handle, places, int(qtype), cols, ids.data_ptr(), ids.shape[0], result.data_ptr())
    return result


@untraced
def rms_norm(x: Tensor, weight: Tensor, eps: float, pool: WorkerPool, out: Tensor | None = None) -> Tensor:
    """Compute out = weight * (x / sqrt(mean(x^2) + eps)), row by row.

    x: [T, H]. weight: [H]. out: [T, H], made when None; may be x itself.
    """
    check_tensor("x", x, (None, None))
    check_tensor("weight", weight, (x.shape[1],))
    result = output(out, (x.shape[0], x.shape[1]))
    extension.rms_norm(
        pool.handle, x.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], float(eps), result.data_ptr()
    )
    return result


@untraced
def activate(
    spec: ActivationSpec, gate: Tensor | None, up: Tensor, pool: WorkerPool, out: Tensor | None = None
) -> Tensor:
    """Compute act(gate) * up, or act(up) when gate is None; elementwise.

    gate, up, out: one shape, any number of dimensions; out is made when None and may be gate or up.
    """
    shape = tuple(up.shape)
    check_tensor("up", up, shape)
    if gate is not None:
        check_tensor("gate", gate, shape)
    elif spec.kind.is_clamped:
        raise ValueError(f"{spec.kind.name} needs a gate")
    result = output(out, shape)
    extension.activate(
        pool.handle,
        int(spec.kind),
        spec.alpha,
        spec.limit,
        0 if gate is None else gate.data_ptr(),
        up.data_ptr(),
        up.numel(),
        result.data_ptr(),
    )
    return result

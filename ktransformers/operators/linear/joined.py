"""Linear layers that read the same rows, in one launch instead of one each: q, k and v; gate and up with activation.

Matrices of one type become one matrix, those of two types share a launch. The layers whose matrices were joined
still work, on the joined one. Dense matrices, quantized ones and those of FP8 are joined each with their like; what has
none (layers elsewhere, of three types) runs one by one. Knows linear operators and matrices on GPUs; not attention or
layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ktransformers.kernels.triton.common import elementwise
from ktransformers.kernels.triton.linear.linear import gated_linear, linear_pair
from ktransformers.kernels.triton.quant.repack import GpuLayout, can_join_rows, join_rows
from ktransformers.kernels.types import ActivationSpec, OwnType
from ktransformers.operators.device import use
from ktransformers.operators.linear.linear import KTransformersLinear
from ktransformers.operators.linear.matrix import DenseMatrix, GpuMatrix, QuantizedMatrix

__all__ = ["GatedLinears", "JoinedLinears", "side_by_side"]


@dataclass(frozen=True, slots=True)
class PairMatrix:
    """Two matrices of two types, side by side in one launch. bias: fp32 of both, or None."""

    first: QuantizedMatrix
    second: QuantizedMatrix
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """x [T, K] -> [T, N1 + N2]."""
        device, weights = self.first.device, (self.first.weight, self.second.weight)
        out = torch.empty(x.shape[0], sum(weight.rows for weight in weights), dtype=out_dtype, device=x.device)
        return linear_pair(x.to(device.matmul_dtype), weights, self.bias, out, workspace=device.linear_workspace())


@dataclass(frozen=True, slots=True)
class ColumnsOf:
    """Product of a single layer, as columns of a joined matrix's product. columns: its share of the joined result."""

    whole: GpuMatrix
    columns: slice

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return self.whole(x, out_dtype)[:, self.columns].contiguous()


def _quantized(modules: Sequence[nn.Module]) -> list[QuantizedMatrix] | None:
    """The matrices of linear operators on one GPU in the layout of its kernels; None if they are anything else."""
    found = [m.matrix for m in modules if isinstance(m, KTransformersLinear)]
    quantized = [m for m in found if isinstance(m, QuantizedMatrix) and m.weight.layout is GpuLayout.PLANES]
    if len(quantized) < len(modules) or len({(m.weight.cols, m.device.name) for m in quantized}) > 1:
        return None
    return quantized


def _dense(modules: Sequence[nn.Module]) -> list[DenseMatrix] | None:
    found = [m.matrix for m in modules if isinstance(m, KTransformersLinear)]
    dense = [m for m in found if isinstance(m, DenseMatrix)]
    if len(dense) < len(modules) or len({(m.weight.shape[1], m.weight.device, m.weight.dtype) for m in dense}) > 1:
        return None
    return dense


def _biases(parts: Sequence[tuple[torch.Tensor | None, int]], like: torch.Tensor) -> torch.Tensor | None:
    """All biases (each with its number of rows) as one, zeros for those that are missing; None when all are."""
    given = [bias for bias, _ in parts if bias is not None]
    if not given:
        return None
    dtype = given[0].dtype
    return torch.cat([like.new_zeros(n, dtype=dtype) if bias is None else bias for bias, n in parts])


def _joined(parts: Sequence[QuantizedMatrix], *, interleaved: bool = False) -> QuantizedMatrix:
    """Matrices of one type as one. The bias follows the rows."""
    if len(parts) == 1:
        return parts[0]
    weights = [part.weight for part in parts]
    first, rows = weights[0], sum(weight.rows for weight in weights)
    data = join_rows([(each.data, each.rows) for each in weights], first.qtype, first.cols, interleaved=interleaved)
    bias = _biases([(part.bias, part.weight.rows) for part in parts], data)
    if interleaved and bias is not None:
        bias = bias.view(len(parts), -1).T.reshape(-1)
    return replace(parts[0], weight=replace(first, data=data, rows=rows), bias=bias)


def _slices(counts: Sequence[int]) -> list[slice]:
    ends = torch.tensor(counts).cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _side_by_side(parts: list[QuantizedMatrix]) -> tuple[GpuMatrix, list[slice]] | None:
    """All in one launch, and the columns of each part; None for three types, or FP8 beside another."""
    weights = [part.weight for part in parts]
    types, counts = list(dict.fromkeys(weight.qtype for weight in weights)), [weight.rows for weight in weights]
    if len(types) > (1 if OwnType.F8_E4M3 in types else 2) or not can_join_rows(types[0], counts, weights[0].cols):
        return None
    order = sorted(range(len(parts)), key=lambda i: types.index(weights[i].qtype))
    columns = dict(zip(order, _slices([counts[i] for i in order]), strict=True))
    groups = [_joined([part for part in parts if part.weight.qtype == kind]) for kind in types]
    whole: GpuMatrix = groups[0]
    if len(groups) == 2:
        bias = _biases([(group.bias, group.weight.rows) for group in groups], groups[0].weight.data)
        whole = PairMatrix(groups[0], groups[1], bias)
    return whole, [columns[i] for i in range(len(parts))]


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers that have one product. members: which of the layers; columns: their shares of it."""

    members: tuple[int, ...]
    whole: GpuMatrix
    columns: list[slice]


def _kind(module: nn.Module) -> Hashable:
    """Equal for layers that may be joined; None where that is impossible."""
    matrix = module.matrix if isinstance(module, KTransformersLinear) else None
    if isinstance(matrix, DenseMatrix):
        return matrix.weight.shape[1], matrix.weight.device, matrix.weight.dtype
    if isinstance(matrix, QuantizedMatrix) and matrix.weight.layout is GpuLayout.PLANES:
        return matrix.weight.cols, matrix.device.name, matrix.weight.qtype is OwnType.F8_E4M3
    return None


def _join(modules: Sequence[nn.Module]) -> tuple[GpuMatrix, list[slice]] | None:
    """All layers of a kind as one product, and the columns of each; None where they cannot be."""
    quantized, dense = _quantized(modules), _dense(modules)
    if quantized is not None:
        return _side_by_side(quantized)
    if dense is None:
        return None
    bias = _biases([(m.bias, m.weight.shape[0]) for m in dense], dense[0].weight)
    return DenseMatrix(torch.cat([m.weight for m in dense]), bias), _slices([m.weight.shape[0] for m in dense])


class JoinedLinears:
    """Linear layers on the same rows: [T, K] in, a [T, N] for each layer out (columns of one result, or their own)."""

    def __init__(self, modules: Sequence[nn.Module]):
        self.modules = tuple(modules)
        self._groups: list[_Group] = []
        kinds = defaultdict[Hashable, list[int]](list)
        for i, module in enumerate(modules):
            kinds[_kind(module)].append(i)
        for kind, members in kinds.items():
            parts = [modules[i] for i in members]
            made = _join(parts) if kind is not None and len(parts) > 1 else None
            if made is not None:
                _replace_matrices(parts, *made)
                self._groups.append(_Group(tuple(members), *made))

    @property
    def num_products(self) -> int:
        """Number of products that a call computes."""
        return len(self.modules) - sum(len(group.members) - 1 for group in self._groups)

    def __call__(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """What each of the modules makes of rows [T, K]."""
        use(rows.device)
        found: dict[int, torch.Tensor] = {}
        for group in self._groups:
            result = group.whole(rows, rows.dtype)
            found |= {i: result[:, columns] for i, columns in zip(group.members, group.columns, strict=True)}
        return [found[i] if i in found else module(rows) for i, module in enumerate(self.modules)]


def side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors [T, N] as one [T, sum of N]: a view where they are neighbouring columns of one result, else a
    copy.
    """
    first, at = parts[0], parts[0].storage_offset()
    for part in parts:
        is_beside = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_beside or part.storage_offset() != at or part.stride() != first.stride():
            return torch.cat(list(parts), dim=-1)
        at += part.shape[1]
    return first.as_strided((first.shape[0], at - first.storage_offset()), first.stride())


def _replace_matrices(modules: Sequence[nn.Module], whole: GpuMatrix, columns: Sequence[slice]) -> None:
    for module, share in zip(modules, columns, strict=True):
        assert isinstance(module, KTransformersLinear)
        module.replace_matrix(ColumnsOf(whole, share))


class GatedLinears:
    """A gate and an up projection, act(gate(x)) * up(x): [T, K] in, [T, I] out, in one launch where both are quantized
    in one type.
    """

    def __init__(self, gate: nn.Module, up: nn.Module, spec: ActivationSpec):
        self.spec = spec
        self._gated: QuantizedMatrix | None = None
        self._joined: JoinedLinears | None = None
        quantized = _quantized([gate, up])
        # Blocks of FP8's scales have the rows of one side only.
        types = {each.weight.qtype for each in quantized or ()}
        if quantized is not None and len(types) == 1 and OwnType.F8_E4M3 not in types and not spec.kind.is_clamped:
            self._gated = _joined(quantized, interleaved=True)
            _replace_matrices([gate, up], self._gated, [slice(0, None, 2), slice(1, None, 2)])
        else:
            self._joined = JoinedLinears([gate, up])

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """act(gate(rows)) * up(rows) of rows [T, K]."""
        use(rows.device)
        if self._gated is None:
            assert self._joined is not None
            gate, up = self._joined(rows)
            return elementwise.activate(self.spec, gate, up)
        device, weight, bias = self._gated.device, self._gated.weight, self._gated.bias
        out = torch.empty(rows.shape[0], weight.rows // 2, dtype=rows.dtype, device=rows.device)
        x, space = rows.to(device.matmul_dtype), device.linear_workspace()
        return gated_linear(x, weight, self.spec.kind, bias, out, workspace=space)

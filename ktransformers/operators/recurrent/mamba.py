"""Mamba (arXiv 2312.00752) and Mamba-2 (arXiv 2405.21060): selective state spaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from ktransformers.errors import UnsupportedError
from ktransformers.kernels.recurrent_call import ScanCall
from ktransformers.kernels.triton.recurrent.launch import workspace_nbytes
from ktransformers.kernels.triton.recurrent.mixers import ssd_scan
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.context import StateStep
from ktransformers.operators.device import use
from ktransformers.operators.recurrent.base import RecurrentOperator

__all__ = ["KMamba", "KMamba2", "KMambaHeads"]

_MAMBA = frozenset({"act", "conv1d", "in_proj", "x_proj", "dt_proj", "out_proj"})
_MAMBA_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


def _check_silu(module: Any, key: str) -> None:
    if module.activation != "silu":
        raise UnsupportedError(f"{key}: a convolution followed by {module.activation!r}, not silu")


def _as_is(x: Tensor) -> Tensor:
    return x


class KMamba2(RecurrentOperator):
    """Mamba-2 of Nemotron-H, Granite 4, Falcon-H1 and others: a decay per head, keys and queries of groups of heads.

    Falcon-H1 scales rows and columns of the input projection (ssm_in_multiplier, mup_vector), and may have no norm.
    """

    OPS: ClassVar[dict[str, str]] = {"KMamba2": "selective state spaces by head, over slots of states"}
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"conv1d", "norm"})
    CHILDREN: ClassVar[tuple[frozenset[str], ...]] = (
        frozenset({"act", "conv1d", "in_proj", "norm", "out_proj"}),
        frozenset({"conv1d", "in_proj", "norm", "out_proj"}),
    )
    NUMBERS: ClassVar[tuple[str, ...]] = ("num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size")

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        inner: Any = module
        self.num_heads, self.head_dim, self.groups = int(inner.num_heads), int(inner.head_dim), int(inner.n_groups)
        self.state_size, self.width = int(inner.ssm_state_size), int(inner.intermediate_size)
        self.limit = tuple(float(bound) for bound in inner.time_step_limit)
        self.has_norm = not isinstance(inner.norm, nn.Identity)
        self.group_size = int(getattr(inner.norm, "group_size", self.width // int(getattr(inner.norm, "n_groups", 1))))
        self.is_gate_first = not getattr(inner.norm, "norm_before_gate", False)
        self.in_scale = float(getattr(inner, "ssm_in_multiplier", 1.0))
        _check_silu(inner, key)

    @override
    def state_parts(self) -> Mapping[str, tuple[int, ...]]:
        return {"conv": self.conv_shape(), "recurrent": (self.num_heads, self.state_size, self.head_dim)}

    @override
    def scan_nbytes(self, num_rows: int) -> int:
        steps = 2 * 4 * num_rows * self.num_heads  # dt and decay, fp32
        return workspace_nbytes(num_rows, self.num_heads, self.state_size, self.head_dim, is_delta=False) + steps

    @override
    def mix(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        inner: Any = self.inner
        count, keys = len(rows), self.groups * self.state_size
        sizes = [self.width, self.width + 2 * keys, self.num_heads]
        gate, mixed, dt = torch.split(self._project(rows), sizes, dim=-1)
        x, b, c = torch.split(self.convolve(mixed, states, step, "silu"), [self.width, keys, keys], dim=-1)
        x = x.view(count, self.num_heads, self.head_dim)
        b, c = (part.view(count, self.groups, self.state_size) for part in (b, c))
        if self.device.is_gpu:
            use(self.device.torch_device)
            weights, limits = (self.a, inner.dt_bias, inner.D), (self.limit[0], self.limit[1])
            out = ssd_scan(ScanCall(c, b, x, dt, None, states["recurrent"], step), weights, limits)
        else:
            dt = functional.softplus(dt.float() + inner.dt_bias).clamp(*self.limit)
            out = self.scans.linear_scan((c, b, x * dt.unsqueeze(-1)), dt * self.a, states["recurrent"], step)
            out = out + x * inner.D.unsqueeze(-1)
        result: Tensor = inner.out_proj(self._gated(out.reshape(count, -1), gate).to(rows.dtype))
        return result

    def _project(self, rows: Tensor) -> Tensor:
        """rows [T, H] -> gate, what is mixed, and time steps side by side [T, columns]."""
        inner: Any = self.inner
        columns: Tensor = inner.in_proj(rows if self.in_scale == 1.0 else rows * self.in_scale)
        scales: Tensor | None = getattr(inner, "mup_vector", None)
        return columns if scales is None else columns * scales.view(1, -1)

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """[T, width] twice -> the same, fp32."""
        if not self.has_norm:
            return out * functional.silu(gate.float())
        norm: Any = self.inner.norm
        form = (self.is_gate_first, "silu")
        eps = float(norm.variance_epsilon)
        return self.scans.gated_norm(out, gate, norm.weight, eps, group_size=self.group_size, form=form)


class KMamba(RecurrentOperator):
    """Mamba, and that of Jamba and Falcon-Mamba: a decay for each channel and element of its state. The latter two have
    norms on dt, B and C, Falcon-Mamba's without weights."""

    OPS: ClassVar[dict[str, str]] = {"KMamba": "selective state spaces by channel, over slots of states"}
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"conv1d"})
    CHILDREN: ClassVar[tuple[frozenset[str], ...]] = (_MAMBA, _MAMBA | set(_MAMBA_NORMS))
    NUMBERS: ClassVar[tuple[str, ...]] = ("intermediate_size", "ssm_state_size", "time_step_rank")

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        inner: Any = module
        self.width, self.state_size = int(inner.intermediate_size), int(inner.ssm_state_size)
        self.rank = int(inner.time_step_rank)
        _check_silu(inner, key)

    @override
    def state_parts(self) -> Mapping[str, tuple[int, ...]]:
        return {"conv": self.conv_shape(), "recurrent": (self.width, self.state_size)}

    @override
    def mix(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        inner: Any = self.inner
        mixed, gate = inner.in_proj(rows).chunk(2, dim=-1)
        x = self.convolve(mixed, states, step, "silu")
        sizes = [self.rank, self.state_size, self.state_size]
        parts = torch.split(inner.x_proj(x.to(rows.dtype)), sizes, dim=-1)
        dt, b, c = (norm(part.contiguous()) for norm, part in zip(map(self._norm, _MAMBA_NORMS), parts, strict=True))
        dt = functional.softplus(inner.dt_proj(dt).float())
        out = self.scans.selective_scan((x, dt, b.float(), c.float()), self.a, inner.D, states["recurrent"], step)
        result: Tensor = inner.out_proj((out * functional.silu(gate.float())).to(rows.dtype))
        return result

    def _norm(self, name: str) -> Callable[[Tensor], Tensor]:
        found: Callable[[Tensor], Tensor] | None = getattr(self.inner, name, None)
        return _as_is if found is None else found


class KMambaHeads(RecurrentOperator):
    """Mamba of Zamba: heads of channels, each with its own dt, B and C. x and the gate alternate in the projection."""

    OPS: ClassVar[dict[str, str]] = {"KMambaHeads": "selective state spaces by channel and head, over slots of states"}
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"conv1d"})
    CHILDREN: ClassVar[tuple[frozenset[str], ...]] = (frozenset({"act", "conv1d", "in_proj", "out_proj"}),)
    NUMBERS: ClassVar[tuple[str, ...]] = ("n_mamba_heads", "mamba_head_dim", "ssm_state_size", "time_step_rank")

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        inner: Any = module
        self.num_heads, self.head_dim = int(inner.n_mamba_heads), int(inner.mamba_head_dim)
        self.sizes = [int(inner.time_step_rank), int(inner.ssm_state_size), int(inner.ssm_state_size)]
        _check_silu(inner, key)

    @override
    def state_parts(self) -> Mapping[str, tuple[int, ...]]:
        heads = {f"recurrent.{head}": (self.head_dim, self.sizes[1]) for head in range(self.num_heads)}
        return {"conv": self.conv_shape(), **heads}

    @override
    def mix(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        inner: Any = self.inner
        mixed, gate = inner.in_proj(rows).unflatten(-1, (-1, 2)).unbind(-1)
        x = self.convolve(mixed.contiguous(), states, step, "silu")
        outs = []
        for head, part in enumerate(x.chunk(self.num_heads, dim=-1)):
            params = functional.linear(part.contiguous(), inner.x_proj_weight[head])
            dt, b, c = torch.split(params, self.sizes, dim=-1)
            dt = functional.linear(dt.contiguous(), inner.dt_proj_weight[head], inner.dt_proj_bias[head])
            given = part, functional.softplus(dt), b, c
            outs.append(
                self.scans.selective_scan(given, self.a[head], inner.D[head], states[f"recurrent.{head}"], step)
            )
        out = torch.cat(outs, dim=-1) * functional.silu(gate.float())
        result: Tensor = inner.out_proj(out.to(rows.dtype))
        return result

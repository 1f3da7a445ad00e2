"""Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692): the state is corrected by each row.

What the kinds differ in is how queries, keys, values and gates are projected; convolution, scan and norm are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from ktransformers.errors import UnsupportedError
from ktransformers.kernels.triton.recurrent.launch import workspace_nbytes
from ktransformers.kernels.triton.recurrent.mixers import DeltaNet, gated_delta_net, interleaved_columns
from ktransformers.operators.base import OperatorConfig, OperatorRuntime, Placement
from ktransformers.operators.context import StateStep
from ktransformers.operators.device import use
from ktransformers.operators.exact import exact_math
from ktransformers.operators.linear.joined import JoinedLinears, side_by_side
from ktransformers.operators.recurrent.base import RecurrentOperator

__all__ = ["DeltaRule", "KGatedDeltaNet", "KGatedDeltaParts", "KKimiDeltaAttention"]

_COMMON = frozenset({"conv1d", "norm", "out_proj"})
_KIMI = frozenset({"q_proj", "k_proj", "v_proj", "conv1d", "forget_gate", "b_proj", "o_norm", "o_proj"})
_FORGET = ({"f_a_proj", "f_b_proj"}, {"f_proj"})
_PARTS = frozenset({*(f"{part}_proj" for part in "qkvabgo"), "conv1d", "o_norm"})


def _gate_of(norm: Any, key: str) -> str:
    """The activation in an RMSNorm with a gate behind it."""
    activation = getattr(norm, "activation", None)
    if activation not in ("silu", "sigmoid"):
        raise UnsupportedError(f"{key} ({type(norm).__name__}): its gate is {activation!r}, not silu or sigmoid")
    return str(activation)


class DeltaRule(RecurrentOperator):
    """Base of the delta rules: a convolution over queries, keys and values side by side, the scan, a norm with a gate.

    NORM: name of that norm among the children. HAS_DECAY_PER_KEY: each element of a key has a decay, not each head.
    A subclass sets k_heads and v_heads (of keys and values), k_dim and v_dim (of one head), and `gate`, the norm's
    activation.
    """

    NEEDS_EXACT_MODE: ClassVar[bool] = False  # but for the gates: everything else is native
    NORM: ClassVar[str]
    HAS_DECAY_PER_KEY: ClassVar[bool] = False
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    gate: str

    @override
    def state_parts(self) -> Mapping[str, tuple[int, ...]]:
        return {"conv": self.conv_shape(), "recurrent": (self.v_heads, self.k_dim, self.v_dim)}

    @override
    def scan_nbytes(self, num_rows: int) -> int:
        gates = 4 * num_rows * self.v_heads * ((self.k_dim if self.HAS_DECAY_PER_KEY else 1) + 1)  # decay, beta: fp32
        return workspace_nbytes(num_rows, self.v_heads, self.k_dim, self.v_dim) + gates

    def delta_rule(
        self, joined: Tensor, gate: Tensor, gates: tuple[Tensor, Tensor], states: Mapping[str, Tensor], step: StateStep
    ) -> Tensor:
        """Compute all between the projections: convolution, scan and norm. joined: q, k and v [T, channels]. gate: the
        norm's [T, v_heads v_dim]. gates: decay (a logarithm) and beta, fp32. Returns fp32 [T, v_heads v_dim].
        """
        count, width, norm = len(joined), self.k_heads * self.k_dim, getattr(self.inner, self.NORM)
        mixed = self.convolve(joined, states, step, "silu")
        q, k, v = torch.split(mixed, [width, width, self.v_heads * self.v_dim], dim=-1)
        of_keys = (count, self.k_heads, self.k_dim)
        heads = q.reshape(of_keys), k.reshape(of_keys), v.reshape(count, self.v_heads, self.v_dim)
        out = self.scans.delta_scan(heads, *gates, states["recurrent"], step)
        return self.scans.gated_norm(
            out.reshape(-1, self.v_dim),
            gate.reshape(-1, self.v_dim),
            norm.weight,
            float(norm.variance_epsilon),
            group_size=self.v_dim,
            form=(False, self.gate),
        ).view(count, -1)


class KGatedDeltaNet(DeltaRule):
    """Gated DeltaNet of Qwen3-Next (projections side by side, by key head) and Qwen3.5 (each on its own)."""

    OPS: ClassVar[dict[str, str]] = {"KGatedDeltaNet": "gated delta rule over slots of states"}
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"conv1d", "norm"})
    CHILDREN: ClassVar[tuple[frozenset[str], ...]] = (
        _COMMON | {"in_proj_qkvz", "in_proj_ba"},
        _COMMON | {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"},
    )
    NUMBERS: ClassVar[tuple[str, ...]] = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    NORM: ClassVar[str] = "norm"

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        inner: Any = module
        self.k_heads, self.v_heads = int(inner.num_k_heads), int(inner.num_v_heads)
        self.k_dim, self.v_dim = int(inner.head_k_dim), int(inner.head_v_dim)
        self.is_interleaved = hasattr(inner, "in_proj_qkvz")
        self.gate = _gate_of(inner.norm, f"{key}.norm")
        if inner.activation != "silu":
            raise UnsupportedError(f"{key}: a convolution followed by {inner.activation!r}, not silu")

    @override
    def prepare(self) -> None:
        super().prepare()
        inner: Any = self.inner
        if not self.device.is_gpu:
            return
        sizes = (self.k_heads, self.v_heads, self.k_dim, self.v_dim)
        self._net = DeltaNet(
            *sizes,
            inner.conv1d.weight[:, 0].contiguous(),
            self.a.contiguous(),
            inner.dt_bias.float().contiguous(),
            inner.norm.weight,
            float(inner.norm.variance_epsilon),
            conv_bias=inner.conv1d.bias,
            columns=interleaved_columns(*sizes).to(self.a.device) if self.is_interleaved else None,
            gate=self.gate,
        )

    @override
    def bind(self, runtime: OperatorRuntime) -> None:
        super().bind(runtime)
        if self.device.is_gpu:
            self._projections = JoinedLinears([self.inner.get_submodule(name) for name in self._inputs()])

    def _inputs(self) -> tuple[str, ...]:
        """Names of the projections of hidden states."""
        if self.is_interleaved:
            return "in_proj_qkvz", "in_proj_ba"
        return "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"

    def _mix_on_gpu(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        """In few launches, without taking interleaved projections apart."""
        count, share = len(rows), self.v_heads // self.k_heads
        x, *others = self._projections(rows)
        if self.is_interleaved:
            of_keys = x.view(count, self.k_heads, -1)
            gate = of_keys[..., 2 * self.k_dim + share * self.v_dim :].view(count, self.k_heads, share, self.v_dim)
            b, a = others[0].view(count, self.k_heads, -1).chunk(2, dim=-1)
        else:
            gate = others[0].view(count, self.k_heads, share, self.v_dim)
            b, a = (part.view(count, self.k_heads, share) for part in others[1:])
        use(self.device.torch_device)
        out = gated_delta_net(x, gate, a, b, self._net, (states["conv"], states["recurrent"]), step)
        result: Tensor = self.inner.get_submodule("out_proj")(out)
        return result

    def project(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project rows [T, H] to q, k and v side by side [T, channels], z [T, Hv V], b and a [T, Hv]."""
        inner: Any = self.inner
        if not self.is_interleaved:
            return inner.in_proj_qkv(rows), inner.in_proj_z(rows), inner.in_proj_b(rows), inner.in_proj_a(rows)
        count, share = len(rows), self.v_heads // self.k_heads
        sizes = (self.k_dim, self.k_dim, share * self.v_dim, share * self.v_dim)
        parts = inner.in_proj_qkvz(rows).view(count, self.k_heads, -1).split(sizes, dim=-1)
        b, a = inner.in_proj_ba(rows).view(count, self.k_heads, -1).split((share, share), dim=-1)
        q, k, v, z = (part.reshape(count, -1) for part in parts)
        return torch.cat((q, k, v), dim=-1), z, b.reshape(count, -1), a.reshape(count, -1)

    @override
    def mix(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        if self.device.is_gpu:
            return self._mix_on_gpu(rows, states, step)
        inner: Any = self.inner
        qkv, z, b, a = self.project(rows)
        with exact_math(self):
            gates = self.a * functional.softplus(a.float() + inner.dt_bias), torch.sigmoid(b.float())
        result: Tensor = inner.out_proj(self.delta_rule(qkv, z, gates, states, step).to(rows.dtype))
        return result


class KGatedDeltaParts(DeltaRule):
    """Gated DeltaNet of OLMo Hybrid, whose queries, keys, values and gates come out of matrices of their own.

    A state may be corrected beyond a key's value (allow_neg_eigval: twice as far).
    """

    OPS: ClassVar[dict[str, str]] = {"KGatedDeltaParts": "gated delta rule over slots of states"}
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"conv1d", "o_norm"})
    CHILDREN: ClassVar[tuple[frozenset[str], ...]] = (_PARTS,)
    NUMBERS: ClassVar[tuple[str, ...]] = KGatedDeltaNet.NUMBERS
    NORM: ClassVar[str] = "o_norm"

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        inner: Any = module
        self.k_heads, self.v_heads = int(inner.num_k_heads), int(inner.num_v_heads)
        self.k_dim, self.v_dim = int(inner.head_k_dim), int(inner.head_v_dim)
        self.most = 2.0 if inner.allow_neg_eigval else 1.0
        self.gate = getattr(inner.o_norm, "activation", "")
        if inner.activation != "silu" or self.gate != "silu":
            raise UnsupportedError(
                f"{key}: a convolution and a gate of {inner.activation!r} and {self.gate!r}, not silu"
            )

    @override
    def mix(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        inner: Any = self.inner
        joined = torch.cat((inner.q_proj(rows), inner.k_proj(rows), inner.v_proj(rows)), dim=-1)
        with exact_math(self):
            decay = self.a * functional.softplus(inner.a_proj(rows).float() + inner.dt_bias)
            beta = self.most * torch.sigmoid(inner.b_proj(rows).float())
        normed = self.delta_rule(joined, inner.g_proj(rows), (decay, beta), states, step)
        result: Tensor = inner.o_proj(normed.to(rows.dtype))
        return result


def _bound_of(gate: Any) -> float | None:
    """The least logarithm that a forget gate gives; None where it is bounded by nothing."""
    if hasattr(gate, "safe_gate"):
        return float(gate.lower_bound) if gate.safe_gate else None
    names = ("gate_lower_bound", "safe_gate_lower_bound")
    found = next((bound for name in names if (bound := getattr(gate, name, None)) is not None), None)
    return None if found is None else float(found)


class KKimiDeltaAttention(DeltaRule):
    """Kimi Delta Attention: a decay for each element of a key. Its gates are products of one matrix (Ling 3) or two."""

    OPS: ClassVar[dict[str, str]] = {"KKimiDeltaAttention": "delta rule with a decay per key element, over slots"}
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"conv1d", "o_norm"})
    CHILDREN: ClassVar[tuple[frozenset[str], ...]] = (
        _KIMI | {"g_a_proj", "g_b_proj"},
        _KIMI | {"g_proj"},
    )
    NUMBERS: ClassVar[tuple[str, ...]] = ("num_heads", "head_dim")
    NORM: ClassVar[str] = "o_norm"
    HAS_DECAY_PER_KEY: ClassVar[bool] = True

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        inner: Any = module
        self.k_heads = self.v_heads = int(inner.num_heads)
        self.k_dim = self.v_dim = int(inner.head_dim)
        self.gate = _gate_of(inner.o_norm, f"{key}.o_norm")
        parts = {name for name, _ in inner.forget_gate.named_children()}
        self.bound = _bound_of(inner.forget_gate)
        if inner.activation != "silu" or parts not in _FORGET:
            raise UnsupportedError(f"{key} ({type(module).__name__}): a kind of forget gate that is not known")

    @override
    def bind(self, runtime: OperatorRuntime) -> None:
        """Take the forget gate, a module of its own, which is loaded by now."""
        super().bind(runtime)
        if not self.device.is_gpu:
            return
        inner: Any = self.inner
        forget, size = inner.forget_gate, self.v_dim
        self._projections = JoinedLinears([inner.get_submodule(name) for name in self._inputs()])
        if self.bound is not None:
            return
        self._net = DeltaNet(
            *(self.v_heads, self.v_heads, size, size),
            inner.conv1d.weight[:, 0].contiguous(),
            self.device.move(-forget.A_log.float().exp().flatten()).contiguous(),
            self.device.move(forget.dt_bias.float().view(self.v_heads, size)).contiguous(),
            inner.o_norm.weight,
            float(inner.o_norm.variance_epsilon),
            conv_bias=inner.conv1d.bias,
            gate=self.gate,
        )

    def _inputs(self) -> tuple[str, ...]:
        """Names of the projections of hidden states: q, k, v, beta, the output's gate, the forget gate."""
        gate = "g_proj" if hasattr(self.inner, "g_proj") else "g_a_proj"
        forget = "f_proj" if hasattr(self.inner.forget_gate, "f_proj") else "f_a_proj"
        return "q_proj", "k_proj", "v_proj", "b_proj", gate, f"forget_gate.{forget}"

    def project(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project rows [T, H] to q, k and v side by side [T, channels], beta as logits [T, heads], the output's gate
        and the product of the forget gate [T, heads, head_dim].
        """
        inner: Any = self.inner
        if self.device.is_gpu:
            *qkv, beta, gate, forget = self._projections(rows)
        else:
            *qkv, beta, gate, forget = (inner.get_submodule(name)(rows) for name in self._inputs())
        if hasattr(inner, "g_b_proj"):
            gate = inner.g_b_proj(gate)
        if hasattr(inner.forget_gate, "f_b_proj"):
            forget = inner.forget_gate.f_b_proj(forget)
        shape = (len(rows), self.v_heads, self.v_dim)
        return side_by_side(qkv), beta, gate.view(shape), forget.view(shape)

    def decay(self, forget: Tensor) -> Tensor:
        """Return the logarithm of what is kept for the forget gate's product, both [T, heads, head_dim]."""
        gate: Any = self.inner.forget_gate
        raw = forget.float() + gate.dt_bias.float().view(self.v_heads, self.v_dim)
        rate: Tensor = gate.A_log.float().exp().view(-1, 1)
        return -rate * functional.softplus(raw) if self.bound is None else self.bound * torch.sigmoid(rate * raw)

    @override
    def mix(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        inner: Any = self.inner
        joined, logits, gate, forget = self.project(rows)
        if self.device.is_gpu and self.bound is None:
            use(self.device.torch_device)
            given = gate.unsqueeze(2), forget, logits.unsqueeze(-1)
            out = gated_delta_net(joined, *given, self._net, (states["conv"], states["recurrent"]), step)
            mixed_out: Tensor = inner.o_proj(out)
            return mixed_out
        with exact_math(self):
            gates = self.decay(forget), torch.sigmoid(logits.float())
        result: Tensor = inner.o_proj(self.delta_rule(joined, gate, gates, states, step).to(rows.dtype))
        return result

"""Parts of a decoder layer in one native call each. Knows weights and rows, not models; see csrc/ops/layer/layer.h.

Rows are fp32 [T, H] on the CPU and change in place: what a part computes is added to them. Results are those of the
kernels called one by one. Tensors given to a constructor are kept alive. layer: the number in the model under which a
profile records the part; -1: none.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ktransformers.kernels.attention_call import KvScales, RowPages
from ktransformers.kernels.cpu.base import WorkerPool, check_tensor, check_weight, layout_of
from ktransformers.kernels.cpu.kv import check_scales, kv_type
from ktransformers.kernels.cpu.moe import MoeKernel
from ktransformers.kernels.cpu.recurrent import GATES, native_step
from ktransformers.kernels.cpu.router import RouterSpec
from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import ActivationSpec, PackedTensor, RawTensor, StateStep
from ktransformers.kernels.untraced import untraced

__all__ = [
    "AttentionLayer",
    "AttentionStep",
    "CachedAttention",
    "CheckedCache",
    "DeltaNetWeights",
    "GatedMlp",
    "LayerBuffers",
    "LayerKv",
    "MlpLayer",
    "MoeLayer",
    "NativeMemory",
    "Norm",
    "Projection",
    "RecurrentLayer",
    "SharedExperts",
    "native_bias",
    "native_norm",
    "native_weight",
]

LayerBuffers = extension.LayerBuffers
"""Memory between the kernels of a layer; one for all layers of a model, which take turns."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm: weight fp32 [n]."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer: weight [N, K], bias fp32 [N] or None."""

    weight: RawTensor | PackedTensor
    bias: Tensor | None = None


_NativeWeight = tuple[int, int, int, int, int]
"""Address, type, layout, rows, columns."""


def native_weight(weight: RawTensor | PackedTensor) -> _NativeWeight:
    """Return a matrix as the extension takes it."""
    check_weight("weight", weight, 2)
    rows, cols = weight.shape
    return (weight.data.data_ptr(), int(weight.qtype), layout_of(weight), rows, cols)


def native_norm(norm: Norm | None, size: int) -> tuple[int, float]:
    """Return a norm of `size` columns as the extension takes it; None: there is none."""
    if norm is None:
        return (0, 0.0)
    check_tensor("norm", norm.weight, (size,))
    return (norm.weight.data_ptr(), float(norm.eps))


def native_bias(part: Projection) -> int:
    """Return the address of a projection's bias, 0 without."""
    if part.bias is None:
        return 0
    check_tensor("bias", part.bias, (part.weight.shape[0],))
    return part.bias.data_ptr()


NativeMemory = tuple[int, int, int, int, int, int, bool]
"""Type; addresses of keys, values and their scales; slots. Of states: 0, conv, recurrent, 0, 0, slots."""


class AttentionStep:
    """The rows of a step as attention takes them, shared by all layers of a kind. cos, sin fp32 [T, D_rot]; slots int64
    [T]; pages: with seq_ids and kv_lens of int32.

    Raises TypeError or ValueError for tensors that do not fit each other.
    """

    __slots__ = ("_kept", "addresses", "rotary_dims", "rows", "sizes")

    @untraced
    def __init__(self, cos: Tensor, sin: Tensor, slots: Tensor, pages: RowPages):
        block_table, seq_ids, kv_lens = pages.block_table, pages.seq_ids, pages.kv_lens
        check_tensor("cos", cos, (None, None))
        self.rows, self.rotary_dims = cos.shape
        check_tensor("sin", sin, (self.rows, self.rotary_dims))
        check_tensor("slots", slots, (self.rows,), torch.int64)
        for name, numbers in (("seq_ids", seq_ids), ("kv_lens", kv_lens)):
            check_tensor(name, numbers, (self.rows,), torch.int32)
        check_tensor("block_table", block_table, (None, None), torch.int32)
        self._kept = (cos, sin, slots, block_table, seq_ids, kv_lens)
        self.addresses = (
            cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), block_table.data_ptr(), seq_ids.data_ptr(),
            kv_lens.data_ptr(),
        )  # fmt: skip
        self.sizes = (self.rows, *block_table.shape, block_table.stride(0), pages.page_size)


@dataclass(frozen=True, slots=True)
class LayerKv:
    """A layer's cache: keys, values [slots, Hkv, D] of any type that attention reads, contiguous, and their scales.

    bf16_products: see `attention`.
    """

    keys: Tensor
    values: Tensor
    scales: KvScales = (None, None)
    bf16_products: bool = False

    def native(self, heads: int, dim: int) -> NativeMemory:
        """Return the layer's cache as the extension takes it. Raises TypeError or ValueError for tensors that do not
        fit.
        """
        parts = []
        for name, cache, scales in (("keys", self.keys, self.scales[0]), ("values", self.values, self.scales[1])):
            check_tensor(name, cache, (None, heads, dim), self.keys.dtype)
            address = check_scales(f"scales of {name}", scales, cache, 1)[0]
            if scales is not None:
                check_tensor(f"scales of {name}", scales, (self.keys.shape[0], heads, 1))
            parts.append((cache.data_ptr(), address))
        (keys, key_scales), (values, value_scales) = parts
        kept = kv_type("keys", self.keys)
        return kept, keys, values, key_scales, value_scales, self.keys.shape[0], self.bf16_products


class CheckedCache:
    """A checked cache of a layer as the extension takes it, the same in all steps. Held weakly: it goes when its owner
    does.
    """

    def __init__(self, cache: LayerKv, native: NativeMemory):
        self._tensors = [None if tensor is None else weakref.ref(tensor) for tensor in _tensors(cache)]
        self.native, self._bf16_products = native, cache.bf16_products

    def is_of(self, cache: LayerKv) -> bool:
        """Whether the checked cache is made of the same tensors as `cache`, to be multiplied alike."""
        if cache.bf16_products != self._bf16_products:
            return False
        known = (None if tensor is None else tensor() for tensor in self._tensors)
        return all(one is other for one, other in zip(known, _tensors(cache), strict=True))


def _tensors(cache: LayerKv) -> tuple[Tensor | None, ...]:
    return (cache.keys, cache.values, *cache.scales)


class CachedAttention:
    """Attention of a decoder layer over its cache, in one native call.

    block: the extension's, of what a subclass computes. hidden_size: of rows; rotary_dims: columns of angles.
    """

    hidden_size: int
    rotary_dims: int
    block: Any
    _cache: CheckedCache | None = None

    @untraced
    def forward(self, x: Tensor, cache: LayerKv, step: AttentionStep, pool: WorkerPool, buffers: Any) -> None:
        """Add the attention of a step's rows to x in place. Raises IndexError or ValueError for slots outside of the
        cache.
        """
        check_tensor("x", x, (step.rows, self.hidden_size))
        if step.rotary_dims != self.rotary_dims:
            raise ValueError(f"cos must have {self.rotary_dims} columns, got {step.rotary_dims}")
        if self._cache is None or not self._cache.is_of(cache):
            self._cache = CheckedCache(cache, self.native_cache(cache))
        self.block.forward(pool.handle, buffers, x.data_ptr(), step.addresses, step.sizes, self._cache.native)

    def native_cache(self, cache: LayerKv) -> NativeMemory:
        """Return a layer's cache as the extension takes it. Raises TypeError or ValueError for tensors that do
        not fit.
        """
        raise NotImplementedError


class AttentionLayer(CachedAttention):
    """Attention of a decoder layer: x += o(attention(rotate(norm(q)), rotate(norm(k)), v)) over the cache, with q, k, v
    projections of norm(x).

    norms: of the rows [H], and of each query and key head [D] or None. A q of twice the rows that o has columns gives
    each head its query and then its gate: what it attends to is multiplied by the logistic function of the gate.
    Raises ValueError when shapes do not fit.
    """

    def __init__(
        self,
        norms: tuple[Norm, Norm | None, Norm | None],
        projections: tuple[Projection, Projection, Projection, Projection],
        head_dim: int,
        rotary_dims: int,
        scale: float,
        window: int = 0,
        layer: int = -1,
    ) -> None:
        q, k, v, o = projections
        self.hidden_size = q.weight.shape[1]
        width, kv_width = o.weight.shape[1], k.weight.shape[0]
        has_gate = q.weight.shape[0] == 2 * width
        fits = all(part.weight.shape[1] == self.hidden_size for part in (q, k, v)) and v.weight.shape[0] == kv_width
        if not fits or q.weight.shape[0] not in (width, 2 * width) or o.weight.shape[0] != self.hidden_size:
            raise ValueError("projections must be q [Hq D or 2 Hq D, H], k and v [Hkv D, H], o [H, Hq D]")
        if width % head_dim or kv_width % head_dim or width % kv_width or rotary_dims > head_dim or rotary_dims % 2:
            raise ValueError(f"heads of {head_dim} ({rotary_dims} rotated) do not fit widths {width} and {kv_width}")
        self._kept: Any = (norms, projections)
        self._kv_heads, self._head_dim, self.rotary_dims = kv_width // head_dim, head_dim, rotary_dims
        self.block = extension.AttentionBlock(
            [native_norm(norms[0], self.hidden_size), native_norm(norms[1], head_dim), native_norm(norms[2], head_dim)],
            [native_weight(part.weight) for part in projections],
            [native_bias(part) for part in projections],
            [width // head_dim, self._kv_heads, head_dim, rotary_dims, window],
            float(scale),
            has_gate,
            layer,
        )

    @override
    def native_cache(self, cache: LayerKv) -> NativeMemory:
        return cache.native(self._kv_heads, self._head_dim)


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """Sizes and small weights of a Gated DeltaNet.

    conv_weight: fp32 [C, W], C = 2 Hk K + H V channels of q, k and v. rate: fp32 [H], -exp(A_log). dt_bias: fp32 [H].
    norm: [V], of each head's result. gate: the activation behind it, "silu" or "sigmoid". is_tiled: the output
    projection takes each key head's first value head, then each one's second, and so on.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    conv_weight: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Norm
    gate: str = "silu"
    l2norm_eps: float = 1e-6
    is_tiled: bool = False

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_width + self.value_width

    def rows(self, is_interleaved: bool) -> list[int]:
        """Return the numbers of outputs of the projections: of qkvz and ba, or of qkv, z, b and a."""
        if is_interleaved:
            return [self.channels + self.value_width, 2 * self.num_heads]
        return [self.channels, self.value_width, self.num_heads, self.num_heads]


class RecurrentLayer:
    """Gated DeltaNet of a decoder layer: x += o(norm(delta_scan(causal_conv(qkv), decay, beta), z)), with qkv, z, b and
    a projections of norm(x).

    projections: (qkvz, ba), in which each key head has its own q, k, v, z and b, a side by side (Qwen3-Next), or
    (qkv, z, b, a) (Qwen3.5). Raises ValueError when shapes do not fit, or a projection has a bias.
    """

    def __init__(
        self, norm: Norm, projections: tuple[Projection, ...], o: Projection, net: DeltaNetWeights, layer: int = -1
    ):
        self.hidden_size = o.weight.shape[0]
        if net.num_heads % net.num_key_heads:
            raise ValueError(f"{net.num_heads} value heads cannot share {net.num_key_heads} key heads")
        shapes = [part.weight.shape for part in (*projections, o)]
        rows = net.rows(len(projections) == 2)
        wanted = [*((count, self.hidden_size) for count in rows), (self.hidden_size, net.value_width)]
        if shapes != wanted:
            raise ValueError(f"projections and o must have shapes {wanted}, got {shapes}")
        if any(part.bias is not None for part in (*projections, o)):
            raise ValueError("projections of a delta net have no biases")
        check_tensor("conv_weight", net.conv_weight, (net.channels, None))
        self._width = net.conv_weight.shape[1]
        if not 1 <= self._width <= extension.MAX_CONV_WIDTH:
            raise ValueError(f"a convolution must be 1 to {extension.MAX_CONV_WIDTH} wide, got {self._width}")
        for name, tensor in (("rate", net.rate), ("dt_bias", net.dt_bias)):
            check_tensor(name, tensor, (net.num_heads,))
        taps = net.conv_weight.t().contiguous()
        self._kept: Any = (norm, projections, o, net, taps)
        self._net = net
        self.block = extension.DeltaNetBlock(
            [native_norm(norm, self.hidden_size), native_norm(net.norm, net.value_dim)],
            [native_weight(part.weight) for part in (*projections, o)],
            [taps.data_ptr(), net.rate.data_ptr(), net.dt_bias.data_ptr()],
            [net.num_key_heads, net.num_heads, net.key_dim, net.value_dim, self._width],
            float(net.l2norm_eps),
            int(GATES[net.gate]),
            net.is_tiled,
            layer,
        )

    @untraced
    def forward(
        self, x: Tensor, conv: Tensor, recurrent: Tensor, step: StateStep, pool: WorkerPool, buffers: Any
    ) -> None:
        """Add the layer's result for a step's rows to x in place. conv: fp32 [slots, W - 1, C], recurrent: fp32 [slots,
        H, K, V]; both change in place (kernels.cpu.recurrent).

        Raises ValueError for a step that does not fit them.
        """
        check_tensor("x", x, (None, self.hidden_size))
        self.check_states(conv, recurrent)
        native = native_step(step, x.shape[0], conv.shape[0])
        self.block.forward(pool.handle, buffers, native, x.data_ptr(), conv.data_ptr(), recurrent.data_ptr())

    def check_states(self, conv: Tensor, recurrent: Tensor) -> None:
        """Raise TypeError or ValueError unless the tensors are this layer's states."""
        net = self._net
        check_tensor("conv", conv, (None, self._width - 1, net.channels))
        check_tensor("recurrent", recurrent, (conv.shape[0], net.num_heads, net.key_dim, net.value_dim))


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """A gated feed-forward block: down(act(gate(x)) * up(x)); gate, up [I, H], down [H, I]. Raises ValueError when they
    do not fit together.
    """

    gate: RawTensor | PackedTensor
    up: RawTensor | PackedTensor
    down: RawTensor | PackedTensor
    activation: ActivationSpec

    def __post_init__(self) -> None:
        width, hidden = self.up.shape
        if self.gate.shape != self.up.shape or self.down.shape != (hidden, width):
            raise ValueError("gate and up must be [I, H], down [H, I]")

    @property
    def hidden_size(self) -> int:
        return self.up.shape[1]

    @property
    def native(self) -> tuple[_NativeWeight, _NativeWeight, _NativeWeight]:
        return (native_weight(self.gate), native_weight(self.up), native_weight(self.down))


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """Experts that see every token, times sigmoid(score(x)) where there is a score [1, H]."""

    mlp: GatedMlp
    score: RawTensor | PackedTensor | None = None

    @property
    def native(self) -> list[_NativeWeight]:
        return [*self.mlp.native, *([] if self.score is None else [native_weight(self.score)])]


class MoeLayer:
    """Mixture of experts of a decoder layer: x += experts(norm(x)) + shared(norm(x)), experts chosen by `router` [E, H]
    (fp32) and `spec`.

    bias: fp32 [E] or None, moves the choice. Raises ValueError when shapes do not fit.
    """

    def __init__(
        self,
        norm: Norm,
        router: RawTensor,
        spec: RouterSpec,
        experts: MoeKernel,
        bias: Tensor | None = None,
        shared: SharedExperts | None = None,
        layer: int = -1,
    ) -> None:
        spec.check(experts.num_experts)
        if router.shape != (experts.num_experts, experts.hidden_size):
            raise ValueError(f"router must have shape {[experts.num_experts, experts.hidden_size]}, got {router.shape}")
        if bias is not None:
            check_tensor("bias", bias, (experts.num_experts,))
        self.hidden_size, self.top_k = experts.hidden_size, spec.top_k
        if shared is not None and shared.mlp.hidden_size != self.hidden_size:
            raise ValueError(f"shared experts must have hidden size {self.hidden_size}, got {shared.mlp.hidden_size}")
        if shared is not None and shared.score is not None and shared.score.shape != (1, self.hidden_size):
            raise ValueError(f"the score must have shape {[1, self.hidden_size]}, got {shared.score.shape}")
        self._kept: Any = (norm, router, experts, bias, shared)
        address = 0 if bias is None else bias.data_ptr()
        activation = ActivationSpec() if shared is None else shared.mlp.activation
        self.block = extension.MoeBlock(
            native_norm(norm, self.hidden_size),
            native_weight(router),
            address,
            spec.native,
            experts.handle,
            [] if shared is None else shared.native,
            *activation.native,
            layer,
        )

    @untraced
    def forward(self, x: Tensor, pool: WorkerPool, buffers: Any) -> Tensor:
        """Add the experts' results to x in place; return the chosen experts, int64 [T, K]."""
        check_tensor("x", x, (None, self.hidden_size))
        ids = torch.empty(x.shape[0], self.top_k, dtype=torch.int64)
        self.block.forward(pool.handle, buffers, x.shape[0], x.data_ptr(), ids.data_ptr())
        return ids


class MlpLayer:
    """Feed-forward part of a decoder layer: x += mlp(norm(x))."""

    def __init__(self, norm: Norm, mlp: GatedMlp, layer: int = -1) -> None:
        self.hidden_size = mlp.hidden_size
        self._kept: Any = (norm, mlp)
        self.block = extension.MlpBlock(native_norm(norm, self.hidden_size), *mlp.native, *mlp.activation.native, layer)

    @untraced
    def forward(self, x: Tensor, pool: WorkerPool, buffers: Any) -> None:
        """Add the block's result to x in place."""
        check_tensor("x", x, (None, self.hidden_size))
        self.block.forward(pool.handle, buffers, x.shape[0], x.data_ptr())

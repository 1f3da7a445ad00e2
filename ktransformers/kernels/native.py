"""The native CPU kernels: checks, then one call into `ktransformers._native`.

Knows tensors, worker pools and instruction-set tiers; does not know models, files, caches' owners or devices other than
the CPU. Every result is bit-identical over tiers, thread counts, the number of
rows in a call and the way rows are split (the exact arithmetic is written above the code in `csrc/*.inl`), but for
products in bf16, see `linear`.

Tensors are fp32 on the CPU and contiguous unless said otherwise. A wrong argument raises TypeError (dtype, class),
ValueError (shape, stride, device, range) or IndexError (an id out of range) that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import torch
from torch import Tensor

from ktransformers.kernels.native_base import (
    NATIVE_TYPES,
    Isa,
    Layout,
    WorkerPool,
    active_isa,
    available_isas,
    check_tensor,
    check_weight,
    has_bf16,
    layout_of,
    output,
)
from ktransformers.kernels.native_base import extension as _native
from ktransformers.kernels.packing import (
    PACKED_TYPES,
    can_pack,
    empty_bytes,
    pack,
    pack_all,
    pack_fp8,
    packed_nbytes,
    page_out,
)
from ktransformers.kernels.quant import Fp8Matrix, PackedTensor, QuantType, RawTensor

__all__ = [
    "NATIVE_TYPES",
    "PACKED_TYPES",
    "Activation",
    "ActivationSpec",
    "ExpertWeight",
    "ExpertWeights",
    "Isa",
    "MoeKernel",
    "WorkerPool",
    "activate",
    "active_isa",
    "attention",
    "available_isas",
    "batched_linear",
    "can_pack",
    "dequantize_rows",
    "empty_bytes",
    "has_bf16",
    "linear",
    "pack",
    "pack_all",
    "pack_fp8",
    "packed_nbytes",
    "page_out",
    "rms_norm",
    "silu_mul",
]


def linear(
    x: Tensor,
    weight: RawTensor | PackedTensor,
    pool: WorkerPool,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[t, n] = sum_k x[t, k] * weight[n, k] + bias[n].

    x: [T, K]. weight: [N, K], of a type in NATIVE_TYPES, or re-laid by `pack`. bias: [N]. out: [T, N], made when None.
    Quantized weights other than FP8 quantize each row of x to int8 by blocks (32 values for Q8_0, Q4_0 and MXFP4, 256
    for K-quants and IQ4_XS); a block of x that holds a NaN or an infinity makes that whole output row NaN.
    Re-laid BF16 weights, and other re-laid ones that want it (PackedTensor.wants_bf16) for MANY_TOKENS tokens or more,
    are multiplied in bf16, x rounded to it: |out - exact| <= 0.0040 (BF16) or 0.0092 (others) * sum_k |x weight| and
    a little more (csrc/kernels/bf16.inl), the same for a row whatever else the call holds, but not in every tier.
    """
    check_weight("weight", weight, 2)
    rows, cols = weight.shape
    check_tensor("x", x, (None, cols))
    if bias is not None:
        check_tensor("bias", bias, (rows,))
    result = output(out, (x.shape[0], rows), x)
    _native.linear(
        pool.handle,
        x.data_ptr(),
        x.shape[0],
        weight.data.data_ptr(),
        int(weight.qtype),
        layout_of(weight),
        rows,
        cols,
        0 if bias is None else bias.data_ptr(),
        result.data_ptr(),
    )
    return result


def batched_linear(x: Tensor, weight: RawTensor, pool: WorkerPool, out: Tensor | None = None) -> Tensor:
    """out[t, b, n] = sum_k x[t, b, k] * weight[b, n, k]: B independent matrices, as in MLA's absorbed projections.

    x: [T, B, K]. weight: [B, N, K]. out: [T, B, N], made when None. Quantization as in `linear`.
    """
    check_weight("weight", weight, 3)
    batch, rows, cols = weight.shape
    check_tensor("x", x, (None, batch, cols))
    result = output(out, (x.shape[0], batch, rows), x)
    _native.batched_linear(
        pool.handle,
        x.data_ptr(),
        x.shape[0],
        batch,
        weight.data.data_ptr(),
        int(weight.qtype),
        rows,
        cols,
        result.data_ptr(),
    )
    return result


def dequantize_rows(weight: RawTensor, ids: Tensor, pool: WorkerPool, out: Tensor | None = None) -> Tensor:
    """Rows `ids` of a weight as fp32, equal bit for bit to `gguf.quants.dequantize`: an embedding lookup.

    weight: [N, K]. ids: int64 [T]. out: [T, K], made when None. Raises IndexError for an id outside 0 .. N - 1.
    """
    check_weight("weight", weight, 2)
    rows, cols = weight.shape
    check_tensor("ids", ids, (None,), torch.int64)
    result = output(out, (ids.shape[0], cols))
    _native.dequantize_rows(
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


def rms_norm(x: Tensor, weight: Tensor, eps: float, pool: WorkerPool, out: Tensor | None = None) -> Tensor:
    """out = weight * (x / sqrt(mean(x^2) + eps)), row by row.

    x: [T, H]. weight: [H]. out: [T, H], made when None; may be x itself.
    """
    check_tensor("x", x, (None, None))
    check_tensor("weight", weight, (x.shape[1],))
    result = output(out, (x.shape[0], x.shape[1]))
    _native.rms_norm(
        pool.handle, x.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], float(eps), result.data_ptr()
    )
    return result


_KINDS = _native.activation_kinds()


class Activation(IntEnum):
    """Activation functions of an MLP. SWIGLU_OAI is gpt_oss's clamped form and needs a gate."""

    SILU = _KINDS["SILU"]
    GELU = _KINDS["GELU"]
    GELU_TANH = _KINDS["GELU_TANH"]
    RELU = _KINDS["RELU"]
    RELU2 = _KINDS["RELU2"]
    SIGMOID = _KINDS["SIGMOID"]
    SWIGLU_OAI = _KINDS["SWIGLU_OAI"]


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """An activation and its parameters.

    SWIGLU_OAI: gate = min(gate, limit), up = clamp(up, -limit, limit),
    result = gate * sigmoid(alpha * gate) * (up + 1). The other kinds use neither alpha nor limit.
    """

    kind: Activation = Activation.SILU
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def native(self) -> tuple[int, float, float]:
        """As the extension takes it."""
        return (int(self.kind), float(self.alpha), float(self.limit))


def activate(
    spec: ActivationSpec, gate: Tensor | None, up: Tensor, pool: WorkerPool, out: Tensor | None = None
) -> Tensor:
    """act(gate) * up, or act(up) when gate is None; elementwise.

    gate, up, out: one shape, any number of dimensions; out is made when None and may be gate or up.
    """
    shape = tuple(up.shape)
    check_tensor("up", up, shape)
    if gate is not None:
        check_tensor("gate", gate, shape)
    elif spec.kind is Activation.SWIGLU_OAI:
        raise ValueError("SWIGLU_OAI needs a gate")
    result = output(out, shape)
    _native.activate(
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


def silu_mul(gate: Tensor, up: Tensor, pool: WorkerPool, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up; see `activate`."""
    return activate(ActivationSpec(Activation.SILU), gate, up, pool, out)


ExpertWeight: TypeAlias = RawTensor | PackedTensor | Fp8Matrix


@dataclass
class ExpertWeights:
    """The routed experts of one layer.

    gate: E tensors [I, H], or None for act(up) without a gate. up: E tensors [I, H]. down: E tensors [H, I].
    Kernels take an Fp8Matrix after `pack_fp8` only.
    gate_bias, up_bias: fp32 [E, I] or None. down_bias: fp32 [E, H] or None. All experts of a projection share one type;
    projections may differ; each may be re-laid by `pack`.
    """

    gate: Sequence[ExpertWeight] | None
    up: Sequence[ExpertWeight]
    down: Sequence[ExpertWeight]
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


_Projection = tuple[int, int, int, list[int], int, int]


def _projection(
    name: str,
    tensors: Sequence[ExpertWeight] | None,
    bias: Tensor | None,
    num_experts: int,
    shape: tuple[int, int],
) -> _Projection:
    if tensors is None:
        if bias is not None:
            raise ValueError(f"{name}_bias is given, but there is no {name}")
        return (int(QuantType.F32), 0, 0, [], 0, int(Layout.ROWS))
    if len(tensors) != num_experts:
        raise ValueError(f"{name} has {len(tensors)} experts, up has {num_experts}")
    qtype, layout = tensors[0].qtype, layout_of(check_weight(f"{name}[0]", tensors[0], 2))
    addresses = []
    for index, given in enumerate(tensors):
        tensor = check_weight(f"{name}[{index}]", given, 2)
        addresses.append(tensor.data.data_ptr())
        if tensor.qtype != qtype or layout_of(tensor) != layout:
            raise ValueError(f"{name}[{index}] is {tensor.qtype.name}, {name}[0] is {qtype.name}: give one type")
        if tensor.shape != shape:
            raise ValueError(f"{name}[{index}] must have shape {list(shape)}, got {list(tensor.shape)}")
    if bias is not None:
        check_tensor(f"{name}_bias", bias, (num_experts, shape[0]))
    return (int(qtype), shape[0], shape[1], addresses, 0 if bias is None else bias.data_ptr(), layout)


class MoeKernel:
    """The routed experts of one layer, ready to run. Keeps the weights alive and never copies them.

    Raises ValueError when shapes, types or the number of experts do not fit together.
    """

    def __init__(self, weights: ExpertWeights, activation: ActivationSpec, pool: WorkerPool) -> None:
        if not weights.up:
            raise ValueError("there must be at least one expert")
        if weights.gate is None and activation.kind is Activation.SWIGLU_OAI:
            raise ValueError("SWIGLU_OAI needs a gate")
        check_weight("up[0]", weights.up[0], 2)
        width, hidden = weights.up[0].shape
        self.num_experts = len(weights.up)
        self.hidden_size = hidden
        self.weights = weights
        self.activation = activation
        self.pool = pool
        self.handle = _native.Moe(
            _projection("gate", weights.gate, weights.gate_bias, self.num_experts, (width, hidden)),
            _projection("up", weights.up, weights.up_bias, self.num_experts, (width, hidden)),
            _projection("down", weights.down, weights.down_bias, self.num_experts, (hidden, width)),
            int(activation.kind),
            activation.alpha,
            activation.limit,
        )

    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """out[t] = ((w[t, 0] * y0) + w[t, 1] * y1) + ..., y_k the output of expert topk_ids[t, k].

        hidden_states: [T, H]. topk_ids: int64 or int32 [T, K]; an id equal to the number of experts is skipped, any
        other id out of range raises IndexError before any work. topk_weights: fp32 [T, K]. out: [T, H].
        """
        check_tensor("hidden_states", hidden_states, (None, self.hidden_size))
        tokens = hidden_states.shape[0]
        if topk_ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"topk_ids must be int64 or int32, got {topk_ids.dtype}")
        ids = topk_ids.to(torch.int64)
        check_tensor("topk_ids", ids, (tokens, None), torch.int64)
        check_tensor("topk_weights", topk_weights, (tokens, ids.shape[1]))
        result = output(out, (tokens, self.hidden_size), hidden_states)
        self.handle.forward(
            self.pool.handle,
            hidden_states.data_ptr(),
            tokens,
            ids.data_ptr(),
            topk_weights.data_ptr(),
            ids.shape[1],
            result.data_ptr(),
        )
        return result


def _check_cache(name: str, cache: Tensor) -> None:
    if cache.dtype != torch.float32:
        raise TypeError(f"{name} must be torch.float32, got {cache.dtype}")
    if cache.device.type != "cpu" or cache.dim() != 3 or (cache.numel() and cache.stride(2) != 1):
        raise ValueError(
            f"{name} must be a CPU tensor [slots, kv heads, dim] whose last dimension is contiguous, "
            f"got shape {list(cache.shape)} with strides {cache.stride()}"
        )


def _check_heads(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Check that q [T, Hq, Dk] and the two caches fit one another."""
    check_tensor("q", q, (None, None, None))
    _check_cache("k_cache", k_cache)
    _check_cache("v_cache", v_cache)
    slots, num_kv_heads, _ = v_cache.shape
    if tuple(k_cache.shape) != (slots, num_kv_heads, q.shape[2]):
        expected = [slots, num_kv_heads, q.shape[2]]
        raise ValueError(f"k_cache must have shape {expected} to fit q and v_cache, got {list(k_cache.shape)}")
    if num_kv_heads < 1 or q.shape[1] % num_kv_heads != 0:
        raise ValueError(f"{q.shape[1]} query heads cannot share {num_kv_heads} KV heads")


def _row_numbers(name: str, values: Tensor, num_rows: int) -> Tensor:
    if values.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, got {values.dtype}")
    converted = values.to(torch.int32)
    check_tensor(name, converted, (num_rows,), torch.int32)
    if values.dtype is torch.int64 and not torch.equal(converted.to(torch.int64), values):
        raise ValueError(f"{name} holds a number that no int32 can hold")
    return converted


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    page_size: int,
    seq_ids: Tensor,
    kv_lens: Tensor,
    scale: float,
    pool: WorkerPool,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of T flattened rows over a paged cache; returns [T, Hq, Dv].

    q: [T, Hq, Dk]. k_cache: [slots, Hkv, Dk], v_cache: [slots, Hkv, Dv], any slot and head strides, the last dimension
    contiguous; v_cache may be a view of k_cache (MLA: Hkv = 1). Query head h reads KV head h // (Hq / Hkv).
    block_table: int32 [num_seqs, max_pages]; position p of sequence s is in slot
    block_table[s, p // page_size] * page_size + p % page_size. seq_ids: int32 or int64 [T].
    kv_lens: int32 or int64 [T]: row t sees positions 0 .. kv_lens[t] - 1 (its own included), with window > 0 only the
    last `window` of them; a row that sees nothing gives zeros. sinks: fp32 [Hq], a virtual logit per head (gpt_oss).
    softcap > 0: scores become softcap * tanh(score / softcap) (gemma2).
    Raises ValueError when a page that a row sees lies outside the cache or the table.
    """
    _check_heads(q, k_cache, v_cache)
    check_tensor("block_table", block_table, (None, None), torch.int32)
    num_rows, num_heads, dim_k = q.shape
    slots, num_kv_heads, dim_v = v_cache.shape
    if page_size < 1 or window < 0 or softcap < 0:
        raise ValueError(f"page_size {page_size} must be >= 1, window {window} and softcap {softcap} >= 0")
    seqs = _row_numbers("seq_ids", seq_ids, num_rows)
    lens = _row_numbers("kv_lens", kv_lens, num_rows)
    if sinks is not None:
        check_tensor("sinks", sinks, (num_heads,))
    result = output(out, (num_rows, num_heads, dim_v), q)
    _native.attention(
        pool.handle,
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        result.data_ptr(),
        (num_rows, num_heads, num_kv_heads, dim_k, dim_v, slots),
        (q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1)),
        block_table.data_ptr(),
        (block_table.shape[0], block_table.shape[1], block_table.stride(0), page_size),
        seqs.data_ptr(),
        lens.data_ptr(),
        float(scale),
        float(softcap),
        window,
        0 if sinks is None else sinks.data_ptr(),
    )
    return result

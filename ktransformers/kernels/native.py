"""The native CPU kernels: checks, then one call into `ktransformers._native`.

The only importer of the extension. Knows tensors, worker pools and instruction-set tiers; does not know models, files,
caches' owners or devices other than the CPU. Every result is bit-identical over tiers, thread counts, the number of
rows in a call and the way rows are split (the exact arithmetic is written above the code in `csrc/*.inl`).

Tensors are fp32 on the CPU and contiguous unless said otherwise. A wrong argument raises TypeError (dtype, class),
ValueError (shape, stride, device, range) or IndexError (an id out of range) that names it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

import torch
from torch import Tensor

from ktransformers.errors import ConfigError, KernelError
from ktransformers.kernels.quant import QuantType, RawTensor, block_size, type_size

try:
    from ktransformers import _native
except ImportError as error:
    raise KernelError(
        f"the native extension ktransformers._native cannot be loaded ({error}); build it with `pip install .`"
    ) from error

__all__ = [
    "NATIVE_TYPES",
    "Activation",
    "ActivationSpec",
    "ExpertWeights",
    "Isa",
    "MoeKernel",
    "WorkerPool",
    "activate",
    "active_isa",
    "attention",
    "available_isas",
    "batched_linear",
    "dequantize_rows",
    "linear",
    "rms_norm",
    "silu_mul",
]

ISA_VARIABLE = "KTRANSFORMERS_ISA"


def _native_types() -> frozenset[QuantType]:
    types = set()
    for name, (number, block, size) in _native.quant_types().items():
        qtype = QuantType(number)
        if qtype.name != name or block_size(qtype) != block or type_size(qtype) != size:
            raise KernelError(
                f"ktransformers._native and the gguf package disagree about {name}: reinstall ktransformers"
            )
        types.add(qtype)
    return frozenset(types)


#: The block formats that the kernels compute with in place.
NATIVE_TYPES: frozenset[QuantType] = _native_types()


class Isa(Enum):
    """Instruction-set tiers. The value is the name that `KTRANSFORMERS_ISA` takes."""

    SCALAR = "scalar"
    AVX2 = "avx2"
    AVX512_VNNI = "avx512_vnni"


def available_isas() -> tuple[Isa, ...]:
    """The tiers that this machine can run, slowest first."""
    return tuple(Isa(name) for name in _native.available_isas())


def active_isa() -> Isa:
    """The tier that a new WorkerPool uses: the one in `KTRANSFORMERS_ISA`, or else the fastest of the machine.

    Raises ConfigError when the variable names a tier that does not exist or that the machine lacks.
    """
    known = available_isas()
    forced = os.environ.get(ISA_VARIABLE)
    if not forced:
        return known[-1]
    for isa in known:
        if isa.value == forced:
            return isa
    names = ", ".join(isa.value for isa in known)
    raise ConfigError(f"{ISA_VARIABLE}={forced}: this machine has {names}")


class WorkerPool:
    """Threads that run kernels, one call at a time; calls from several Python threads wait for one another.

    num_threads counts the calling thread, which works too. isa: the tier, `active_isa()` when None. An idle pool uses
    no CPU. After fork() the child must make its own pool (a call raises RuntimeError there).
    Raises ValueError for a thread count below 1 or above 1024, or a tier that the machine lacks.
    """

    def __init__(self, num_threads: int, isa: Isa | None = None) -> None:
        if not isinstance(num_threads, int) or isinstance(num_threads, bool):
            raise TypeError(f"num_threads must be an int, got {num_threads!r}")
        if not 1 <= num_threads <= _native.MAX_THREADS:
            raise ValueError(f"num_threads must be between 1 and {_native.MAX_THREADS}, got {num_threads}")
        self.isa = isa or active_isa()
        self.num_threads = num_threads
        self.handle = _native.WorkerPool(num_threads, self.isa.value)
        self._finalizer = weakref.finalize(self, self.handle.close)

    def close(self) -> None:
        """Stop the threads. Later calls with this pool raise RuntimeError. Closing twice does nothing."""
        self._finalizer()

    def __repr__(self) -> str:
        state = "" if self._finalizer.alive else ", closed"
        return f"WorkerPool(num_threads={self.num_threads}, isa={self.isa.value}{state})"


def _check(name: str, tensor: Tensor, shape: Sequence[int | None], dtype: torch.dtype = torch.float32) -> None:
    """Check a contiguous CPU tensor; None in `shape` allows any size."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, got {tensor.device}")
    actual = tensor.shape
    if len(actual) != len(shape) or any(w is not None and w != got for w, got in zip(shape, actual, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(actual)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def _output(out: Tensor | None, shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
    """`out` checked, or a new tensor. An output that shares its memory with an input would be read after writing."""
    if out is None:
        return torch.empty(shape, dtype=torch.float32)
    _check("out", out, shape)
    for tensor in inputs:
        if tensor.data_ptr() == out.data_ptr() and out.numel():
            raise ValueError("out must not be one of the inputs")
    return out


def _check_weight(name: str, weight: RawTensor, dims: int) -> None:
    if weight.qtype not in NATIVE_TYPES:
        names = ", ".join(sorted(qtype.name for qtype in NATIVE_TYPES))
        raise ValueError(f"{name} is {weight.qtype.name}, which has no kernel; transcode it to one of {names}")
    if len(weight.shape) != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {weight.shape}")
    if weight.data.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, got {weight.data.device}")


def linear(
    x: Tensor, weight: RawTensor, pool: WorkerPool, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """out[t, n] = sum_k x[t, k] * weight[n, k] + bias[n].

    x: [T, K]. weight: [N, K], of a type in NATIVE_TYPES. bias: [N]. out: [T, N], made when None. Quantized weights
    quantize each row of x to int8 by blocks (32 values for Q8_0 and Q4_0, 256 for K-quants); a block of x that holds
    a NaN or an infinity makes that whole output row NaN.
    """
    _check_weight("weight", weight, 2)
    rows, cols = weight.shape
    _check("x", x, (None, cols))
    if bias is not None:
        _check("bias", bias, (rows,))
    result = _output(out, (x.shape[0], rows), x)
    _native.linear(
        pool.handle,
        x.data_ptr(),
        x.shape[0],
        weight.data.data_ptr(),
        int(weight.qtype),
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
    _check_weight("weight", weight, 3)
    batch, rows, cols = weight.shape
    _check("x", x, (None, batch, cols))
    result = _output(out, (x.shape[0], batch, rows), x)
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
    _check_weight("weight", weight, 2)
    rows, cols = weight.shape
    _check("ids", ids, (None,), torch.int64)
    result = _output(out, (ids.shape[0], cols))
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
    _check("x", x, (None, None))
    _check("weight", weight, (x.shape[1],))
    result = _output(out, (x.shape[0], x.shape[1]))
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


def activate(
    spec: ActivationSpec, gate: Tensor | None, up: Tensor, pool: WorkerPool, out: Tensor | None = None
) -> Tensor:
    """act(gate) * up, or act(up) when gate is None; elementwise.

    gate, up, out: one shape, any number of dimensions; out is made when None and may be gate or up.
    """
    shape = tuple(up.shape)
    _check("up", up, shape)
    if gate is not None:
        _check("gate", gate, shape)
    elif spec.kind is Activation.SWIGLU_OAI:
        raise ValueError("SWIGLU_OAI needs a gate")
    result = _output(out, shape)
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


@dataclass
class ExpertWeights:
    """The routed experts of one layer.

    gate: E tensors [I, H], or None for act(up) without a gate. up: E tensors [I, H]. down: E tensors [H, I].
    gate_bias, up_bias: fp32 [E, I] or None. down_bias: fp32 [E, H] or None. All experts of a projection share one type;
    projections may differ.
    """

    gate: list[RawTensor] | None
    up: list[RawTensor]
    down: list[RawTensor]
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


_Projection = tuple[int, int, int, list[int], int]


def _projection(
    name: str, tensors: list[RawTensor] | None, bias: Tensor | None, num_experts: int, shape: tuple[int, int]
) -> _Projection:
    if tensors is None:
        if bias is not None:
            raise ValueError(f"{name}_bias is given, but there is no {name}")
        return (int(QuantType.F32), 0, 0, [], 0)
    if len(tensors) != num_experts:
        raise ValueError(f"{name} has {len(tensors)} experts, up has {num_experts}")
    qtype = tensors[0].qtype
    for index, tensor in enumerate(tensors):
        _check_weight(f"{name}[{index}]", tensor, 2)
        if tensor.qtype != qtype:
            raise ValueError(f"{name}[{index}] is {tensor.qtype.name}, {name}[0] is {qtype.name}: give one type")
        if tensor.shape != shape:
            raise ValueError(f"{name}[{index}] must have shape {list(shape)}, got {list(tensor.shape)}")
    if bias is not None:
        _check(f"{name}_bias", bias, (num_experts, shape[0]))
    addresses = [tensor.data.data_ptr() for tensor in tensors]
    return (int(qtype), shape[0], shape[1], addresses, 0 if bias is None else bias.data_ptr())


class MoeKernel:
    """The routed experts of one layer, ready to run. Keeps the weights alive and never copies them.

    Raises ValueError when shapes, types or the number of experts do not fit together.
    """

    def __init__(self, weights: ExpertWeights, activation: ActivationSpec, pool: WorkerPool) -> None:
        if not weights.up:
            raise ValueError("there must be at least one expert")
        if weights.gate is None and activation.kind is Activation.SWIGLU_OAI:
            raise ValueError("SWIGLU_OAI needs a gate")
        _check_weight("up[0]", weights.up[0], 2)
        width, hidden = weights.up[0].shape
        self.num_experts = len(weights.up)
        self.hidden_size = hidden
        self.weights = weights
        self.activation = activation
        self.pool = pool
        self._moe = _native.Moe(
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
        _check("hidden_states", hidden_states, (None, self.hidden_size))
        tokens = hidden_states.shape[0]
        if topk_ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"topk_ids must be int64 or int32, got {topk_ids.dtype}")
        ids = topk_ids.to(torch.int64)
        _check("topk_ids", ids, (tokens, None), torch.int64)
        _check("topk_weights", topk_weights, (tokens, ids.shape[1]))
        result = _output(out, (tokens, self.hidden_size), hidden_states)
        self._moe.forward(
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
    _check("q", q, (None, None, None))
    _check_cache("k_cache", k_cache)
    _check_cache("v_cache", v_cache)
    slots, num_kv_heads, _ = v_cache.shape
    if tuple(k_cache.shape) != (slots, num_kv_heads, q.shape[2]):
        expected = [slots, num_kv_heads, q.shape[2]]
        raise ValueError(f"k_cache must have shape {expected} to fit q and v_cache, got {list(k_cache.shape)}")
    if num_kv_heads < 1 or q.shape[1] % num_kv_heads != 0:
        raise ValueError(f"{q.shape[1]} query heads cannot share {num_kv_heads} KV heads")


def _row_numbers(name: str, values: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    if values.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, got {values.dtype}")
    converted = values.to(dtype)
    _check(name, converted, (num_rows,), dtype)
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
    _check("block_table", block_table, (None, None), torch.int32)
    num_rows, num_heads, dim_k = q.shape
    slots, num_kv_heads, dim_v = v_cache.shape
    if page_size < 1 or window < 0 or softcap < 0:
        raise ValueError(f"page_size {page_size} must be >= 1, window {window} and softcap {softcap} >= 0")
    seqs = _row_numbers("seq_ids", seq_ids, num_rows, torch.int32)
    lens = _row_numbers("kv_lens", kv_lens, num_rows, torch.int64)
    if sinks is not None:
        _check("sinks", sinks, (num_heads,))
    result = _output(out, (num_rows, num_heads, dim_v), q)
    _native.attention(
        pool.handle,
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        result.data_ptr(),
        [num_rows, num_heads, num_kv_heads, dim_k, dim_v, slots],
        [q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1)],
        block_table.data_ptr(),
        [block_table.shape[0], block_table.shape[1], block_table.stride(0), page_size],
        seqs.data_ptr(),
        lens.data_ptr(),
        float(scale),
        float(softcap),
        window,
        0 if sinks is None else sinks.data_ptr(),
    )
    return result

"""A model's reference: transformers' own modules, on meta, whose parameters are read from the files when they are used.

The reference module computes in fp32 what the model's authors wrote. It holds no weights: an operation that takes a
parameter gets the numbers that are in the files, a matrix in pieces and of routed experts those that are chosen, so
that some layers of any model can be computed beside ours.

    module's forward ── functional.linear(x, weight on meta) ──> StoredWeights ── x, numbers of the file ──> torch
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ktransformers.engine.model.skeleton import build_causal, restore_buffers
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.types import (
    FP8_BLOCK,
    ExpertWeight,
    ExpertWeights,
    Fp8Matrix,
    GroupType,
    OwnType,
    QuantType,
    RawTensor,
    WeightType,
    block_size,
)
from ktransformers.models import registry
from ktransformers.operators.experts.routed import KTransformersExperts, read_layout
from ktransformers.operators.experts.router import KRouter
from ktransformers.operators.linear.linear import KTransformersLinear
from ktransformers.operators.wrapper import WrapperOperator
from ktransformers.optimize.machine import detect_machine
from ktransformers.optimize.plan import Plan
from ktransformers.weights.experts import BlockScaledMatrix
from ktransformers.weights.quantize.transcode import dequantize
from ktransformers.weights.quantize.write import quantize
from ktransformers.weights.source import ExpertsLayout, WeightSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["StoredWeights", "build_reference_model", "routed_experts"]

_KEPT_BYTES = 1 << 30
"""Most fp32 numbers that are kept for the next operation that wants them, and at most an eighth of the free memory."""
_PIECE = 1 << 26
"""Weights of a matrix that are multiplied at once, where there are more than these."""
_LARGE = 1 << 26
"""Multiplications of a product that is worth handing to threads."""


def build_reference_model(hf_config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal LM of `hf_config` on meta, with transformers' own eager attention and experts.

    Raises what transformers raises, and UnsupportedError for buffers that cannot be computed.
    """
    with torch.device("meta"):
        model = build_causal(
            copy.deepcopy(hf_config),
            trust_remote_code,
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
        )
    restore_buffers(model)
    return model.eval()


def routed_experts(model: nn.Module) -> dict[str, tuple[nn.Module, ExpertsLayout]]:
    """The modules that hold fused experts, by name."""
    found = {key: model.get_submodule(key) for key in registry.routed_experts(model)}
    return {key: (module, read_layout(module, key)) for key, module in found.items()}


def _facts() -> frozenset[Any]:
    """What a parameter on meta answers as well as a loaded one."""
    tensor = torch.Tensor
    names = ("shape", "dtype", "ndim", "requires_grad", "is_meta", "layout")
    methods = (tensor.size, tensor.dim, tensor.numel, tensor.stride, tensor.is_floating_point, tensor.element_size)
    return frozenset((*(getattr(tensor, name).__get__ for name in names), *methods))


_FACTS = _facts()
_DEVICE: Any = getattr(torch.Tensor, "device").__get__  # noqa: B009 - a descriptor, which no stub knows
_PRODUCTS = frozenset({torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.bmm})


class StoredWeights(TorchFunctionMode):
    """While active, parameters of `model` that are on meta stand for the numbers in `source`.

    is_rounded: whether activations are rounded, before they are multiplied, as the plan's operators round them.
    observe: told of every product the name of its parameter, which expert (None: none), and what it is multiplied with.
    """

    is_rounded = False
    observe: Callable[[str, int | None, torch.Tensor], None] | None = None

    def __init__(self, model: nn.Module, source: WeightSource, plan: Plan, pool: WorkerPool):
        super().__init__()
        state = chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
        self._names: dict[int, str] = {}
        self._shared: dict[str, list[str]] = {}  # all names of a parameter, by the first
        for name, tensor in state:
            if tensor.is_meta:
                self._shared.setdefault(self._names.setdefault(id(tensor), name), []).append(name)
        self._source, self._pool = source, pool
        self._experts = routed_experts(model)
        self._roundings = _Roundings(plan, source, pool)
        self._kept: dict[Any, torch.Tensor] = {}
        self._space = min(_KEPT_BYTES, detect_machine(gpus=dict).available_bytes // 8)
        self._matrices: dict[str, ExpertWeights] = {}  # of the experts read last
        self._issued: dict[int, tuple[torch.Tensor, str]] = {}  # single experts that modules hold now
        self._expert_of: dict[str, int] = {}  # the one asked for last, by the parameter

    @property
    def rounds(self) -> bool:
        """Whether any operator rounds activations."""
        return any(self._rounding(name) is not None for name in self._shared)

    def _rounding(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The rounding in front of a parameter, which may be a table of embeddings by its other name."""
        return next((found for one in self._shared[name] if (found := self._roundings.of(one)) is not None), None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        names = self._names
        if func is functional.linear:
            return self._linear(*args, **kwargs)
        if func in _PRODUCTS and len(args) > 1 and id(args[1]) in self._issued:
            return func(self._rounded(args[0], self._issued[id(args[1])][1]), *args[1:], **kwargs)
        if not any(id(value) in names for value in _tensors(chain(args, kwargs.values()))):
            return func(*args, **kwargs)
        first = names.get(id(args[0])) if args else None
        if func in _FACTS:
            return func(*args, **kwargs)
        if func is _DEVICE:
            return torch.device("cpu")
        if func is torch.Tensor.__getitem__ and first is not None and self._is_expert(first, args[1]):
            return self._expert(first, int(args[1]))
        if func is functional.embedding and len(args) > 1 and id(args[1]) in names:
            return self._embedding(args[0], names[id(args[1])], args[1])
        return func(
            *(self._dense(value) for value in args), **{key: self._dense(value) for key, value in kwargs.items()}
        )

    def _dense(self, value: Any) -> Any:
        """`value`, or the numbers that it, or a part of it, stands for."""
        if isinstance(value, list | tuple) and any(id(part) in self._names for part in value):
            return type(value)(self._dense(part) for part in value)
        name = self._names.get(id(value))
        return value if name is None else self._keep(name, lambda: self._read(name, value))

    def _read(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.dim() == 3 and name.endswith("_proj") and name.rpartition(".")[0] in self._experts:
            return torch.stack([self._read_expert(name, index) for index in range(parameter.shape[0])])
        if name.endswith("_bias") and name.rpartition(".")[0] in self._experts:
            return self._expert_biases(name)
        info = self._source.find(name)
        if parameter.dim() != 2 or info is None or info.is_fp8:
            return self._source.dense(name)
        return self._numbers(self._source.tensor(name), name)

    def _keep(self, key: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key in self._kept:
            return self._kept[key]
        made = make()
        if made.nbytes <= self._space:
            self._space -= made.nbytes
            self._kept[key] = made
        return made

    def _rounded(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if self.observe is not None:
            self.observe(name, self._expert_of.get(name), x)
        rounding = self._rounding(name) if self.is_rounded else None
        return x if rounding is None else rounding(x)

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        bias = self._dense(bias)
        name = self._names.get(id(weight))
        if name is None:
            issued = self._issued.get(id(weight))
            return functional.linear(input if issued is None else self._rounded(input, issued[1]), weight, bias)
        input = self._rounded(input, name)
        if weight.numel() <= _PIECE or weight.dim() != 2:
            return self._product(input, self._dense(weight), bias)
        out = torch.cat([self._product(input, part, None) for part in self._pieces(name, weight.shape)], dim=-1)
        return out if bias is None else out + bias

    def _product(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """In fp32; a large one on the pool's threads, because torch has one."""
        if math.prod(input.shape[:-1]) * weight.numel() < _LARGE or weight.dim() != 2:
            return functional.linear(input, weight, bias)
        rows = input.reshape(-1, input.shape[-1]).contiguous()
        out = cpu.linear(rows, RawTensor.from_tensor(weight), self._pool, bias=bias)
        return out.view(*input.shape[:-1], weight.shape[0])

    def _pieces(self, name: str, shape: torch.Size) -> Iterator[torch.Tensor]:
        info = self._source.find(name)
        if info is None or info.is_fp8:
            yield self._source.dense(name)
            return
        raw, step = self._source.tensor(name), max(_PIECE // shape[1], 1)
        for start in range(0, shape[0], step):
            yield self._numbers(raw.rows_slice(start, min(start + step, shape[0])), name)

    def _numbers(self, raw: RawTensor, name: str) -> torch.Tensor:
        """A matrix in fp32."""
        if isinstance(raw.qtype, QuantType) and raw.qtype not in cpu.NATIVE_TYPES:
            return dequantize(raw, name)
        return cpu.dequantize_rows(raw, torch.arange(raw.rows), self._pool)

    def _embedding(self, ids: torch.Tensor, name: str, weight: torch.Tensor) -> torch.Tensor:
        if weight.numel() <= _PIECE:
            return functional.embedding(ids, self._dense(weight))
        rows = cpu.dequantize_rows(self._source.tensor(name), ids.reshape(-1).contiguous(), self._pool)
        return rows.view(*ids.shape, weight.shape[-1])

    # -- routed experts

    def _is_expert(self, name: str, index: Any) -> bool:
        is_one = isinstance(index, int) or (isinstance(index, torch.Tensor) and index.dim() == 0)
        return is_one and name.endswith("_proj") and name.rpartition(".")[0] in self._experts

    def _expert(self, name: str, index: int) -> torch.Tensor:
        made = self._keep((name, index), lambda: self._read_expert(name, index))
        if len(self._issued) > 8:
            self._issued.clear()
        self._issued[id(made)] = (made, name)
        self._expert_of[name] = index
        return made

    def _weights_of(self, key: str) -> ExpertWeights:
        if key not in self._matrices:
            self._matrices.clear()
            self._matrices[key] = self._source.experts(key, self._experts[key][1])
        return self._matrices[key]

    def _expert_biases(self, name: str) -> torch.Tensor:
        """As the module holds them: [E, 2 I] or [E, I], or [E, H]."""
        key, _, part = name.rpartition(".")
        weights = self._weights_of(key)
        bias = weights.down_bias if part == "down_proj_bias" else weights.up_bias
        if bias is None:
            return self._source.dense(name)
        if part == "down_proj_bias" or weights.gate_bias is None:
            return bias
        return self._experts[key][1].joined(weights.gate_bias, bias, 1)

    def _read_expert(self, name: str, index: int) -> torch.Tensor:
        """As the module holds it: [2 I, H] or [I, H], [H, I], or transposed."""
        key, _, part = name.rpartition(".")
        layout = self._experts[key][1]
        weights, resident = self._weights_of(key), self._roundings.resident_experts(key, layout)
        if part == "down_proj":
            matrix = self._matrix(weights.down[index], resident["down"], name)
        else:
            matrix = self._matrix(weights.up[index], resident["up"], name)
            if weights.gate is not None:
                matrix = layout.joined(self._matrix(weights.gate[index], resident["gate"], name), matrix, 0)
        return matrix.T if layout.is_transposed else matrix

    def _matrix(self, weight: ExpertWeight, resident: WeightType, name: str) -> torch.Tensor:
        """Of one expert in fp32, as it is multiplied: quantized while loading to `resident`, or as stored."""
        if isinstance(weight, Fp8Matrix):
            codes = weight.values.view(torch.float8_e4m3fn)
            dense = BlockScaledMatrix(codes, weight.scales, (FP8_BLOCK, FP8_BLOCK)).rows_f32(0, weight.shape[0])
        else:
            assert isinstance(weight, RawTensor)
            dense = self._numbers(weight, name)
        if resident is weight.qtype or not isinstance(resident, QuantType):
            return dense
        blocks = torch.from_numpy(quantize(dense.numpy(), resident)).reshape(-1)
        return self._numbers(RawTensor(blocks, resident, tuple(dense.shape)), name)


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    """The values, and the parts of those that are lists."""
    for value in values:
        yield value
        if isinstance(value, list | tuple):
            yield from value


class _Roundings:
    """How the operators of a plan round the activations that a parameter is multiplied with."""

    def __init__(self, plan: Plan, source: WeightSource, pool: WorkerPool):
        self._plan, self._source, self._pool = plan, source, pool
        self._devices = {entry.key: entry.placement.generate_device for entry in plan.entries}
        self._found: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {}
        self._resident: dict[str, Mapping[str, WeightType]] = {}

    def of(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The rounding in front of the parameter `name`; None where there is none."""
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def resident_experts(self, key: str, layout: ExpertsLayout) -> Mapping[str, WeightType]:
        """Types of the experts' matrices once they are loaded: of "gate", "up" and "down"."""
        if key not in self._resident:
            operator = self._plan.operators.get(key)
            wanted = operator.config.cpu_quant if isinstance(operator, KTransformersExperts) else None
            info = self._source.find_experts(key, layout, wanted)
            assert info is not None
            parts = {"gate": info.gate, "up": info.up, "down": info.down}
            self._resident[key] = {name: part.resident_type for name, part in parts.items() if part is not None}
        return self._resident[key]

    def _find(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        key = name.rpartition(".")[0]
        operator = self._plan.operators.get(key)
        while key and key not in self._devices:
            key = key.rpartition(".")[0]
        if self._plan.devices[self._devices.get(key, "cpu")].is_gpu:
            return None if isinstance(operator, KRouter) else _to_bf16
        if key in self._plan.kept or isinstance(operator, WrapperOperator):
            return None
        if isinstance(operator, KTransformersExperts):
            found = self.resident_experts(key, operator.layout)
            resident: WeightType = found["down" if name.endswith("down_proj") else "up"]
        else:
            info = self._source.find(name)
            if info is None or len(info.shape) < 2:
                return None
            resident = OwnType.F8_E4M3 if info.is_fp8 else info.resident_type
        if resident in (QuantType.F32, QuantType.F16):
            return None
        if resident in (QuantType.BF16, OwnType.F8_E4M3):
            if not self._pool.has_bf16 or not isinstance(operator, KTransformersExperts | KTransformersLinear):
                return None
            products = operator.products
            return _to_bf16 if (products.takes_bf16 if resident is QuantType.BF16 else products.wants_bf16) else None
        assert not isinstance(resident, OwnType)
        if isinstance(resident, GroupType):
            return None if resident.name.startswith(("F8", "MXFP8")) else lambda x: self._quantized(x, 32)
        size = block_size(resident)  # cpu_prefill bf16 rounds to less than this, and large calls only
        return lambda x: self._quantized(x, size)

    def _quantized(self, x: torch.Tensor, size: int) -> torch.Tensor:
        """What products take for x."""
        rounded = _to_int8(x, size)
        return rounded if self._pool.planes == 1 else rounded + _to_int8(x - rounded, size)


def _to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _to_int8(x: torch.Tensor, size: int) -> torch.Tensor:
    """Blocks of `size` values, rounded to 127 steps of the largest."""
    blocks = functional.pad(x, (0, -x.shape[-1] % size)).reshape(*x.shape[:-1], -1, size)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return ((blocks / scale).round() * scale).flatten(-2)[..., : x.shape[-1]]

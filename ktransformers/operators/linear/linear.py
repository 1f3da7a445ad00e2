"""Linear layers on weights that stay in the type of the file."""

from __future__ import annotations

import logging
import math
from typing import ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.types import OwnType, PackedTensor, RawTensor
from ktransformers.operators.base import (
    Operator,
    OperatorConfig,
    Placement,
    Requirements,
    empty_parameter,
    expect_shape,
)
from ktransformers.operators.device import to_input
from ktransformers.operators.linear.matrix import GpuMatrix, fp32_product, gpu_matrix, gpu_nbytes, takes_fp8
from ktransformers.operators.linear.packed import CpuProducts, pack_matrix, resident_nbytes
from ktransformers.weights.source import TensorInfo, WeightSource

__all__ = ["KTransformersLinear"]

logger = logging.getLogger(__name__)


class KTransformersLinear(Operator):
    """Operator of `nn.Linear` with a weight that stays quantized: [..., K] in, [..., N] out, of the type of its input.

    On the CPU every op name runs as KLinearCPUInfer, the native kernel, which reads every type; the same arithmetic in
    both phases keeps a token's result independent of the step's size, unless cpu_prefill (rule file, else
    --cpu_prefill) is bf16. cpu_bf16 says for BF16 weights how they are multiplied, see CpuProducts. On a GPU one form
    of the weight serves both phases, that of generate_op: quantized (KLinearMarlin, and what the other names of
    quantized weights mean), or dense (KLinearTorch) where that is asked for or no kernel reads the type. The LM head's
    result is fp32.
    """

    OPS: ClassVar[dict[str, str]] = {
        "KLinearCPUInfer": "native kernel on the file's own blocks",
        "KLinearTorch": "dequantized weight on the GPU",
        "KLinearMarlin": "quantized weight on the GPU",
        "VLinearMarlin": "quantized weight on the GPU",
        "KLinearFP8": "FP8 block-scaled weight on the GPU",
        "KLinearQ8": "8-bit weight on the GPU",
    }

    KWARGS: ClassVar[frozenset[str]] = CpuProducts.KWARGS

    def __init__(
        self,
        module: nn.Module,
        key: str,
        config: OperatorConfig,
        placement: Placement | None = None,
        **options: str | None,
    ):
        super().__init__(module, key, config, placement)
        self.products = CpuProducts.of(key, config, **options)
        # A subclass with a forward of its own is more than a product: some routers are.
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            raise UnsupportedError(
                f"KTransformersLinear cannot replace {key}: {type(module).__name__} is not a plain nn.Linear but "
                "computes more; a rule before this one with class: default leaves the module as it is"
            )
        self.in_features, self.out_features = module.in_features, module.out_features
        self.has_bias = module.bias is not None
        # Hugging Face code reads `linear.weight.dtype` and `.shape`; the bytes live in `_weight`.
        self.weight = empty_parameter((self.out_features, self.in_features))
        self.is_dense_wanted = self.placement.generate_op == "KLinearTorch"
        self.is_head = key.rpartition(".")[2] == "lm_head"
        self._group = None if config.partial_sums is None else config.partial_sums.of_linear(key)
        self._head_group = None if config.partial_sums is None else config.partial_sums.of_head(key)
        self._weight: RawTensor | PackedTensor | None = None
        self._matrix: GpuMatrix | None = None  # the weight on a GPU; may be a share of a larger one
        self._bias: torch.Tensor | None = None

    @property
    def matrix(self) -> GpuMatrix | None:
        """The weight on a GPU, once loaded, with its bias; None on the CPU."""
        return self._matrix

    @property
    def native(self) -> tuple[RawTensor | PackedTensor, torch.Tensor | None] | None:
        """The weight on the CPU, once loaded, and the bias; None on a GPU."""
        return None if self._weight is None else (self._weight, self._bias)

    def replace_matrix(self, share: GpuMatrix) -> None:
        """Replace the weight by a share of a larger matrix, which holds it now and makes this layer's product."""
        self._matrix = share

    @override
    def op(self, phase: Phase) -> str:
        if not self.device.is_gpu:
            return "KLinearCPUInfer"
        return "KLinearTorch" if self.is_dense_wanted else "KLinearMarlin"

    def _info(self, source: WeightSource) -> TensorInfo:
        name = f"{self.key}.weight"
        info = expect_shape(source.find(name), name, (self.out_features, self.in_features))
        is_taken = not self.device.is_gpu or (not self.is_dense_wanted and takes_fp8(*info.shape))
        return info.as_fp8() if info.is_fp8 and is_taken else info

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        needs, device = Requirements(), self.device
        info = self._info(source)
        if device.is_gpu:
            shape = self.out_features, self.in_features
            nbytes = gpu_nbytes(info.resident_type, shape, device, self.is_dense_wanted)
        else:
            nbytes = resident_nbytes(info, self.products)
        needs.add(device.name, info, nbytes)
        if self.has_bias:
            name = f"{self.key}.bias"
            info = expect_shape(source.find(name), name, (self.out_features,))
            needs.nbytes[device.name] += 4 * self.out_features
            needs.stored_names.update(info.stored_names)
        return needs

    @override
    def load(self, source: WeightSource) -> None:
        self.requirements(source)
        name, pool = f"{self.key}.weight", self.config.require_pool()
        self._bias = source.dense(f"{self.key}.bias") if self.has_bias else None
        is_fp8 = self._info(source).resident_type is OwnType.F8_E4M3
        stored = source.fp8(name) if is_fp8 else source.tensor(name)
        if not self.device.is_gpu:
            weight = pack_matrix(stored, pool, self.products)
            self._weight = self.kept(weight) if isinstance(weight, RawTensor) else weight
        else:
            self._matrix = gpu_matrix(stored, self._bias, self.device, pool, self.is_dense_wanted)

    @override
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.device.to_device(hidden_states)
        num_rows = math.prod(x.shape[:-1])  # rows have no columns where shared experts are none
        rows = x.reshape(num_rows, self.in_features).contiguous()
        if self._group is not None:
            out = self._group.sum_product(rows, self.out_features, self._share)
        elif self._head_group is not None:
            given = hidden_states.reshape(-1, self.in_features)  # processes meet where these are, wherever the head is
            out = self._head_group.gather_product(given, self.out_features, self._logits)
        elif self._matrix is not None:
            out = self._matrix(rows, torch.float32 if self.is_head else x.dtype)
        else:
            out = self._cpu_product(rows)
        out = out.view(*hidden_states.shape[:-1], out.shape[-1])
        return out.to(hidden_states.device) if self.is_head else to_input(out, hidden_states)

    def _cpu_product(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._weight is not None, f"{self.key} is not loaded"
        return cpu.linear(rows, self._weight, self.config.require_pool(), bias=self._bias)

    def _logits(self, given: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        """This process's part of logits, as a ShareProduct."""
        return self._share(self.device.to_device(given).contiguous(), memory).to(given.device)

    def _share(self, rows: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        """This process's part of a sum, as a ShareProduct: not rounded, for the sum will be."""
        return self._cpu_product(rows) if self._matrix is None else fp32_product(self._matrix, rows, memory)

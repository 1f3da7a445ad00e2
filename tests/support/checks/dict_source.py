"""A WeightSource over a state dict in memory, in F32: what operators read when no file format is under test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ktransformers.errors import TensorMismatchError
from ktransformers.kernels.types import ExpertWeights, Fp8Matrix, QuantType, RawTensor
from ktransformers.weights.source import ExpertBiases, ExpertsInfo, ExpertsLayout, MappedExperts, TensorInfo


def raw_f32(tensor: torch.Tensor) -> RawTensor:
    tensor = tensor.detach().float().contiguous()
    return RawTensor(tensor.view(torch.uint8).view(-1), QuantType.F32, tuple(tensor.shape))


class DictSource:
    """Names are those of the module tree; experts are fused parameters in the module's own layout."""

    def __init__(self, state: Mapping[str, torch.Tensor]):
        self.state = dict(state)

    def describe(self) -> str:
        return f"{len(self.state)} tensors in memory"

    def stored_names(self) -> Sequence[str]:
        return list(self.state)

    def ignorable(self, stored_name: str) -> bool:
        return False

    def stored_bytes(self, stored_name: str) -> torch.Tensor | None:
        return None

    def find(self, name: str) -> TensorInfo | None:
        tensor = self.state.get(name)
        if tensor is None:
            return None
        return TensorInfo(name, tuple(tensor.shape), "F32", QuantType.F32, 4 * tensor.numel(), (name,))

    def tensor(self, name: str) -> RawTensor:
        return raw_f32(self._get(name))

    def fp8(self, name: str) -> Fp8Matrix:
        raise TensorMismatchError(f"tensor {name} is no FP8 matrix")

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._get(name).detach().to(dtype).clone()

    def _get(self, name: str) -> torch.Tensor:
        if name not in self.state:
            raise TensorMismatchError(f"tensor {name} is missing")
        return self.state[name]

    def find_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertsInfo | None:
        first = f"{key}.gate_up_proj" if layout.has_gate else f"{key}.up_proj"
        names = [first, f"{key}.down_proj"]
        if layout.has_bias:
            names += [f"{name}_bias" for name in names]
        infos = [self.find(name) for name in names]
        if any(info is None for info in infos):
            return None
        up, down = infos[0], infos[1]
        assert up is not None
        assert down is not None
        return ExpertsInfo(up if layout.has_gate else None, up, down, tuple(names), sum(i.nbytes for i in infos if i))

    def experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertWeights:
        assert layout.has_gate
        fused, down = self._get(f"{key}.gate_up_proj"), self._get(f"{key}.down_proj")
        fused = fused[: layout.num_experts]  # without those that need no weights
        if layout.is_transposed:
            fused, down = fused.transpose(1, 2), down.transpose(1, 2)
        bias = self._get(f"{key}.gate_up_proj_bias").float() if layout.has_bias else None
        half = layout.intermediate_size
        if layout.is_concatenated:
            gate, up = fused[:, :half], fused[:, half:]
            gate_bias, up_bias = (None, None) if bias is None else (bias[:, :half], bias[:, half:])
        else:
            gate, up = fused[:, ::2], fused[:, 1::2]
            gate_bias, up_bias = (None, None) if bias is None else (bias[:, ::2], bias[:, 1::2])
        return ExpertWeights(
            gate=[raw_f32(part) for part in gate],
            up=[raw_f32(part) for part in up],
            down=[raw_f32(part) for part in down],
            gate_bias=None if gate_bias is None else gate_bias.contiguous(),
            up_bias=None if up_bias is None else up_bias.contiguous(),
            down_bias=self._get(f"{key}.down_proj_bias").float().contiguous() if layout.has_bias else None,
        )

    def mapped_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> MappedExperts:
        made = self.experts(key, layout, quantize_to)
        biases = ExpertBiases(made.gate_bias, made.up_bias, made.down_bias)
        return MappedExperts(None, None, None, biases, "a state dict is in no file")

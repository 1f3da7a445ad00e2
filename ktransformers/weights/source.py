"""Protocol by which operators read a model's weights, whatever file they come from.

Names are the Hugging Face names of the module tree that `transformers` >= 5 builds
("model.layers.3.self_attn.q_proj.weight"). Experts are asked for by their module's name, because files store them in
five different ways. This module knows no file format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from ktransformers.kernels.types import ExpertWeights, Fp8Matrix, OwnType, QuantType, RawTensor, WeightType, fp8_nbytes

__all__ = ["ExpertBiases", "ExpertsInfo", "ExpertsLayout", "MappedExperts", "TensorInfo", "WeightSource"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Facts about one tensor, from headers alone.

    stored_type is the file's own type name ("Q3_K", "F8_E4M3"); resident_type is what the native kernels will read
    after loading (equal to it, or the type it is transcoded to without loss). nbytes counts resident bytes.
    stored_names are the tensors in the file that it is made of. is_fp8: whether `WeightSource.fp8` can give it.
    """

    name: str
    shape: tuple[int, ...]
    stored_type: str
    resident_type: WeightType
    nbytes: int
    stored_names: tuple[str, ...]
    is_fp8: bool = False

    def as_fp8(self) -> TensorInfo:
        """Return facts about the same tensor as `WeightSource.fp8` gives it."""
        return replace(self, resident_type=OwnType.F8_E4M3, nbytes=fp8_nbytes(*self.shape))


@dataclass(frozen=True, slots=True)
class ExpertsLayout:
    """Shape and layout flags of a `transformers` experts module (E experts, I intermediate, H hidden).

    The flags are those of `transformers.integrations.moe.use_experts_implementation`; they describe the fused
    gate_up_proj / down_proj parameters of safetensors checkpoints in the module's own layout. num_identities: experts
    numbered behind these that return what they are given.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = False
    is_concatenated: bool = True
    num_identities: int = 0

    def joined(self, gate: torch.Tensor, up: torch.Tensor, dim: int) -> torch.Tensor:
        """Return rows of gate and up, or biases or results of them, along `dim` as the module has them: one behind the
        other, or in turn.
        """
        if self.is_concatenated:
            return torch.cat((gate, up), dim=dim)
        return torch.stack((gate, up), dim=dim + 1).flatten(dim, dim + 1)


@dataclass(frozen=True, slots=True)
class ExpertsInfo:
    """Facts about the experts of one module: [E, I, H] gate and up, [E, H, I] down. gate is None without a gate."""

    gate: TensorInfo | None
    up: TensorInfo
    down: TensorInfo
    stored_names: tuple[str, ...]  # of everything, biases included
    nbytes: int  # resident, biases included

    @classmethod
    def of(cls, infos: Mapping[str, TensorInfo], biases: Mapping[str, Sequence[int]]) -> ExpertsInfo:
        """Return facts about "gate", "up" and "down", and biases with these shapes by their stored names."""
        names = dict.fromkeys(name for info in infos.values() for name in info.stored_names)
        nbytes = sum(info.nbytes for info in infos.values()) + sum(4 * math.prod(shape) for shape in biases.values())
        return cls(infos.get("gate"), infos["up"], infos["down"], (*names, *biases), nbytes)


class ExpertBiases(NamedTuple):
    """Biases of a layer's experts: fp32 [E, I], [E, I] and [E, H], each None where there are none."""

    gate: torch.Tensor | None = None
    up: torch.Tensor | None = None
    down: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MappedExperts:
    """The matrices of a layer's experts where they lie in mapped files, not a byte of them read.

    gate, up, down: E views, gate None without a gate; all None where `why_not` says what keeps them from being read as
    they lie. biases: loaded, in either case.
    """

    gate: Sequence[RawTensor] | None
    up: Sequence[RawTensor] | None
    down: Sequence[RawTensor] | None
    biases: ExpertBiases
    why_not: str | None = None


class WeightSource(Protocol):
    """Weights of one model. `find*` read headers only; the others return bytes, memory-mapped where possible."""

    def describe(self) -> str:
        """Return a line for the console: format, files, bytes."""
        ...

    def stored_names(self) -> Sequence[str]:
        """Return every tensor in the files, under its own name there."""
        ...

    def ignorable(self, stored_name: str) -> bool:
        """Whether a stored tensor may be left unread: it belongs to parts that are not run (MTP layers, say)."""
        ...

    def stored_bytes(self, stored_name: str) -> torch.Tensor | None:
        """Return the bytes of a stored tensor in its mapped file, uint8 [n], or None when they are in none."""
        ...

    def find(self, name: str) -> TensorInfo | None:
        """Return facts about the tensor that HF calls `name`, or None when the files do not hold it."""
        ...

    def tensor(self, name: str) -> RawTensor:
        """Return a tensor in a type the native kernels read. Raises TensorMismatchError when it is missing."""
        ...

    def fp8(self, name: str) -> Fp8Matrix:
        """Return a matrix as it is stored, in FP8, for the names whose TensorInfo says `is_fp8`; `tensor` widens it.

        Raises TensorMismatchError for others.
        """
        ...

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor dequantized, as a new tensor of its logical shape. Raises TensorMismatchError when
        missing.
        """
        ...

    def find_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertsInfo | None:
        """Return facts about the experts of module `key` ("model.layers.3.mlp.experts")."""
        ...

    def experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertWeights:
        """Return the experts of module `key`, one [I, H], [I, H] and [H, I] matrix per expert.

        quantize_to applies to experts stored as F32, F16, BF16 or FP8 only; quantized ones stay as they are.
        Raises TensorMismatchError when an expert is missing or has the wrong shape.
        """
        ...

    def mapped_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> MappedExperts:
        """Return what `experts` gives as views of the mapped files, or why that needs a conversion, without one.

        Raises as `experts`.
        """
        ...

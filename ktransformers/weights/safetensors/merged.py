"""Safetensors whose tensors have GGUF's names, and experts as GGML blocks, as upstream's merge scripts write them.

    blk.3.attn_q_a.weight           FP8 or float, shaped, with blk.3.attn_q_a.weight_scale_inv as in the original
    blk.3.ffn_gate_exps.weight      U8 [bytes]: the blocks of all experts, as in the GGUF they come from
    blk.3.ffn_gate_exps.ggml_type   their type's number in GGML; left out where that is 0, F32

Rows and values are those of the original safetensors: nothing is permuted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.kernels.types import QuantType, RawTensor, row_bytes
from ktransformers.models.facts import ModelFacts
from ktransformers.models.registry import custom_models, family_of
from ktransformers.weights.conversion.checkpoint_names import Origin
from ktransformers.weights.experts import RawMatrix, check_expert_shape, expert_info
from ktransformers.weights.gguf.names import GGUFNames
from ktransformers.weights.quantize.transcode import resident_type, transcode
from ktransformers.weights.safetensors.file import SafetensorsModel
from ktransformers.weights.source import ExpertsInfo, ExpertsLayout

__all__ = ["MergedExperts", "MergedTensors", "merged_info"]

_FLOATS = {"F32": QuantType.F32, "F16": QuantType.F16, "BF16": QuantType.BF16}
_TYPE_BYTES = frozenset({"I64", "I32", "U8", "U32", "U64", "I16", "U16", "I8"})


class MergedExperts:
    """Projection of all experts of a layer under a GGUF name. shape: [E, rows, cols]. sources: the stored names it is
    made of.
    """

    def __init__(self, name: str, qtype: QuantType, shape: tuple[int, int, int], sources: tuple[str, ...]):
        self.name, self.qtype, self.shape, self.sources = name, qtype, shape, sources

    @property
    def natural(self) -> QuantType:
        """Type that the projection is held in."""
        return resident_type(self.qtype, self.name)


class MergedTensors:
    """GGUF names in one model's safetensors files."""

    def __init__(self, model: SafetensorsModel, facts: ModelFacts):
        self._model, self._tensors = model, model.tensors
        arch = family_of(facts.model_type).gguf_arch
        if arch is None:
            known = ", ".join(name for name, family in custom_models.items() if family.gguf_arch is not None)
            raise UnsupportedError(f"safetensors with GGUF's names are read for {known}, not for {facts.model_type}")
        self._names = GGUFNames(arch, facts, self._tensors)

    @classmethod
    def of(cls, model: SafetensorsModel, facts: ModelFacts) -> MergedTensors | None:
        """Return the GGUF names of a model, None for files whose tensors have other names."""
        return cls(model, facts) if any(name.startswith("blk.") for name in model.tensors) else None

    def find(self, name: str) -> Origin | None:
        """Return how the parameter `name` is made; None when it is not stored under a GGUF name."""
        stored = self._names.find(name)
        if stored is not None and len(stored.names) == 1:
            return Origin((), stored.names)
        other = f"{self._names.block(name)}ffn_gate_inp.e_score_correction_bias"
        if name.endswith(".e_score_correction_bias") and other in self._tensors:
            return Origin((), (other,))
        return None

    def experts(self, key: str, layout: ExpertsLayout) -> dict[str, MergedExperts] | None:
        """Return gate, up and down of module `key`; None when the files hold none of them under GGUF names.

        Raises TensorMismatchError when some are missing or of another size, UnsupportedError for unknown types.
        """
        count, inner, hidden = layout.num_experts, layout.intermediate_size, layout.hidden_size
        shapes = {"up": (count, inner, hidden), "down": (count, hidden, inner)}
        if layout.has_gate:
            shapes = {"gate": (count, inner, hidden), **shapes}
        names = {part: f"{self._names.block(key)}ffn_{part}_exps.weight" for part in shapes}
        missing = [part for part, name in names.items() if name not in self._tensors]
        if len(missing) == len(names):
            return None
        if missing:
            raise TensorMismatchError(f"{key!r}: the files hold some experts' blocks but not {missing}")
        if layout.has_bias:
            raise UnsupportedError(f"{key!r}: merged files with experts' biases are not supported")
        return {part: self._projection(name, shapes[part]) for part, name in names.items()}

    def matrices(self, experts: MergedExperts) -> list[RawMatrix]:
        """Return the matrix of each expert, in a type that the kernels read."""
        raw = RawTensor(self._model.bytes_of(experts.name), experts.qtype, experts.shape)
        whole = transcode(raw, experts.name)
        return [RawMatrix(whole.select(expert)) for expert in range(experts.shape[0])]

    def _projection(self, name: str, shape: tuple[int, int, int]) -> MergedExperts:
        tensor = self._tensors[name]
        if tensor.dtype in _FLOATS:
            check_expert_shape(name, tensor.shape, shape)
            return MergedExperts(name, _FLOATS[tensor.dtype], shape, (name,))
        if tensor.dtype != "U8":
            raise UnsupportedError(f"expert tensor {name!r} is stored as {tensor.dtype}; GGML blocks are U8")
        types = (f"{name.removesuffix('.weight')}.ggml_type", f"{name}.ggml_type")
        type_name = next((one for one in types if one in self._tensors), None)
        qtype = QuantType.F32 if type_name is None else self._type(type_name)
        try:
            wanted = math.prod(shape[:-1]) * row_bytes(qtype, shape[-1])
        except ValueError as error:
            raise TensorMismatchError(f"expert tensor {name!r}: {error}") from error
        if tensor.nbytes != wanted:
            raise TensorMismatchError(
                f"expert tensor {name!r} has {tensor.nbytes} bytes; {list(shape)} in {qtype.name} needs {wanted}"
            )
        return MergedExperts(name, qtype, shape, (name,) if type_name is None else (name, type_name))

    def _type(self, name: str) -> QuantType:
        tensor = self._tensors[name]
        if tensor.dtype not in _TYPE_BYTES or math.prod(tensor.shape) != 1:
            raise UnsupportedError(f"tensor {name!r} must be one whole number, the type of the blocks beside it")
        number = int.from_bytes(bytes(self._model.bytes_of(name).numpy()), "little")
        try:
            return QuantType(number)
        except ValueError as error:
            raise UnsupportedError(f"tensor {name!r} names GGML type {number}, which is not known here") from error


def merged_info(key: str, merged: Mapping[str, MergedExperts], quantize_to: QuantType | None) -> ExpertsInfo:
    """Return facts about experts that are stored as GGML blocks."""
    infos = {
        part: expert_info(f"{key}.{part}", found.qtype.name, found.natural, found.shape, found.sources, quantize_to)
        for part, found in merged.items()
    }
    return ExpertsInfo.of(infos, {})

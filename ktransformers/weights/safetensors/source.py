"""A model's weights in safetensors files, as a WeightSource. BF16, F16 and F32 come back as views of the memory map."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch

from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.kernels.types import (
    FP8_BLOCK,
    ExpertWeights,
    Fp8Matrix,
    OwnType,
    QuantType,
    RawTensor,
    WeightType,
    row_bytes,
)
from ktransformers.models.facts import ModelFacts
from ktransformers.weights.conversion.checkpoint_names import CheckpointNames, Origin
from ktransformers.weights.conversion.operations import converted, converted_shape, sizes_of
from ktransformers.weights.experts import (
    BlockScaledMatrix,
    ExpertMatrix,
    FloatMatrix,
    StoredMatrices,
    check_exact,
    check_expert_shape,
    expert_info,
)
from ktransformers.weights.mapped_file import typed_view
from ktransformers.weights.safetensors.file import SafetensorsModel
from ktransformers.weights.safetensors.fused_experts import FusedPart, by_expert, fused_parts
from ktransformers.weights.safetensors.low_bits import LowBitTensor, find_low_bits
from ktransformers.weights.safetensors.merged import MergedExperts, MergedTensors, merged_info
from ktransformers.weights.safetensors.quantization import check_quantization, scale_block, scale_names
from ktransformers.weights.source import ExpertBiases, ExpertsInfo, ExpertsLayout, MappedExperts, TensorInfo

__all__ = ["SafetensorsSource"]

logger = logging.getLogger(__name__)

FP8 = "F8_E4M3"
_NATURAL = {"F32": QuantType.F32, "F16": QuantType.F16, "BF16": QuantType.BF16, FP8: QuantType.BF16}
_TABLE = re.compile(r".*\.(tid2eid|token_ordering)")
"""Whole numbers, experts of each token or tokens of each cluster: read as F32, which holds them exactly."""
_TABLE_TYPES = ("I32", "I64")
_SCALE_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.float8_e8m0fnu,
}
_IGNORABLE = (
    re.compile(r".*\.(input|activation|input_global)_scale(_ub)?"),  # of activations, which are never as the files say
    re.compile(r".*rotary_emb\.inv_freq"),  # computed from the config
    re.compile(r"(.*\.)?mtp(_block)?\..*"),  # multi-token prediction: drafts tokens, no part of the model's answer
    re.compile(r".*\.(k|v)_scale"),  # of FP8 KV caches
)
_LOOKED_UP = ".ngram_embedding.shard_"  # no kernel multiplies with them
_Stored = tuple[str, ...] | FusedPart


class SafetensorsSource:
    """WeightSource over the safetensors files of one model. facts are those of the module tree.

    shapes: of the module tree's parameters by name, for files with tensors that are split by them. names: what files
    call them; None: as the facts say.
    """

    def __init__(
        self,
        model: SafetensorsModel,
        facts: ModelFacts,
        shapes: Mapping[str, Sequence[int]] | None = None,
        names: CheckpointNames | None = None,
    ):
        check_quantization(facts.quantization)
        self._model, self._shapes = model, shapes or {}
        self._stored = model.tensors
        self._low = find_low_bits(model, facts.quantization)
        parts = {part for low in self._low.values() for part in low.parts}
        self._tensors = {name: tensor for name, tensor in self._stored.items() if name not in parts}
        self._tensors |= {name: low.header for name, low in self._low.items()}
        self._facts = facts
        self._names = names or CheckpointNames(facts.model_type, self._tensors, facts.composite_type, self._shapes)
        self._others = frozenset(part for name in self._names.others for part in self._parts(name))
        self._merged = MergedTensors.of(model, facts)
        self._block = scale_block(facts.quantization)
        self._log_fp8()

    def describe(self) -> str:
        """Return a line for the console: format, files, bytes."""
        types = Counter(tensor.dtype for tensor in self._tensors.values())
        mix = ", ".join(f"{count} {name}" for name, count in types.most_common())
        nbytes = sum(tensor.nbytes for tensor in self._tensors.values())
        files = len(self._model.files)
        return (
            f"safetensors, {files} file{'s' * (files > 1)}, {nbytes / 1e9:.2f} GB, {len(self._tensors)} tensors ({mix})"
        )

    def stored_names(self) -> Sequence[str]:
        """Return every tensor in the files, under its own name there."""
        return tuple(self._stored)

    def ignorable(self, stored_name: str) -> bool:
        """Whether a stored tensor that no module asked for may be left over."""
        if stored_name in self._others:
            return True
        layer = re.search(r"(?:^|\.)(?:layers|blk)\.(\d+)\.", stored_name)
        if layer is not None:  # layers for multi-token prediction follow the model's own
            first = self._facts.num_layers
            if first <= int(layer[1]) < first + self._facts.num_prediction_layers:
                return True
        if stored_name.endswith("lm_head.weight") and self._facts.is_tied:
            return True
        return any(pattern.fullmatch(stored_name) for pattern in _IGNORABLE)

    @property
    def others(self) -> frozenset[str]:
        """Stored names of what a composite has beside its language model."""
        return self._others

    def stored_bytes(self, stored_name: str) -> torch.Tensor | None:
        """Return the bytes of a stored tensor in its mapped file."""
        return self._model.bytes_of(stored_name)

    def find(self, name: str) -> TensorInfo | None:
        """Return facts about the tensor that HF calls `name`, or None when the files do not hold it."""
        origin = self._origin(name)
        if origin is None:
            return None
        shape = self._shape(name, origin)
        types = tuple(dict.fromkeys(self._tensors[part].dtype for part in origin.sources))
        low = self._low_bits(origin)
        resident = self._natural(origin.sources[0]) if low is None else low.resident
        nbytes = math.prod(shape[:-1]) * row_bytes(resident, shape[-1]) if shape else 4
        is_fp8 = not origin.operations and self._is_native_fp8(origin.sources[0])
        used = tuple(name for source in origin.sources for name in self._parts(source))
        return TensorInfo(name, shape, "+".join(types), resident, nbytes, used, is_fp8)

    def tensor(self, name: str) -> RawTensor:
        """Return a tensor in a type the native kernels read. Raises TensorMismatchError when it is missing."""
        origin = self._found(name)
        low = self._low_bits(origin)
        if low is not None:
            return low.load()
        dtype = {QuantType.F32: torch.float32, QuantType.F16: torch.float16}.get(
            self._natural(origin.sources[0]), torch.bfloat16
        )
        return RawTensor.from_tensor(self._assemble(name, origin, dtype))

    def fp8(self, name: str) -> Fp8Matrix:
        """Return an FP8 matrix as the files hold it. Raises TensorMismatchError when it is missing or not of
        that kind.
        """
        origin = self._found(name)
        stored = origin.sources[0]
        if origin.operations or not self._is_native_fp8(stored):
            raise TensorMismatchError(f"{name!r} is stored as {self._tensors[stored].dtype}; read it with tensor()")
        return self._fp8_matrix(stored).fp8()

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor dequantized, as a new tensor of its logical shape. Raises TensorMismatchError when
        missing.
        """
        out = self._assemble(name, self._found(name), dtype)
        return out.clone() if self._is_mapped(out) else out

    def find_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertsInfo | None:
        """Return facts about the experts of module `key` ("model.layers.3.mlp.experts")."""
        merged = self._merged_experts(key, layout)
        if merged is not None:
            return merged_info(key, merged, quantize_to)
        stored = self._expert_names(key, layout)
        if stored is None:
            return None
        experts, inner, hidden = layout.num_experts, layout.intermediate_size, layout.hidden_size
        infos: dict[str, TensorInfo] = {}
        for part, where in stored.items():
            names = _names_of(where)
            shape = (experts, hidden, inner) if part == "down" else (experts, inner, hidden)
            types = sorted({self._tensors[name].dtype for name in names})
            if len(types) > 1:
                raise TensorMismatchError(f"the experts of {key!r} have different dtypes ({', '.join(types)})")
            used = tuple(part for name in names for part in self._parts(name))
            natural: WeightType = self._low[names[0]].resident if names[0] in self._low else self._natural(names[0])
            if self._are_native_fp8(where, layout):
                natural = OwnType.F8_E4M3
            infos[part] = expert_info(f"{key}.{part}", types[0], natural, shape, used, quantize_to)
        return ExpertsInfo.of(infos, {name: self._tensors[name].shape for name in self._bias_names(key, layout)})

    def experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertWeights:
        """Return the experts of module `key`, one [I, H], [I, H] and [H, I] matrix per expert.

        Raises TensorMismatchError when an expert is missing or has the wrong shape.
        """
        return self._stored_experts(key, layout, quantize_to).load()

    def mapped_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> MappedExperts:
        """Return the experts of module `key` as views of the mapped files, or why there are none."""
        return self._stored_experts(key, layout, quantize_to).mapped()

    def _stored_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None) -> StoredMatrices:
        info = self.find_experts(key, layout, quantize_to)
        merged = self._merged_experts(key, layout)
        if self._merged is not None and merged is not None and info is not None:
            blocks = {part: self._merged.matrices(found) for part, found in merged.items()}
            return StoredMatrices(info, blocks, ExpertBiases())
        stored = self._expert_names(key, layout)
        if info is None or stored is None:
            raise TensorMismatchError(f"the safetensors files hold no experts for {key!r}; are they of another model?")
        parts = {part: self._matrices(part, names, layout) for part, names in stored.items()}
        return StoredMatrices(info, parts, ExpertBiases(**self._biases(key, layout)))

    # -- dense tensors

    def _parts(self, name: str) -> tuple[str, ...]:
        """The stored tensors that the tensor `name` is made of."""
        if name in self._low:
            return self._low[name].parts
        scale = self._scale_name(name)
        return (name,) if scale is None else (name, scale)

    def _low_bits(self, origin: Origin) -> LowBitTensor | None:
        """The matrix of few bits that a parameter is, None where it is none or made of several or of a part of one."""
        if origin.operations and origin.sources[0] in self._low:
            _log_dequantized(origin.operations)
        return None if origin.operations else self._low.get(origin.sources[0])

    def _origin(self, name: str) -> Origin | None:
        origin = self._names.find(name)
        if origin is None and self._merged is not None:
            origin = self._merged.find(name)
        if origin is None and name == "lm_head.weight" and self._facts.is_tied:
            return self._names.find("model.embed_tokens.weight")
        return origin

    def _found(self, name: str) -> Origin:
        origin = self._origin(name)
        if origin is None:
            raise TensorMismatchError(f"the safetensors files hold no tensor for {name!r}; are they of another model?")
        return origin

    def _shape(self, name: str, origin: Origin) -> tuple[int, ...]:
        shapes = [self._tensors[part].shape for part in origin.sources]
        if not origin.operations:
            return shapes[0]
        try:
            return converted_shape(shapes, origin, sizes_of(origin, self._shapes))
        except (TensorMismatchError, UnsupportedError) as error:
            raise type(error)(
                f"tensor {name!r} is made from {', '.join(origin.sources[:3])} (shapes {shapes[:3]}): {error}"
            ) from error

    def _assemble(self, name: str, origin: Origin, dtype: torch.dtype) -> torch.Tensor:
        """The parameter as `dtype`: a view of the map where nothing has to change."""
        self._shape(name, origin)  # refuses what cannot be assembled
        parts = [self._values(part, dtype) for part in origin.sources]
        return converted(parts, origin, sizes_of(origin, self._shapes)) if origin.operations else parts[0]

    def _values(self, stored: str, dtype: torch.dtype) -> torch.Tensor:
        self._natural(stored)
        if stored in self._low:
            return self._low[stored].dense(dtype)
        if self._is_table(stored):
            return check_exact(self._model.torch_tensor(stored), stored).to(dtype)
        if self._tensors[stored].dtype != FP8:
            return self._model.torch_tensor(stored).to(dtype)
        matrix = self._fp8_matrix(stored)
        out = torch.empty(matrix.shape, dtype=dtype)
        step = max(1, (1 << 20) // max(matrix.shape[1], 1))
        for start in range(0, matrix.shape[0], step):
            out[start : start + step] = matrix.rows_f32(start, min(start + step, matrix.shape[0]))
        return out

    def _is_table(self, stored: str) -> bool:
        return self._tensors[stored].dtype in _TABLE_TYPES and _TABLE.fullmatch(stored) is not None

    def _natural(self, stored: str) -> QuantType:
        dtype = self._tensors[stored].dtype
        if self._is_table(stored) or stored in self._low:
            return QuantType.F32
        if dtype not in _NATURAL:
            raise UnsupportedError(
                f"tensor {stored!r} is stored as {dtype}, which is no type of model weights that can be read; "
                f"{', '.join(_NATURAL)} are"
            )
        if dtype == FP8 and len(self._tensors[stored].shape) == 2 and _LOOKED_UP not in stored:
            self._fp8_block(stored)  # refuses what does not fit, before anything is loaded
        if dtype == FP8 and self._tensors[stored].shape[-1] % 32 and not self._is_native_fp8(stored):
            return QuantType.F32  # no type of blocks holds such rows, and BF16 would round them
        return _NATURAL[dtype]

    def _is_mapped(self, values: torch.Tensor) -> bool:
        pointer = values.untyped_storage().data_ptr()
        return any(file.data.untyped_storage().data_ptr() == pointer for file in self._model.files)

    # -- FP8

    def _log_fp8(self) -> None:
        stored = [name for name, tensor in self._tensors.items() if tensor.dtype == FP8 and _LOOKED_UP not in name]
        widened = sum(not self._is_native_fp8(name) for name in stored)
        if widened:
            logger.warning(
                "%d of %d FP8 tensors are held as BF16 unless they are quantized while loading: kernels want one scale "
                "per matrix, per %d x %d weights, or per block of a multiple of 32 columns in one matrix",
                widened,
                len(stored),
                FP8_BLOCK,
                FP8_BLOCK,
            )
        elif stored:
            logger.info("%d FP8 matrices are computed with as they are", len(stored))

    def _is_native_fp8(self, stored: str) -> bool:
        """Whether kernels compute with it in place, from headers alone: Fp8Matrix can hold it."""
        tensor, scale = self._tensors[stored], self._scale_name(stored)
        if scale is None or len(tensor.shape) != 2 or tensor.shape[1] % 4:
            return False
        blocks = tuple(-(-size // FP8_BLOCK) for size in tensor.shape)
        shape = self._tensors[scale].shape
        return math.prod(shape) == 1 or (self._block == (FP8_BLOCK, FP8_BLOCK) and shape == blocks)

    def _scale_name(self, stored: str) -> str | None:
        if self._tensors[stored].dtype != FP8:
            return None
        return next((name for name in scale_names(stored) if name in self._tensors), None)

    def _scales(self, stored: str) -> torch.Tensor:
        name = self._scale_of(stored)
        dtype = _SCALE_DTYPES.get(self._tensors[name].dtype)
        if dtype is None:
            raise UnsupportedError(
                f"scales {name!r} are {self._tensors[name].dtype}; {', '.join(_SCALE_DTYPES)} are supported"
            )
        return typed_view(self._model.bytes_of(name), dtype).reshape(self._tensors[name].shape).float()

    def _scale_of(self, stored: str) -> str:
        name = self._scale_name(stored)
        if name is None:
            raise TensorMismatchError(f"FP8 tensor {stored!r} has no {next(scale_names(stored))!r} beside it")
        return name

    def _fp8_block(self, stored: str) -> tuple[int, int]:
        """The rows and columns that share a scale, from headers alone."""
        shape, scales = self._tensors[stored].shape, self._tensors[self._scale_of(stored)].shape
        if len(shape) != 2:
            raise UnsupportedError(f"FP8 tensor {stored!r} has {len(shape)} dimensions; only matrices are supported")
        rows, cols = shape
        if math.prod(scales) == 1:
            return (rows, cols)
        if scales == (rows, 1):
            return (1, cols)
        wanted = (-(-rows // self._block[0]), -(-cols // self._block[1]))
        if scales != wanted:
            raise TensorMismatchError(
                f"the scales of FP8 tensor {stored!r} have the shape {list(scales)}; "
                f"[{rows}, {cols}] in blocks of {self._block[0]} x {self._block[1]} needs {list(wanted)}"
            )
        return self._block

    def _fp8_matrix(self, stored: str) -> BlockScaledMatrix:
        block, scales = self._fp8_block(stored), self._scales(stored)
        scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
        return BlockScaledMatrix(self._model.torch_tensor(stored), scales, block)

    # -- experts

    def _merged_experts(self, key: str, layout: ExpertsLayout) -> dict[str, MergedExperts] | None:
        return None if self._merged is None else self._merged.experts(key, layout)

    def _expert_names(self, key: str, layout: ExpertsLayout) -> dict[str, _Stored] | None:
        """By projection: names of one matrix per expert, or where in one tensor. None when there are none at all."""
        parts = ("gate", "up", "down") if layout.has_gate else ("up", "down")
        for candidate in (key, key.removeprefix("model.")):
            single = {part: self._names.experts.get((candidate, part), {}) for part in parts}
            single = {part: _without_identities(names, layout) for part, names in single.items()}
            if any(single.values()):
                return {part: self._complete(key, part, names, layout.num_experts) for part, names in single.items()}
        up = self._names.find(f"{key}.gate_up_proj" if layout.has_gate else f"{key}.up_proj")
        down = self._names.find(f"{key}.down_proj")
        if up is None and down is None:
            return None
        if up is None or down is None:
            raise TensorMismatchError(f"{key!r}: the files hold only one of the experts' two fused tensors")
        shapes = [[self._tensors[name].shape for name in origin.sources] for origin in (up, down)]
        if up.sources[0] in self._low:  # in rows, whatever the module has
            layout = replace(layout, is_transposed=False)
        found = fused_parts(up, down, layout, shapes)
        if found is None:
            made = ", ".join(up.operations or down.operations)
            raise UnsupportedError(f"{key!r}: fused experts made from the checkpoint by {made} are not supported")
        return dict(found)

    def _complete(self, key: str, part: str, names: dict[int, str], count: int) -> tuple[str, ...]:
        if sorted(names) != list(range(count)):
            missing = sorted(set(range(count)) - names.keys())[:5]
            raise TensorMismatchError(
                f"{key!r}: the files hold {len(names)} experts' {part} matrices, the model has {count}"
                + (f"; missing are {missing}" if missing else "")
            )
        return tuple(names[index] for index in range(count))

    def _matrices(self, part: str, where: _Stored, layout: ExpertsLayout) -> list[ExpertMatrix]:
        inner, hidden = layout.intermediate_size, layout.hidden_size
        shape = (hidden, inner) if part == "down" else (inner, hidden)
        if not isinstance(where, FusedPart):
            for name in where:
                check_expert_shape(name, self._tensors[name].shape, shape)
            return [self._matrix(name) for name in where]
        if where.stored in self._low:
            rows = slice(where.start, where.stop, where.step)
            return [self._low[where.stored].matrix(e, rows) for e in range(layout.num_experts)]
        fused = self._model.torch_tensor(where.stored)
        if self._tensors[where.stored].dtype != FP8:
            fused = fused.view(by_expert(tuple(fused.shape), layout.num_experts))
            return [FloatMatrix(where.of(fused[e])) for e in range(layout.num_experts)]
        scales = self._scales(where.stored).reshape(layout.num_experts, *self._scale_grid(where.stored))
        return [where.scaled(fused[e], scales[e], self._block) for e in range(layout.num_experts)]

    def _scale_grid(self, stored: str) -> tuple[int, ...]:
        """The shape of one expert's scales in a fused tensor. Raises TensorMismatchError."""
        name = self._scale_name(stored)
        shape = () if name is None else self._tensors[name].shape
        if not shape or shape[0] != self._tensors[stored].shape[0]:
            raise TensorMismatchError(
                f"the scales of FP8 tensor {stored!r} have the shape {list(shape)}: not by expert"
            )
        return shape[1:]

    def _matrix(self, stored: str) -> ExpertMatrix:
        if stored in self._low:
            return self._low[stored].matrix(0, slice(None))
        if self._tensors[stored].dtype != FP8:
            return FloatMatrix(self._model.torch_tensor(stored))
        return self._fp8_matrix(stored)

    def _are_native_fp8(self, where: _Stored, layout: ExpertsLayout) -> bool:
        """Whether kernels compute with these experts in place, from headers alone."""
        if not isinstance(where, FusedPart):
            return all(self._is_native_fp8(name) for name in where)
        tensor = self._tensors[where.stored]
        if tensor.dtype != FP8 or len(tensor.shape) != 3 or not where.is_in_rows or tensor.shape[2] % 4:
            return False
        if where.start % FP8_BLOCK:
            return False
        blocks = tuple(-(-size // FP8_BLOCK) for size in tensor.shape[1:])
        grid = self._scale_grid(where.stored)
        return math.prod(grid) == 1 or (self._block == (FP8_BLOCK, FP8_BLOCK) and grid == blocks)

    def _bias_names(self, key: str, layout: ExpertsLayout) -> tuple[str, ...]:
        if not layout.has_bias:
            return ()
        first = "gate_up_proj_bias" if layout.has_gate else "up_proj_bias"
        return tuple(self._found(f"{key}.{kind}").sources[0] for kind in (first, "down_proj_bias"))

    def _biases(self, key: str, layout: ExpertsLayout) -> dict[str, torch.Tensor]:
        if not layout.has_bias:
            return {}
        up_name, down_name = self._bias_names(key, layout)
        inner, count = layout.intermediate_size, layout.num_experts
        check_expert_shape(up_name, self._tensors[up_name].shape, (count, inner * (2 if layout.has_gate else 1)))
        check_expert_shape(down_name, self._tensors[down_name].shape, (count, layout.hidden_size))
        up = self._model.torch_tensor(up_name).float().clone()
        out = {"up": up, "down": self._model.torch_tensor(down_name).float().clone()}
        if layout.has_gate:
            halves = (up[:, :inner], up[:, inner:]) if layout.is_concatenated else (up[:, 0::2], up[:, 1::2])
            out["gate"], out["up"] = halves[0].contiguous(), halves[1].contiguous()
        return out


@cache
def _log_dequantized(operations: tuple[str, ...]) -> None:
    logger.warning(
        "matrices of few bits that the model has in another shape (%s) are held in F32", ", ".join(operations)
    )


def _names_of(where: _Stored) -> tuple[str, ...]:
    return (where.stored,) if isinstance(where, FusedPart) else where


def _without_identities(names: dict[int, str], layout: ExpertsLayout) -> dict[int, str]:
    """Without experts that need no weights; transformers saves some of them all the same."""
    identities = range(layout.num_experts, layout.num_experts + layout.num_identities)
    return {number: name for number, name in names.items() if number not in identities}

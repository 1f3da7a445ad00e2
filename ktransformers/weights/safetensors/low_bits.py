"""Matrices of few bits in safetensors: finds the stored tensors that make one, and the name by which a model asks for
it.

What is quantized is said by the tensors themselves; a module that the config's ignore, exclude_modules or
modules_to_not_convert names has an unquantized weight in the file and is read as that. X.weight is made from

    X.weight_packed, _scale, _shape [, _zero_point, _g_idx]   compressed-tensors pack-quantized, 4 or 8 bits
    X.weight_packed, _scale, _global_scale                    its nvfp4-pack-quantized; without the last mxfp4
    X.weight (I8), X.weight_scale [, _zero_point]             its int-quantized
    X.weight (F8_E4M3), X.weight_scale [rows, 1]              FP8 per channel: compressed-tensors, fbgemm
    X.weight (F8_E4M3), X.weight_scale [_inv] (bytes)         MXFP8
    X.weight (F8_E4M3), its scales by blocks but 128 x 128    FP8 of DeepSeek-V4.1 (32 x 32), compressed-tensors
    X.weight (I8, two columns in a byte), X.scale (F8_E8M0)   FP4 of DeepSeek-V4's experts
    X.weight (U8), X.weight_scale, X.weight_scale_2           modelopt's NVFP4
    X.qweight, X.scales [, X.qzeros, X.g_idx]                 GPTQ, AWQ: the config says which, and of AWQ's two ways
    X_blocks, X_scales                                        MXFP4 of gpt-oss; X has all experts' rows

MXFP8's scales are bytes of dtype U8, one for 32 columns: MiniMax-M3 calls them weight_scale_inv, the name under which
transformers' quantizer for quant_method mxfp8 (integrations/finegrained_fp8.py) reads them; compressed-tensors and
modelopt write weight_scale.

Scales of FP8 have any of the names of quantization.scale_names. FP8 with one scale, per 128 x 128, or per block whose
columns are no multiple of 32, is no matrix of this module.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.kernels.types import FP8_BLOCK, BlockType, RawTensor, row_bytes
from ktransformers.models.facts import Quantization
from ktransformers.weights.experts import FLOAT_DTYPES
from ktransformers.weights.mapped_file import typed_view
from ktransformers.weights.safetensors.codes import SCALE_DTYPES, CodeKind, CodeSpec, LowBitMatrix
from ktransformers.weights.safetensors.file import SafetensorsModel, SafetensorsTensor
from ktransformers.weights.safetensors.packings import ByteRows, ColumnWords, GemvRows, PairRows, WordRows
from ktransformers.weights.safetensors.quantization import scale_block, scale_names, weight_groups

__all__ = ["LowBitTensor", "find_low_bits"]

logger = logging.getLogger(__name__)

_SCALES = {"F32": "F32", "F16": "F16", "BF16": "BF16", "U8": "E8M0", "F8_E8M0": "E8M0", "F8_E4M3": "E4M3"}
_RAW = {"I32": torch.int32, "I64": torch.int64, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.uint8}
_NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LowBitTensor:
    """Quantized matrix [rows, cols], or those of all experts [E, rows, cols].

    parts: the stored tensors that it is made of. matrix(expert, rows): the matrix of an expert (0 where there is one),
    or some of its rows.
    """

    name: str
    shape: tuple[int, ...]
    spec: CodeSpec
    parts: tuple[str, ...]
    nbytes: int
    matrix: Callable[[int, slice], LowBitMatrix]

    @property
    def resident(self) -> BlockType:
        return self.spec.resident

    @property
    def header(self) -> SafetensorsTensor:
        """Header of the matrix as if it were stored in one piece; nothing is at its offset."""
        return SafetensorsTensor(self.name, self.spec.name, self.shape, 0, self.nbytes)

    def load(self) -> RawTensor:
        """Load all of the matrix in the type `resident`."""
        matrix = self.matrix(0, slice(None))
        rows, cols = matrix.shape
        out = torch.empty(rows * row_bytes(self.resident, cols), dtype=torch.uint8)
        raw = RawTensor(out, self.resident, (rows, cols))
        matrix.write_blocks(raw)
        return raw

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix dequantized, rounded once."""
        matrices = [self.matrix(e, slice(None)) for e in range(math.prod(self.shape[:-2]))]
        return torch.stack([one.rows_f32(0, one.rows).to(dtype) for one in matrices]).view(self.shape)


def find_low_bits(model: SafetensorsModel, quantization: Quantization | None) -> dict[str, LowBitTensor]:
    """Find the matrices of few bits, by the name that the parameter has unquantized. Raises UnsupportedError and
    TensorMismatchError.
    """
    found = _Finder(model, quantization).found()
    wide = sum(one.resident in FLOAT_DTYPES for one in found.values())
    if wide:
        logger.warning(
            "%d of %d matrices of few bits are held in floats: their columns are of groups in any order (GPTQ with "
            "desc_act, compressed-tensors with actorder), or of groups that are no multiples of 32",
            wide,
            len(found),
        )
    return found


class _Finder:
    """Goes through one model's tensors."""

    def __init__(self, model: SafetensorsModel, quantization: Quantization | None):
        self._model, self._tensors = model, model.tensors
        self._method = None if quantization is None else quantization.method
        self._fields: Mapping[str, object] = {} if quantization is None else quantization.fields
        self._block = scale_block(quantization)

    def found(self) -> dict[str, LowBitTensor]:
        made = (self._of(name, tensor) for name, tensor in self._tensors.items())
        return {one.name: one for one in made if one is not None}

    def _of(self, name: str, tensor: SafetensorsTensor) -> LowBitTensor | None:
        """The matrix whose codes a tensor holds, if it holds any."""
        base, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            return self._words(base, tensor) if tensor.dtype == "I32" else self._pairs(base, tensor)
        if kind == "qweight":
            return self._columns(base, tensor)
        if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in self._tensors:
            return self._expert_blocks(name.removesuffix("_blocks"), tensor)
        if kind != "weight" or len(tensor.shape) != 2:
            return None
        if tensor.dtype == "U8" and f"{name}_scale_2" in self._tensors:
            return self._pairs(base, tensor)
        if tensor.dtype == "I8" and f"{name}_scale" in self._tensors:
            return self._integers(name, tensor)
        if tensor.dtype == "I8" and f"{base}.scale" in self._tensors:
            return self._pairs(base, tensor, f"{base}.scale")
        return self._fp8(name, tensor) if tensor.dtype == "F8_E4M3" else None

    # -- layouts

    def _words(self, base: str, tensor: SafetensorsTensor) -> LowBitTensor:
        name = f"{base}.weight"
        shape_name, scale_name, zero_name, index_name = (
            f"{name}_{part}" for part in ("shape", "scale", "zero_point", "g_idx")
        )
        self._need(name, shape_name, scale_name)
        scale = self._tensors[scale_name]
        if len(tensor.shape) != 2 or len(scale.shape) != 2:
            raise TensorMismatchError(f"{name!r} has codes {list(tensor.shape)} and scales {list(scale.shape)}")
        # The config spares reading a page of the file for every matrix of a model that has tens of thousands.
        bits, rows = self._config_bits(), tensor.shape[0]
        cols = tensor.shape[1] * 32 // bits if bits is not None else self._stored_shape(name, rows)[1]
        bits = next((b for b in (4, 8) if -(-cols * b // 32) == tensor.shape[1]), None)
        if bits is None:
            raise UnsupportedError(f"{name!r} is packed in neither 4 nor 8 bits a weight; use another version of it")
        kind = CodeKind.I4 if bits == 4 else CodeKind.I8
        has_zeros, is_shuffled = zero_name in self._tensors, self._is_shuffled(index_name)
        group = self._group(name, cols, scale.shape, rows)
        spec = CodeSpec(kind, cols, group, self._scale_kind(scale_name), has_zeros, is_shuffled)
        parts = self._parts(f"{name}_packed", scale_name, shape_name, zero_name, index_name)

        def matrix(_: int, __: slice) -> LowBitMatrix:
            if self._stored_shape(name, rows)[1] != cols:
                raise TensorMismatchError(f"{name!r} has {cols} columns by its codes, and others by {shape_name!r}")
            zeros = self._raw(zero_name) if has_zeros else None
            index = self._index(index_name, scale.shape[1], cols) if is_shuffled else None
            read = WordRows(self._raw(f"{name}_packed"), self._scales(scale_name), zeros, bits, cols, index).read
            return LowBitMatrix(spec, rows, read)

        return self._made(name, (rows, cols), spec, parts, matrix)

    def _pairs(self, base: str, tensor: SafetensorsTensor, scale_name: str | None = None) -> LowBitTensor:
        name, codes = f"{base}.weight", tensor.name
        scale_name = scale_name or f"{name}_scale"
        self._need(name, scale_name)
        rows, cols = tensor.shape[0], 2 * tensor.shape[-1]
        group = self._group(name, cols, self._tensors[scale_name].shape, rows)
        spec = CodeSpec(CodeKind.E2M1, cols, group, self._scale_kind(scale_name))
        divisor, factor = f"{name}_global_scale", f"{name}_scale_2"
        if spec.scales == "E4M3" and divisor not in self._tensors and factor not in self._tensors:
            raise TensorMismatchError(f"{name!r} has neither {divisor!r} nor {factor!r} beside it; is a file missing?")

        def matrix(_: int, __: slice) -> LowBitMatrix:
            numbers = None
            if spec.scales == "E4M3":
                is_factor = factor in self._tensors
                number = self._floats(factor if is_factor else divisor).float()
                numbers = (number if is_factor else 1 / number).reshape(-1).expand(rows)
            return LowBitMatrix(spec, rows, PairRows(self._raw(codes), self._scales(scale_name), numbers).read)

        return self._made(name, (rows, cols), spec, self._parts(codes, scale_name, divisor, factor), matrix)

    def _integers(self, name: str, tensor: SafetensorsTensor) -> LowBitTensor:
        rows, cols = tensor.shape
        scale_name, zero_name = f"{name}_scale", f"{name}_zero_point"
        group = self._group(name, cols, self._tensors[scale_name].shape, rows)
        has_zeros = zero_name in self._tensors
        spec = CodeSpec(CodeKind.I8, cols, group, self._scale_kind(scale_name), has_zeros)

        def matrix(_: int, __: slice) -> LowBitMatrix:
            zeros = self._raw(zero_name).reshape(-1, cols // group if cols % group == 0 else 1) if has_zeros else None
            zeros = None if zeros is None else zeros.expand(rows, -1)
            scales = _by_row(self._scales(scale_name), rows)
            return LowBitMatrix(spec, rows, ByteRows(CodeKind.I8, self._raw(name), scales, zeros).read)

        return self._made(name, (rows, cols), spec, self._parts(name, scale_name, zero_name), matrix)

    def _fp8(self, name: str, tensor: SafetensorsTensor) -> LowBitTensor | None:
        """None for one scale for all, and for blocks of rows and columns that kernels or BF16 hold."""
        rows, cols = tensor.shape
        scale_name = next((one for one in scale_names(name) if one in self._tensors), None)
        if scale_name is None and self._method == "mxfp8":
            raise TensorMismatchError(
                f"the config says mxfp8, and {name!r} has neither {name + '_scale_inv'!r} nor {name + '_scale'!r} "
                "beside it; is a file missing?"
            )
        if scale_name is None:
            return None
        scale = self._tensors[scale_name]
        block_rows, group = self._block
        if scale.shape == (-(-rows // block_rows), -(-cols // group)) and math.prod(scale.shape) > 1:
            if self._block == (FP8_BLOCK, FP8_BLOCK) or (group % 32 and group < cols):
                return None
        else:
            groups = 1 if scale.shape == (rows,) else scale.shape[1] if len(scale.shape) == 2 else 0
            if rows == 1 or scale.shape[:1] != (rows,) or not groups:
                return None
            block_rows, group = 1, self._group(name, cols, scale.shape, rows)
        spec = CodeSpec(CodeKind.E4M3, cols, min(group, cols), self._scale_kind(scale_name))

        def matrix(_: int, __: slice) -> LowBitMatrix:
            scales = _by_row(self._scales(scale_name), -(-rows // block_rows))
            read = ByteRows(CodeKind.E4M3, self._raw(name), scales, block_rows=block_rows).read
            return LowBitMatrix(spec, rows, read)

        return self._made(name, (rows, cols), spec, (name, scale_name), matrix)

    def _columns(self, base: str, tensor: SafetensorsTensor) -> LowBitTensor:
        name, words, scale_name = f"{base}.weight", f"{base}.qweight", f"{base}.scales"
        zero_name, index_name = f"{base}.qzeros", f"{base}.g_idx"
        self._need(name, scale_name)
        is_awq = self._method == "awq"
        if is_awq and str(self._fields.get("version") or "gemm").lower() == "gemv":
            return self._rows_of_awq(name, tensor)
        if not is_awq and self._method != "gptq":
            raise UnsupportedError(
                f"{words!r} is of GPTQ or of AWQ, and the config's quantization_config says neither; add its "
                "quant_method"
            )
        groups, rows = self._tensors[scale_name].shape
        zeros = self._tensors.get(zero_name)
        bits = self._fields.get("bits", self._fields.get("w_bit", 4))
        if zeros is not None:  # which knows of modules that the config has exceptions for
            bits = zeros.shape[-1] * 32 // max(rows, 1)
        if bits not in ((4,) if is_awq else (4, 8)) or tensor.dtype != "I32" or len(tensor.shape) != 2:
            raise UnsupportedError(
                f"{words!r} holds {self._method} of {bits} bits; 4 bits are supported, and 8 of GPTQ"
            )
        cols = tensor.shape[0] if is_awq else tensor.shape[0] * 32 // int(str(bits))
        is_symmetric = not is_awq and bool(self._fields.get("sym", True))
        has_zeros = zeros is not None and not is_symmetric
        is_shuffled = self._is_shuffled(index_name)
        kind = CodeKind.I4 if bits == 4 else CodeKind.I8
        group = self._group(name, cols, (rows, groups), rows)
        spec = CodeSpec(kind, cols, group, self._scale_kind(scale_name), has_zeros, is_shuffled)
        offset = 0 if is_awq or self._fields.get("checkpoint_format") == "gptq_v2" else 1

        def matrix(_: int, __: slice) -> LowBitMatrix:
            points = None if zeros is None else self._raw(zero_name)
            index = self._index(index_name, groups, cols) if is_shuffled else None
            columns = ColumnWords(
                self._raw(words), self._scales(scale_name), points, spec.kind, is_awq, offset, index, not has_zeros
            )
            return LowBitMatrix(spec, rows, columns.read)

        return self._made(name, (rows, cols), spec, self._parts(words, scale_name, zero_name, index_name), matrix)

    def _rows_of_awq(self, name: str, tensor: SafetensorsTensor) -> LowBitTensor:
        """AWQ packed for gemv: as rows, with more scales and zero points than there are groups."""
        words, scale_name, zero_name = tensor.name, f"{name[:-6]}scales", f"{name[:-6]}qzeros"
        self._need(name, scale_name, zero_name)
        size, scale, zeros = (self._fields.get("group_size", 128), self._tensors[scale_name], self._tensors[zero_name])
        if len(tensor.shape) != 2 or tensor.dtype != "I32" or not isinstance(size, int):
            raise UnsupportedError(f"{words!r} holds no AWQ of 4 bits packed for gemv; use the BF16 safetensors")
        rows, cols = tensor.shape[0], tensor.shape[1] * 8
        size = size if size > 0 else cols
        groups = -(-cols // size)
        if scale.shape != (rows, zeros.shape[-1] * 8) or zeros.shape[0] != rows or scale.shape[1] < groups:
            raise TensorMismatchError(
                f"{words!r} [{rows}, {tensor.shape[1]}] has scales {list(scale.shape)} and zero points "
                f"{list(zeros.shape)} beside it, for {groups} groups"
            )
        spec = CodeSpec(CodeKind.I4, cols, size, self._scale_kind(scale_name), has_zeros=True)

        def matrix(_: int, __: slice) -> LowBitMatrix:
            read = GemvRows(self._raw(words), self._scales(scale_name), self._raw(zero_name), groups).read
            return LowBitMatrix(spec, rows, read)

        return self._made(name, (rows, cols), spec, (words, scale_name, zero_name), matrix)

    def _expert_blocks(self, name: str, tensor: SafetensorsTensor) -> LowBitTensor:
        scale_name, codes = f"{name}_scales", tensor.name
        scale = self._tensors[scale_name]
        if len(tensor.shape) != 4 or tensor.shape[3] != 16 or scale.shape != tensor.shape[:3] or tensor.dtype != "U8":
            raise TensorMismatchError(
                f"{codes!r} {list(tensor.shape)} and {scale_name!r} {list(scale.shape)} are no MXFP4: bytes [experts, "
                "rows, groups, 16] and [experts, rows, groups] are"
            )
        experts, rows, groups, _ = tensor.shape
        spec = CodeSpec(CodeKind.E2M1, 32 * groups, 32, self._scale_kind(scale_name))

        def matrix(expert: int, of: slice) -> LowBitMatrix:
            pairs = self._raw(codes)[expert][of].flatten(1)
            return LowBitMatrix(spec, pairs.shape[0], PairRows(pairs, self._scales(scale_name)[expert][of]).read)

        return self._made(name, (experts, rows, 32 * groups), spec, (codes, scale_name), matrix)

    # -- what layouts have in common

    def _config_bits(self) -> int | None:
        """How many bits the config says that integers have, where it says that of all alike."""
        said = {one.get("num_bits") for one in weight_groups(self._fields) if one.get("type", "int") == "int"}
        return 4 if said == {4} else 8 if said == {8} else None

    def _stored_shape(self, name: str, rows: int) -> tuple[int, int]:
        """What pack-quantized says of a matrix beside it."""
        said = [int(n) for n in self._raw(f"{name}_shape")]
        if len(said) != 2 or said[0] != rows:
            raise TensorMismatchError(f"{name!r}: {name + '_shape'!r} says {said}; the codes have {rows} rows")
        return (said[0], said[1])

    def _made(
        self,
        name: str,
        shape: tuple[int, ...],
        spec: CodeSpec,
        parts: tuple[str, ...],
        matrix: Callable[[int, slice], LowBitMatrix],
    ) -> LowBitTensor:
        if name in self._tensors and name not in parts:
            raise TensorMismatchError(f"the files hold {name!r} twice, quantized and not")
        _ = spec.resident  # refuses what there is no type for, before anything is planned with it
        return LowBitTensor(name, shape, spec, parts, sum(self._tensors[part].nbytes for part in parts), matrix)

    def _parts(self, *names: str) -> tuple[str, ...]:
        return tuple(name for name in names if name in self._tensors)

    def _need(self, name: str, *needed: str) -> None:
        missing = [one for one in needed if one not in self._tensors]
        if missing:
            raise TensorMismatchError(f"quantized tensor {name!r} has no {missing[0]!r} beside it; is a file missing?")

    def _group(self, name: str, cols: int, scales: tuple[int, ...], rows: int) -> int:
        """Columns that share a scale. scales: [1], [rows], [rows, groups] or [1, 1]."""
        count = math.prod(scales)
        groups = 1 if count == 1 else count // max(rows, 1)
        if count not in (1, rows * groups) or not groups or (len(scales) == 2 and scales[0] not in (1, rows)):
            raise TensorMismatchError(f"{name!r} [{rows}, {cols}] has scales of the shape {list(scales)}")
        if groups == 1:
            return cols
        said = self._fields.get("group_size")
        if isinstance(said, int) and said > 0 and -(-cols // said) == groups:
            return said  # the last group may be shorter
        if cols % groups:
            raise TensorMismatchError(f"{name!r} has {groups} groups of scales for {cols} columns, which do not divide")
        return cols // groups

    def _is_shuffled(self, index_name: str) -> bool:
        """Whether columns are of groups in another order than theirs: GPTQ with desc_act."""
        if index_name not in self._tensors:
            return False
        if self._method == "gptq" and not self._fields.get("desc_act"):
            return False
        index = self._raw(index_name)  # in order after all where groups were chosen first
        return bool((index.diff() < 0).any())

    def _index(self, name: str, groups: int, cols: int) -> torch.Tensor:
        """The group of every column."""
        index = self._raw(name)
        if index.shape != (cols,) or int(index.min()) < 0 or int(index.max()) >= groups:
            raise TensorMismatchError(
                f"{name!r} has {list(index.shape)} numbers; one below {groups} for each of {cols} is needed"
            )
        return index

    def _scale_kind(self, name: str) -> str:
        kind = _SCALES.get(self._tensors[name].dtype)
        if kind is None:
            raise UnsupportedError(
                f"scales {name!r} are {self._tensors[name].dtype}; {', '.join(_SCALES)} are supported"
            )
        return kind

    def _scales(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return typed_view(self._model.bytes_of(name), SCALE_DTYPES[_SCALES[tensor.dtype]]).reshape(tensor.shape)

    def _raw(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        if tensor.dtype not in _RAW:
            raise UnsupportedError(f"tensor {name!r} is stored as {tensor.dtype}; {', '.join(_RAW)} are known there")
        return typed_view(self._model.bytes_of(name), _RAW[tensor.dtype]).reshape(tensor.shape)

    def _floats(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        if tensor.dtype not in _NUMBERS or math.prod(tensor.shape) != 1:
            raise UnsupportedError(f"tensor {name!r} must be one floating-point number")
        return typed_view(self._model.bytes_of(name), _NUMBERS[tensor.dtype])


def _by_row(scales: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales [rows, groups] of those for all, for each row, or for groups of it."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, 1)
    return scales.reshape(rows, -1)

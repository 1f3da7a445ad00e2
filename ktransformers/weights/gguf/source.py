"""A model's weights in GGUF files, as a WeightSource. Native block types come back as views of the memory map."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.kernels.cpu.pages import page_out
from ktransformers.kernels.types import ExpertWeights, Fp8Matrix, QuantType, RawTensor, block_size, row_bytes, row_head
from ktransformers.models.facts import ModelFacts
from ktransformers.weights.experts import RawMatrix, StoredMatrices, check_exact, check_expert_shape, expert_info
from ktransformers.weights.gguf.file import OTHER_FILE, GGUFModel
from ktransformers.weights.gguf.names import Change, GGUFNames, Stored, ignorable_gguf, is_of_other_parts, is_table
from ktransformers.weights.gguf.recurrent_forms import Form
from ktransformers.weights.mapped_file import typed_view
from ktransformers.weights.quantize.transcode import dequantize, resident_type, transcode
from ktransformers.weights.source import ExpertBiases, ExpertsInfo, ExpertsLayout, MappedExperts, TensorInfo

__all__ = ["GGUFSource"]

logger = logging.getLogger(__name__)

_COMPUTED = (
    *(Change.SUBTRACT_ONE, Change.KV_B_FROM_PARTS, Change.TRANSPOSE, Change.LOG, Change.LOG_OF_NEGATIVE),
    Change.WHOLE_NUMBERS,
)
"""Of numbers: what these make cannot stay in blocks."""


@dataclass(frozen=True, slots=True)
class _Projection:
    """One of gate, up, down of all experts [E, rows, cols], and where the file keeps it.

    stored: one tensor per expert, or a single one for all, in which an expert's matrix begins at `first_row`.
    """

    stored: tuple[str, ...]
    shape: tuple[int, int, int]
    is_merged: bool = True
    first_row: int = 0

    def matrices(self, load: Callable[[str], RawTensor]) -> list[RawTensor]:
        """The matrix [rows, cols] of each expert."""
        if not self.is_merged:
            return [load(name) for name in self.stored]
        experts, rows = load(self.stored[0]).unbind(), self.shape[1]
        if experts[0].rows == rows:
            return experts
        return [expert.rows_slice(self.first_row, self.first_row + rows) for expert in experts]


class GGUFSource:
    """WeightSource over one GGUF model (all of its shards). facts are those of the module tree."""

    def __init__(self, model: GGUFModel, facts: ModelFacts):
        self._model = model
        self._tensors = model.tensors
        self._facts = facts
        self._mixed: set[str] = set()  # names of parameters that were reported
        self._names = GGUFNames(model.architecture, facts, self._tensors)
        self._report_transcoding()
        if others := sum(is_of_other_parts(name) for name in self._tensors):
            logger.info("%d tensors for images and sound are left aside; the model reads text only", others)

    def describe(self) -> str:
        """Return a line for the console: format, files, bytes."""
        types = Counter(tensor.qtype.name for tensor in self._tensors.values())
        mix = ", ".join(f"{count} {name}" for name, count in types.most_common())
        nbytes = sum(tensor.nbytes for tensor in self._tensors.values())
        files = len(self._model.files)
        where = self._model.files[0].path.name + (f" and {files - 1} more" if files > 1 else "")
        return f"GGUF {self._model.architecture}, {where}, {nbytes / 1e9:.2f} GB, {len(self._tensors)} tensors ({mix})"

    def stored_names(self) -> Sequence[str]:
        """Return every tensor in the files, under its own name there."""
        return tuple(self._tensors)

    def ignorable(self, stored_name: str) -> bool:
        """Whether a stored tensor that no module asked for may be left over."""
        return ignorable_gguf(stored_name, self._tensors, self._facts.num_layers)

    def stored_bytes(self, stored_name: str) -> torch.Tensor | None:
        """Return the bytes of a stored tensor in its mapped file."""
        return self._model.raw(stored_name).data

    def find(self, name: str) -> TensorInfo | None:
        """Return facts about the tensor that HF calls `name`, or None when the files do not hold it."""
        stored = self._names.find(name)
        if stored is None:
            return None
        shape = self._shape(name, stored)
        first = self._tensors[stored.names[0]]
        resident = QuantType.F32 if self._is_computed(stored) else resident_type(first.qtype, stored.names[0])
        nbytes = math.prod(shape[:-1]) * row_bytes(resident, shape[-1])
        types = "+".join(dict.fromkeys(self._tensors[part].qtype.name for part in stored.names))
        return TensorInfo(name, shape, types, resident, nbytes, stored.names)

    def tensor(self, name: str) -> RawTensor:
        """Return a tensor in a type the native kernels read. Raises TensorMismatchError when it is missing."""
        stored = self._found(name)
        if self._is_computed(stored):
            if self._is_mixed(stored):
                self._report_mixed(name, stored)
            return RawTensor.from_tensor(self.dense(name))
        shape = self._shape(name, stored)
        if stored.change is Change.CONCAT_ROWS:
            parts = [transcode(self._model.raw(part), part) for part in stored.names]
            joined = torch.cat([part.data for part in parts])
            page_out(part.data for part in parts)
            return RawTensor(joined, parts[0].qtype, shape)
        raw = self._model.raw(stored.names[0])
        if stored.change is Change.UNPERMUTE_ROWS:
            raw = _unpermute(raw, stored.heads)
        raw = _reordered(transcode(raw, stored.names[0]), stored)
        return RawTensor(raw.data, raw.qtype, shape)

    def fp8(self, name: str) -> Fp8Matrix:
        """Raise TensorMismatchError: a GGUF file holds no FP8 matrices."""
        raise TensorMismatchError(f"{name!r} is no FP8 matrix: a GGUF holds none")

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor dequantized, as a new tensor of its logical shape. Raises TensorMismatchError when
        missing.
        """
        stored = self._found(name)
        shape = self._shape(name, stored)
        parts = [self._model.raw(part) for part in stored.names]
        if stored.change is Change.UNPERMUTE_ROWS:
            parts = [_unpermute(parts[0], stored.heads)]
        if stored.change is Change.WHOLE_NUMBERS:
            return self._table(parts[0], stored.names[0]).to(dtype)
        if stored.change is Change.SUBTRACT_ONE:
            return dequantize(parts[0], stored.names[0]).sub_(1.0).to(dtype)
        if stored.change is Change.TRANSPOSE:
            return dequantize(parts[0], stored.names[0]).T.to(dtype, memory_format=torch.contiguous_format)
        if stored.change is Change.KV_B_FROM_PARTS:
            return self._kv_b(stored, dtype)
        values = [dequantize(raw, part, dtype) for raw, part in zip(parts, stored.names, strict=True)]
        joined = values[0] if len(values) == 1 else torch.cat([value.squeeze() for value in values])
        if stored.change in (Change.LOG, Change.LOG_OF_NEGATIVE):
            sign = 1 if stored.change is Change.LOG else -1
            joined = joined.double().mul_(sign).log_().to(dtype)
        if stored.rows is not None:
            joined = joined[torch.tensor(stored.rows)]
        if stored.columns is not None:
            joined = joined.reshape(len(joined), -1, stored.run)[:, torch.tensor(stored.columns)]
        return joined.reshape(shape)

    def _table(self, raw: RawTensor, name: str) -> torch.Tensor:
        """Whole numbers of a tensor, as they are."""
        if raw.qtype is not QuantType.I32:
            raise UnsupportedError(f"tensor {name!r} is stored as {raw.qtype.name}; whole numbers (I32) are needed")
        return check_exact(typed_view(raw.data, torch.int32).reshape(raw.shape), name)

    def find_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertsInfo | None:
        """Return facts about the experts of module `key` ("model.layers.3.mlp.experts")."""
        projections = self._projections(key, layout)
        if projections is None:
            return None
        infos = {part: self._projection_info(f"{key}.{part}", p, quantize_to) for part, p in projections.items()}
        return ExpertsInfo.of(infos, {b: self._tensors[b].shape for b in self._bias_names(key, layout).values()})

    def experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertWeights:
        """Return the experts of module `key`, one [I, H], [I, H] and [H, I] matrix per expert.

        Raises TensorMismatchError when an expert is missing or has the wrong shape.
        """
        return self._stored_experts(key, layout, quantize_to).load()

    def mapped_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> MappedExperts:
        """Return the experts of module `key` as views of the mapped files, or why there are none. Raises as
        `experts`.
        """
        return self._stored_experts(key, layout, quantize_to).mapped()

    def _stored_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None) -> StoredMatrices:
        projections = self._projections(key, layout)
        info = self.find_experts(key, layout, quantize_to)
        if projections is None or info is None:
            raise TensorMismatchError(
                f"the GGUF files hold no experts for {key!r}; they are incomplete or of another model"
            )
        parts = {part: list(map(RawMatrix, found.matrices(self._model.raw))) for part, found in projections.items()}
        biases = {part: dequantize(self._model.raw(name), name) for part, name in self._bias_names(key, layout).items()}
        return StoredMatrices(info, parts, ExpertBiases(**biases))

    def _found(self, name: str) -> Stored:
        stored = self._names.find(name)
        if stored is None:
            raise TensorMismatchError(
                f"the GGUF files hold no tensor for {name!r}; they are incomplete or of another model "
                f"(architecture {self._model.architecture!r})"
            )
        return stored

    def _shape(self, name: str, stored: Stored) -> tuple[int, ...]:
        """The shape that the module tree expects, as far as the file's own shape allows.

        The converter drops dimensions of size 1, so they are put back where modules have them.
        """
        shapes = [self._tensors[part].shape for part in stored.names]
        shape = shapes[0]
        if stored.change is Change.TRANSPOSE:
            return shape[::-1]
        if stored.form is not Form.AS_STORED:
            return stored.form.shape((sum(math.prod(one[:-1]) for one in shapes), *shape[-1:]))
        if stored.rows is not None:
            self._check_order(stored, shape[0])
            return (len(stored.rows), *shape[1:])
        if stored.columns is not None:
            self._check_columns(stored, shape[-1])
            return (*shape[:-1], len(stored.columns) * stored.run)
        if stored.change is Change.CONCAT_ROWS:
            if any(other[1:] != shape[1:] for other in shapes):
                raise TensorMismatchError(f"tensors {stored.names} have different widths; {name!r} needs them equal")
            return (sum(other[0] for other in shapes), *shape[1:])
        if stored.change is Change.KV_B_FROM_PARTS:
            k_b, v_b = self._kv_b_shapes()
            return (k_b[0] * (k_b[2] + v_b[1]), k_b[1])
        if stored.change is Change.UNPERMUTE_ROWS and shape[0] % (2 * stored.heads):
            raise TensorMismatchError(
                f"tensor {stored.names[0]!r} has {shape[0]} rows, no multiple of 2 x {stored.heads} heads"
            )
        if name.endswith("self_attn.k_b_proj.weight"):
            return self._reshaped(stored.names[0], shape, self._kv_b_shapes()[0])
        if name.endswith("self_attn.v_b_proj.weight"):
            return self._reshaped(stored.names[0], shape, self._kv_b_shapes()[1])
        if name.endswith(("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")) and len(shape) == 1:
            return (1, *shape)
        return shape

    def _check_order(self, stored: Stored, rows: int) -> None:
        if stored.rows is not None and max(stored.rows) >= rows:
            raise TensorMismatchError(
                f"tensor {stored.names[0]!r} has {rows} rows; the heads of the model's config need "
                f"{max(stored.rows) + 1}"
            )

    def _check_columns(self, stored: Stored, cols: int) -> None:
        assert stored.columns is not None, "asked of some columns"
        runs, is_half = max(stored.columns) + 1, len(stored.columns) == 1
        if cols % stored.run or (cols < runs * stored.run if is_half else cols != runs * stored.run):
            raise TensorMismatchError(
                f"tensor {stored.names[0]!r} has {cols} columns; the model has {runs} heads of {stored.run}"
            )

    def _is_computed(self, stored: Stored) -> bool:
        """Whether the parameter is made of what the file's numbers are, not of its blocks."""
        if stored.change in _COMPUTED or self._is_mixed(stored):
            return True
        if stored.form is not Form.AS_STORED:
            return True  # small, and read as numbers
        return stored.columns is not None and stored.run % block_size(self._tensors[stored.names[0]].qtype) != 0

    def _is_mixed(self, stored: Stored) -> bool:
        """Whether parts of several types are joined: blocks of one type cannot hold them all."""
        return stored.change is Change.CONCAT_ROWS and len(set(self._types_of(stored.names))) > 1

    def _report_mixed(self, name: str, stored: Stored) -> None:
        """One line for the parameters of a name, whatever their layers."""
        kind = re.sub(r"\d+", "N", name)
        if kind not in self._mixed:
            self._mixed.add(kind)
            types = ", ".join(one.name for one in self._types_of(stored.names))
            logger.warning("%s is joined of tensors of different types (%s) and held as F32", kind, types)

    def _reshaped(self, stored: str, shape: tuple[int, ...], wanted: tuple[int, int, int]) -> tuple[int, ...]:
        """`wanted` if it is the same rows of the same width (some converters merge the first two dimensions)."""
        if shape[-1] != wanted[-1] or math.prod(shape) != math.prod(wanted):
            raise TensorMismatchError(f"tensor {stored!r} has the shape {list(shape)}; the model needs {list(wanted)}")
        return wanted

    def _kv_b_shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        heads, latent = self._facts.num_heads, self._facts.latent
        assert latent is not None  # kv_b_proj is a module of latent attention
        return (heads, latent.rank, latent.nope_dim), (heads, latent.v_dim, latent.rank)

    def _kv_b(self, stored: Stored, dtype: torch.dtype) -> torch.Tensor:
        shapes = self._kv_b_shapes()
        parts = [
            dequantize(self._model.raw(name), name, dtype).reshape(
                self._reshaped(name, self._tensors[name].shape, shape)
            )
            for name, shape in zip(stored.names, shapes, strict=True)
        ]
        return torch.cat([parts[0].transpose(1, 2), parts[1]], dim=1).reshape(-1, shapes[0][1])

    def _projections(self, key: str, layout: ExpertsLayout) -> dict[str, _Projection] | None:
        """gate, up and down of one layer in whichever of the three ways the file stores them."""
        block = self._names.block(key)
        if block is None:
            return None
        experts, inner, hidden = layout.num_experts, layout.intermediate_size, layout.hidden_size
        shapes = {"up": (experts, inner, hidden), "down": (experts, hidden, inner)}
        if layout.has_gate:
            shapes = {"gate": (experts, inner, hidden), **shapes}
        fused = f"{block}ffn_gate_up_exps.weight"
        found: dict[str, _Projection] = {}
        for part, shape in shapes.items():
            merged = f"{block}ffn_{part}_exps.weight"
            single = tuple(f"{block}ffn_{part}.{expert}.weight" for expert in range(experts))
            if merged in self._tensors:
                self._check_shape(merged, shape)
                found[part] = _Projection((merged,), shape)
            elif part != "down" and fused in self._tensors:
                self._check_shape(fused, (experts, 2 * inner, hidden))
                found[part] = _Projection((fused,), shape, first_row=0 if part == "gate" else inner)
            elif any(name in self._tensors for name in single):
                for name in single:
                    self._check_shape(name, shape[1:])
                found[part] = _Projection(single, shape, is_merged=False)
        if not found:
            return None
        if missing := shapes.keys() - found.keys():
            raise TensorMismatchError(
                f"{key!r}: the GGUF file has some experts' tensors but not {sorted(missing)} in {block}*"
            )
        return found

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise TensorMismatchError(f"expert tensor {name!r} is missing")
        check_expert_shape(name, tensor.shape, shape)

    def _bias_names(self, key: str, layout: ExpertsLayout) -> dict[str, str]:
        if not layout.has_bias:
            return {}
        block = self._names.block(key)
        names = {
            part: f"{block}ffn_{part}_exps.bias" for part in ("gate", "up", "down") if part != "gate" or layout.has_gate
        }
        for part, name in names.items():
            width = layout.hidden_size if part == "down" else layout.intermediate_size
            self._check_shape(name, (layout.num_experts, width))
        return names

    def _projection_info(self, name: str, projection: _Projection, quantize_to: QuantType | None) -> TensorInfo:
        types = set(self._types_of(projection.stored))
        if len(types) > 1:
            mix = ", ".join(sorted(t.name for t in types))
            raise TensorMismatchError(f"the experts of {name!r} have different types ({mix}); they must share one")
        stored = types.pop()
        natural = resident_type(stored, projection.stored[0])
        return expert_info(name, stored.name, natural, projection.shape, projection.stored, quantize_to)

    def _types_of(self, names: Sequence[str]) -> tuple[QuantType, ...]:
        return tuple(self._tensors[name].qtype for name in names)

    def _report_transcoding(self) -> None:
        """One line per pair of types, at open: which tensors will not stay as they are in the file."""
        pairs: Counter[tuple[str, str]] = Counter()
        for name, tensor in self._tensors.items():
            if not self.ignorable(name) and not is_table(name):
                try:
                    resident = resident_type(tensor.qtype, name)
                except UnsupportedError as error:
                    raise UnsupportedError(f"{self._model.path_of(name)}: {error}; {OTHER_FILE}") from error
                if resident is not tensor.qtype:
                    pairs[tensor.qtype.name, resident.name] += 1
        for (stored, resident_name), count in sorted(pairs.items()):
            logger.warning(
                "%d tensors of type %s are held as %s (same values, more bytes)", count, stored, resident_name
            )


def _reordered(raw: RawTensor, stored: Stored) -> RawTensor:
    """Rows and runs of columns in the module's order, on blocks as they are."""
    if stored.rows is None and stored.columns is None:
        return raw
    data = raw.data.reshape(raw.shape[0], -1)
    if stored.rows is not None:
        data = data[torch.tensor(stored.rows)]
    if stored.columns is not None:
        head = row_head(raw.qtype)
        runs = data[:, head:].reshape(len(data), raw.shape[-1] // stored.run, -1)[:, torch.tensor(stored.columns)]
        data = torch.cat([data[:, :head], runs.flatten(1)], dim=1)
    page_out([raw.data])
    rest = raw.shape[1:] if stored.columns is None else (*raw.shape[1:-1], len(stored.columns) * stored.run)
    return RawTensor(data.reshape(-1), raw.qtype, (data.shape[0], *rest))


def _unpermute(raw: RawTensor, heads: int) -> RawTensor:
    """Undo the converter's reordering of each head's rows, on block rows (weights) or elements (biases)."""
    rows = raw.shape[0]
    by_pair = raw.data.reshape(heads, rows // heads // 2, 2, -1)
    data = by_pair.transpose(1, 2).reshape(-1)
    page_out([raw.data])
    return RawTensor(data, raw.qtype, raw.shape)

"""Types of the kernels' arguments: tensors in ggml block layout, FP8 matrices, packed matrices, experts, activations.

Knows the sizes of ggml's block formats (from the table of weight types and the `gguf` package) and how rows of blocks
lie in memory. Does not know where the bytes come from or what a block's bits mean. Numbers that cross to the native
extension are the extension's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

import torch
from gguf import GGML_QUANT_SIZES

from ktransformers.kernels.extension import extension
from ktransformers.kernels.formats import FORMATS

__all__ = [
    "FORK_TYPES",
    "FP8_BLOCK",
    "Activation",
    "ActivationSpec",
    "BlockType",
    "ExpertWeight",
    "ExpertWeights",
    "Fp8Matrix",
    "GroupType",
    "HyperSpec",
    "OwnType",
    "PackedTensor",
    "QuantType",
    "RawTensor",
    "StateStep",
    "WeightType",
    "block_size",
    "fp8_nbytes",
    "row_bytes",
    "row_head",
    "type_size",
]


class OwnType(IntEnum):
    """Types of resident weights that ggml has no number for; the numbers are outside its range."""

    F8_E4M3 = extension.F8_E4M3  # e4m3fn codes under one fp32 scale per FP8_BLOCK rows and columns


if TYPE_CHECKING:
    from gguf import GGMLQuantizationType as QuantType
else:
    from gguf import GGMLQuantizationType

    # The members are the package's and, beyond them, those of the table: types of llama.cpp's forks. Members of one
    # name and number are equal, so that the package's functions take either.
    QuantType = IntEnum(
        "QuantType",
        {kind.name: int(kind) for kind in GGMLQuantizationType}
        | {record.name: number for number, record in FORMATS.items() if number not in set(OwnType)},
        module=__name__,
    )
    QuantType.__doc__ = "Block types that GGUF files have numbers for."

FORK_TYPES = frozenset(QuantType(number) for number in FORMATS if number not in {*GGML_QUANT_SIZES, *OwnType})
"""Types of llama.cpp's forks (ik_llama.cpp), which the `gguf` package neither names nor decodes."""


_GROUP_TYPES: dict[str, tuple[int, int, int]] = extension.group_types()


class GroupType(IntEnum):
    """Block types that ggml does not have: groups of columns with scales of their own, as safetensors hold them.

    I4_32_BF16 is integers of 4 bits in groups of 32 columns under a bf16 scale, ..._Z those with a zero point beside
    it; I8 has 8 bits, F8 e4m3fn. Larger groups are several blocks of the same scale. MXFP8: F8 under e8m0; NVFP4_F32:
    e2m1 under an e4m3 scale per 16 columns and an fp32 number. Bytes: csrc/kernels/packed/groups.inl. The extension
    names the members.
    """

    vars().update({name: number for name, (number, _, _) in _GROUP_TYPES.items()})


BlockType: TypeAlias = QuantType | GroupType
"""Types whose rows are blocks of columns."""
WeightType: TypeAlias = QuantType | OwnType | GroupType

FP8_BLOCK: int = extension.FP8_BLOCK


def fp8_nbytes(rows: int, cols: int) -> int:
    """Return the bytes of an Fp8Matrix: codes and scales."""
    return rows * cols + 4 * -(-rows // FP8_BLOCK) * -(-cols // FP8_BLOCK)


# The unquantized types and the torch dtype that holds their elements.
_FLOAT_TYPES = {
    torch.float32: QuantType.F32,
    torch.float16: QuantType.F16,
    torch.bfloat16: QuantType.BF16,
}


def block_size(qtype: BlockType) -> int:
    """Return the elements in one block of `qtype` (1 for F32, 32 for Q8_0, 256 for Q4_K)."""
    if isinstance(qtype, GroupType):
        return _GROUP_TYPES[qtype.name][1]
    return FORMATS[qtype].block if qtype in FORMATS else int(GGML_QUANT_SIZES[qtype][0])


def type_size(qtype: BlockType) -> int:
    """Return the bytes in one block of `qtype` (4 for F32, 34 for Q8_0, 144 for Q4_K)."""
    if isinstance(qtype, GroupType):
        return _GROUP_TYPES[qtype.name][2]
    return FORMATS[qtype].nbytes if qtype in FORMATS else int(GGML_QUANT_SIZES[qtype][1])


def row_head(qtype: BlockType) -> int:
    """Return the bytes in front of a row's blocks: 0, or those of a scale of the whole row (4 for IQ4_KS)."""
    return FORMATS[qtype].row_head if qtype in FORMATS else 0


def row_bytes(qtype: BlockType, cols: int) -> int:
    """Return the bytes in one row of `cols` elements, with what is in front of its blocks.

    Raises ValueError when `cols` is negative or no multiple of the block size.
    """
    size, nbytes = block_size(qtype), type_size(qtype)
    if cols < 0 or cols % size != 0:
        raise ValueError(
            f"a row of {cols} elements cannot be {qtype.name}: its blocks hold {size}; "
            f"use a type with smaller blocks (Q8_0 holds 32, F16 and BF16 any width)"
        )
    return row_head(qtype) + cols // size * nbytes


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor in ggml block layout.

    data: uint8, 1-D, contiguous, exactly `nbytes` long (may be a view of a memory map, at any alignment).
    qtype: the block format. shape: the logical torch shape (..., rows, cols), whose last dimension is contiguous and
    blocked. Raises TypeError or ValueError when data, shape and type do not agree.
    """

    data: torch.Tensor
    qtype: BlockType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.data.dtype != torch.uint8:
            raise TypeError(f"RawTensor.data must be uint8, got {self.data.dtype}")
        if self.data.dim() != 1 or not self.data.is_contiguous():
            raise ValueError(f"RawTensor.data must be 1-D and contiguous, got shape {tuple(self.data.shape)}")
        if not self.shape or any(size < 0 for size in self.shape):
            raise ValueError(f"RawTensor.shape must name at least one dimension, all >= 0, got {self.shape}")
        nbytes = self.nbytes
        if self.data.numel() != nbytes:
            raise ValueError(
                f"{self.qtype.name} tensor of shape {self.shape} needs {nbytes} bytes, got {self.data.numel()}"
            )

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> RawTensor:
        """View (or, when not contiguous, copy) an fp32, fp16 or bf16 tensor as a RawTensor.

        Raises TypeError for another dtype.
        """
        qtype = _FLOAT_TYPES.get(tensor.dtype)
        if qtype is None:
            raise TypeError(f"only float32, float16 and bfloat16 tensors have a block layout, got {tensor.dtype}")
        flat = tensor.detach().contiguous().reshape(-1)
        return cls(flat.view(torch.uint8), qtype, tuple(tensor.shape))

    @property
    def cols(self) -> int:
        """Elements in one row: the last dimension."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return row_bytes(self.qtype, self.cols)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.rows * self.row_bytes

    def reshape(self, shape: Sequence[int]) -> RawTensor:
        """Return the same bytes under another shape with the same `cols`. Raises ValueError when it does not fit."""
        new_shape = tuple(int(size) for size in shape)
        if not new_shape or new_shape[-1] != self.cols or math.prod(new_shape[:-1]) != self.rows:
            raise ValueError(
                f"cannot reshape {self.shape} to {new_shape}: rows and cols must stay {self.rows}, {self.cols}"
            )
        return RawTensor(self.data, self.qtype, new_shape)

    def rows_slice(self, start: int, stop: int) -> RawTensor:
        """Return a view of rows start .. stop - 1 of the flattened (rows, cols) tensor. Raises IndexError out
        of range.
        """
        if not 0 <= start <= stop <= self.rows:
            raise IndexError(f"rows {start}:{stop} are not inside a tensor of {self.rows} rows")
        size = self.row_bytes
        return RawTensor(self.data[start * size : stop * size], self.qtype, (stop - start, self.cols))

    def unbind(self) -> list[RawTensor]:
        """Return views of all leading indices, as `select` makes them. Raises IndexError for less than two
        dimensions.
        """
        if len(self.shape) < 2:
            raise IndexError("unbind() needs a tensor of at least two dimensions")
        parts = self.data.view(self.shape[0], self.nbytes // max(self.shape[0], 1)).unbind(0)
        return [RawTensor(part, self.qtype, self.shape[1:]) for part in parts]

    def select(self, index: int) -> RawTensor:
        """Return a view of leading index `index` (shape loses its first dimension). Raises IndexError out of range."""
        if len(self.shape) < 2:
            raise IndexError("select() needs a tensor of at least two dimensions")
        if not 0 <= index < self.shape[0]:
            raise IndexError(f"index {index} is not inside a leading dimension of {self.shape[0]}")
        size = self.nbytes // self.shape[0]
        return RawTensor(self.data[index * size : (index + 1) * size], self.qtype, self.shape[1:])


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix of FP8 codes with block scales: weight[n, k] = values[n, k] * scales[n // 128, k // 128].

    values: uint8 [N, K], contiguous (may be a view of a memory map), the codes of torch.float8_e4m3fn; K is a multiple
    of 4. scales: fp32 [ceil(N / 128), ceil(K / 128)], contiguous. Kernels take it packed only, see `cpu.pack_fp8`.
    Raises TypeError or ValueError when they do not agree.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dtype != torch.uint8 or self.scales.dtype != torch.float32:
            raise TypeError(
                f"Fp8Matrix wants uint8 values and fp32 scales, got {self.values.dtype} and {self.scales.dtype}"
            )
        if self.values.dim() != 2 or not self.values.is_contiguous() or self.values.shape[1] % 4:
            raise ValueError(
                f"Fp8Matrix.values must be contiguous [N, K] with K a multiple of 4, got {list(self.values.shape)}"
            )
        wanted = [-(-size // FP8_BLOCK) for size in self.values.shape]
        if list(self.scales.shape) != wanted or not self.scales.is_contiguous():
            raise ValueError(f"Fp8Matrix.scales must be contiguous {wanted}, got {list(self.scales.shape)}")

    @property
    def qtype(self) -> OwnType:
        return OwnType.F8_E4M3

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix: (rows, cols)."""
        return (self.values.shape[0], self.values.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return fp8_nbytes(*self.shape)

    def to(self, device: torch.device) -> Fp8Matrix:
        """Return the matrix on a device."""
        return Fp8Matrix(self.values.to(device), self.scales.to(device))

    def rows_slice(self, start: int, stop: int) -> Fp8Matrix:
        """Return a view of rows start .. stop - 1; start is a multiple of 128. Raises IndexError otherwise or out of
        range.
        """
        if start % FP8_BLOCK or not 0 <= start <= stop <= self.values.shape[0]:
            raise IndexError(f"rows {start}:{stop} are no part of {self.values.shape[0]} rows that begins with a block")
        return Fp8Matrix(self.values[start:stop], self.scales[start // FP8_BLOCK : -(-stop // FP8_BLOCK)])


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A matrix packed for the native kernels, 16 rows side by side (csrc/kernels/packed/packed.inl); see `cpu.pack`.

    data: uint8, 1-D. qtype: the type whose numbers it holds. shape: (rows, cols) of the matrix. wants_bf16: whether a
    call of many tokens multiplies in bf16 where the processor can, see `cpu.linear`; BF16 always does.
    """

    data: torch.Tensor
    qtype: WeightType
    shape: tuple[int, ...]
    wants_bf16: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.data.numel()


ExpertWeight: TypeAlias = RawTensor | PackedTensor | Fp8Matrix


@dataclass
class ExpertWeights:
    """The routed experts of one layer.

    gate: E tensors [I, H], or None for act(up) without a gate. up: E tensors [I, H]. down: E tensors [H, I].
    Kernels take an Fp8Matrix after `pack_fp8` only.
    gate_bias, up_bias: fp32 [E, I] or None. down_bias: fp32 [E, H] or None. All experts of a projection share one type;
    projections may differ; each may be packed by `pack`.
    """

    gate: Sequence[ExpertWeight] | None
    up: Sequence[ExpertWeight]
    down: Sequence[ExpertWeight]
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


_KINDS = extension.activation_kinds()


class Activation(IntEnum):
    """Activation functions of an MLP. The last two are the clamped forms of gpt_oss and DeepSeek-V4."""

    SILU = _KINDS["SILU"]
    GELU = _KINDS["GELU"]
    GELU_TANH = _KINDS["GELU_TANH"]
    RELU = _KINDS["RELU"]
    RELU2 = _KINDS["RELU2"]
    SIGMOID = _KINDS["SIGMOID"]
    SWIGLU_OAI = _KINDS["SWIGLU_OAI"]
    SWIGLU_CLAMPED = _KINDS["SWIGLU_CLAMPED"]

    @property
    def is_clamped(self) -> bool:
        """Whether the activation has a limit, and needs a gate."""
        return self in (Activation.SWIGLU_OAI, Activation.SWIGLU_CLAMPED)


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """An activation and its parameters.

    Clamped ones: gate = min(gate, limit), up = clamp(up, -limit, limit); then SWIGLU_OAI is
    gate * sigmoid(alpha * gate) * (up + 1), SWIGLU_CLAMPED silu(gate) * up. Other kinds use neither alpha nor limit.
    """

    kind: Activation = Activation.SILU
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def native(self) -> tuple[int, float, float]:
        """Return the activation as the extension takes it."""
        return (int(self.kind), float(self.alpha), float(self.limit))


@dataclass(frozen=True, slots=True)
class StateStep:
    """Step of a recurrent layer's states: which rows continue which states, and where the states behind them go.

    S sequences, T rows; the rows of a sequence are neighbours, in ascending position. All int32, on one device.

        first_rows [S + 1]   rows first_rows[s] .. first_rows[s + 1] - 1 are those of sequence s; there may be none
        read_slots [S]       slot of the state before a sequence's first row; -1: it begins with zeros
        write_slots [S]      slot that gets the state behind its last row; -1: none (padding)
        save_slots [T]       slot that also gets the state behind this row; -1, nearly always: none
        kv_lens [T]          position of a row + 1, which says where chunks end: at multiples of SNAPSHOT_ALIGN

    A sequence's first state is read whole before a slot is written: both may be one. No slot that one sequence of a
    step reads is written by another. Rows behind first_rows[S] hold no token. max_rows: most rows of a sequence; None
    in a graph that is replayed for any number.
    """

    first_rows: torch.Tensor
    read_slots: torch.Tensor
    write_slots: torch.Tensor
    save_slots: torch.Tensor
    kv_lens: torch.Tensor
    max_rows: int | None = None

    @property
    def num_seqs(self) -> int:
        """Number S of sequences in the step."""
        return int(self.read_slots.shape[0])

    def part(self, rows: slice, seqs: slice, kv_lens: torch.Tensor) -> StateStep:
        """Return the step of some of its rows, behind that of the rows before them. seqs: the sequences that have rows
        among these. kv_lens: of these rows. For a step on the CPU.
        """
        first_rows = self.first_rows[seqs.start : seqs.stop + 1].clamp(rows.start, rows.stop) - rows.start
        read_slots, write_slots = self.read_slots[seqs].clone(), self.write_slots[seqs].clone()
        if int(self.first_rows[seqs.start]) < rows.start:  # the part before has left its state there
            read_slots[0] = write_slots[0]
        most = int(first_rows.diff().max())
        return StateStep(first_rows, read_slots, write_slots, self.save_slots[rows].clone(), kv_lens, most)

    def to(self, device: torch.device, kv_lens: torch.Tensor) -> StateStep:
        """Return the step's tensors on a device that has the lengths already."""
        return StateStep(
            self.first_rows.to(device),
            self.read_slots.to(device),
            self.write_slots.to(device),
            self.save_slots.to(device),
            kv_lens,
            self.max_rows,
        )


@dataclass(frozen=True, slots=True)
class HyperSpec:
    """Numbers of a hyper-connection. streams: N. iterations: how often columns are divided by their sums; rows are once
    less. eps: of weights; norm_eps: of the norm.
    """

    streams: int
    iterations: int
    eps: float
    norm_eps: float

    @property
    def width(self) -> int:
        """Number of weights of a row."""
        return (2 + self.streams) * self.streams

"""Layers of random experts in memory and in files, for tests of the store. It knows a record's layout by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ktransformers.kernels.cpu import ExpertStore, MoeKernel, WorkerPool, can_pack, pack_all
from ktransformers.kernels.cpu.base import CpuLayout, layout_of
from ktransformers.kernels.cpu.expert_store import Extent, RecordLayout, RecordPart
from ktransformers.kernels.types import ActivationSpec, ExpertWeights, PackedTensor, QuantType, RawTensor

BLOCK = 4096

Matrices = Sequence[RawTensor | PackedTensor]
Kinds = tuple[QuantType, QuantType]
"""Types of gate and up, and of down."""


@dataclass(frozen=True)
class Layer:
    """raw: as a file has it. resident: as the kernels take it, which is what a record has."""

    raw: ExpertWeights
    resident: ExpertWeights

    @property
    def num_experts(self) -> int:
        return len(self.raw.up)


def round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def matrices_of(weights: ExpertWeights) -> list[Matrices]:
    """Of gate, up and down, those that there are."""
    return [one for one in (weights.gate, weights.up, weights.down) if one is not None]  # type: ignore[misc]


def make_layer(
    make_weight: Callable[..., RawTensor],
    pool: WorkerPool,
    kinds: Kinds = (QuantType.Q8_0, QuantType.Q8_0),
    experts: int = 8,
    shape: tuple[int, int] = (64, 256),
    seed: int = 0,
    has_gate: bool = True,
    is_packed: bool = True,
) -> Layer:
    """shape: width, hidden. Random, packed where the kernels have that and is_packed."""
    width, hidden = shape
    first, last = kinds

    def several(kind: QuantType, rows: int, cols: int, part: int) -> list[RawTensor]:
        return [make_weight(kind, rows, cols, seed=1000 * seed + 100 * part + e) for e in range(experts)]

    raw = ExpertWeights(
        several(first, width, hidden, 0) if has_gate else None,
        several(first, width, hidden, 1),
        several(last, hidden, width, 2),
    )

    def resident(given: Sequence[RawTensor]) -> Matrices:
        return pack_all(given, pool) if is_packed and can_pack(given[0].qtype, given[0].cols, pool.isa) else given

    made = [resident(one) for one in matrices_of(raw)]  # type: ignore[arg-type]
    return Layer(raw, ExpertWeights(made[0] if has_gate else None, made[-2], made[-1]))


def layout_of_layer(layer: Layer) -> RecordLayout:
    parts, offset = [], 0
    for one in (given[0] for given in matrices_of(layer.resident)):
        rows, cols = one.shape
        parts.append(RecordPart(one.qtype, rows, cols, CpuLayout(layout_of(one)), offset, one.data.numel()))
        offset = round_up(offset + one.data.numel(), 64)
    gate = parts[0] if len(parts) == 3 else None
    return RecordLayout(gate, parts[-2], parts[-1], round_up(offset, BLOCK))


def bytes_of(data: Tensor) -> bytes:
    return data.numpy().tobytes()


def write_records(
    path: Path, layers: Sequence[Layer], path_index: int = 0
) -> list[tuple[RecordLayout, list[list[Extent]]]]:
    """A packed file: the records of all layers one behind the other."""
    made = []
    with path.open("wb") as file:
        for layer in layers:
            layout, extents = layout_of_layer(layer), []
            for expert in range(layer.num_experts):
                record = bytearray(layout.nbytes)
                for part, given in zip(layout.parts, matrices_of(layer.resident), strict=True):
                    record[part.offset : part.offset + part.nbytes] = bytes_of(given[expert].data)
                extents.append([Extent(path_index, file.tell(), layout.nbytes)])
                file.write(record)
            made.append((layout, extents))
    return made


def write_blocks(path: Path, layers: Sequence[Layer]) -> list[tuple[RecordLayout, list[list[Extent]]]]:
    """A file as of a model: matrices of all experts in block layout, beginning anywhere."""
    made = []
    with path.open("wb") as file:
        file.write(b"x" * 777)
        for layer in layers:
            extents: list[list[Extent]] = [[] for _ in range(layer.num_experts)]
            for given in matrices_of(layer.raw):
                for expert, one in enumerate(given):
                    extents[expert].append(Extent(0, file.tell(), one.data.numel()))
                    file.write(bytes_of(one.data))
            made.append((layout_of_layer(layer), extents))
    return made


@dataclass
class Stored:
    """The same layers in memory (`resident`) and in a store (`kernels`)."""

    store: ExpertStore
    resident: list[MoeKernel]
    kernels: list[MoeKernel]
    path: Path


def build(
    path: Path,
    layers: Sequence[Layer],
    pool: WorkerPool,
    slots: int,
    top_k: int = 1,
    activation: ActivationSpec | None = None,
    is_straight: bool = False,
    io_threads: int = 4,
) -> Stored:
    """slots: so many records of the first layer's size fit into the budget."""
    spec = activation or ActivationSpec()
    written = (write_blocks if is_straight else write_records)(path, layers)
    store = ExpertStore([path], pool, slots * written[0][0].nbytes, io_threads)
    numbers = [store.add_layer(number, *one) for number, one in enumerate(written)]
    store.open(top_k)
    biases = ExpertWeights(None, [], [])
    return Stored(
        store,
        [MoeKernel(layer.resident, spec, pool, number) for number, layer in enumerate(layers)],
        [MoeKernel(biases, spec, pool, number, (store, number)) for number in numbers],
        path,
    )

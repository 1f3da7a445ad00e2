"""Packed files of experts in tests: made of a model, and read with nothing but `open`, `seek` and `read`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from ktransformers.config import EngineConfig
from ktransformers.convert.pack_model import Packed, pack_model
from ktransformers.engine.load.builder import plan_model
from ktransformers.engine.model.opened import OpenedModel, open_model
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.expert_store import Extent, RecordLayout, RecordPart
from ktransformers.kernels.types import ExpertWeights, PackedTensor, RawTensor
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.linear.packed import pack_experts
from ktransformers.weights.stored_experts.records import parts_of
from tests.support.gguf.converting import NoBar

__all__ = ["in_ram", "opened_experts", "packed", "read", "stored_parts"]


def packed(config: EngineConfig, out: Path | None = None, *, force: bool = False) -> Packed:
    return pack_model(config, out, lambda name, total: NoBar(), force=force)


def opened_experts(config: EngineConfig) -> tuple[OpenedModel, dict[str, KTransformersExperts]]:
    """A model, and its experts' operators, planned and not loaded."""
    opened = open_model(config)
    operators = plan_model(config, opened).operators
    return opened, {key: one for key, one in operators.items() if isinstance(one, KTransformersExperts)}


def in_ram(opened: OpenedModel, operator: KTransformersExperts) -> ExpertWeights:
    """A layer as it is loaded where it fits into memory."""
    experts = opened.source.experts(operator.key, operator.layout, operator.config.cpu_quant)
    with closing(WorkerPool(2)) as pool:
        return pack_experts(experts, pool, operator.products)


def read(files: Sequence[Path], extent: Extent) -> bytes:
    with files[extent.path_index].open("rb") as file:
        file.seek(extent.offset)
        data = file.read(extent.nbytes)
    assert len(data) == extent.nbytes
    return data


def stored_parts(
    files: Sequence[Path], record: RecordLayout, extents: Sequence[Sequence[Extent]]
) -> dict[str, list[RawTensor | PackedTensor]]:
    """Every expert's matrices in a packed file, by part. Bytes between the parts have to be 0."""
    found: dict[str, list[RawTensor | PackedTensor]] = {name: [] for name in parts_of(record)}
    for (extent,) in extents:
        assert extent.offset % 4096 == 0
        assert extent.nbytes % 4096 == 0
        data = bytearray(read(files, extent))
        for name, part in parts_of(record).items():
            assert part.offset % 64 == 0
            found[name].append(_matrix(bytes(data[part.offset : part.offset + part.nbytes]), part))
            data[part.offset : part.offset + part.nbytes] = bytes(part.nbytes)
        assert not any(data)
    return found


def _matrix(data: bytes, part: RecordPart) -> RawTensor | PackedTensor:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if part.layout.name == "ROWS":
        assert part.qtype.name not in ("F8_E4M3",)
        return RawTensor(tensor, part.qtype, (part.rows, part.cols))  # type: ignore[arg-type]
    return PackedTensor(tensor, part.qtype, (part.rows, part.cols))

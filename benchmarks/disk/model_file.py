"""Writes a GGUF file of random weights in a published shape, whose experts may be many gigabytes.

Weights are those of `SyntheticSource`, so that activations stay finite, but for the experts' type, the embeddings
(Q8_0) and the routers (see routing.py). Each tensor has numbers of its own. One tensor at a time is in
memory. A file
that is there already with the same tensors gets new routers only: the same experts serve for both routings.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig

from benchmarks.command import benchmark_parser
from benchmarks.disk.routing import router_rows
from ktransformers.bench.common.report import Record, print_record
from ktransformers.cli import run_command
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.cli.parsing.parser import user_path
from ktransformers.config import EngineConfig
from ktransformers.convert.header import Entries, GGUFLayout, Placed, entry, lay_out
from ktransformers.convert.hf_tensors import hf_tensors
from ktransformers.convert.partial_file import PartialFile
from ktransformers.convert.tensors import Matrix, OutTensor
from ktransformers.convert.writing import write_tensors
from ktransformers.engine.model.opened import open_synthetic
from ktransformers.kernels.types import QuantType, RawTensor, block_size, row_bytes
from ktransformers.models.gguf.of_config import hf_metadata
from ktransformers.models.synthetic_shapes import SHAPES, find_shape
from ktransformers.system.cores import usable_cores
from ktransformers.weights.gguf.file import GGUFModel
from ktransformers.weights.synthetic import EMBEDDING_GAIN, ROUTINGS, random_blocks

__all__ = ["EXPERT_TYPES", "ModelFile", "main", "routing_of", "write_model"]

EXPERT_TYPES = {"q4_k": QuantType.Q4_K, "q8_0": QuantType.Q8_0}

_NAME = "random weights"
_PIECE_ROWS, _PAGE = 8192, 4096
_EMBEDDING, _ROUTER, _EXPERTS = "token_embd.weight", ".ffn_gate_inp.weight", "_exps.weight"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The file to write. config: the model's, of a family that GGUF files are written of; routing: of ROUTINGS."""

    path: Path
    config: PretrainedConfig
    experts: QuantType
    routing: str = ROUTINGS[0]


def write_model(file: ModelFile) -> GGUFLayout:
    """Write the file, or only its routers, see above. Returns where all lies.

    Raises CapacityError when the disk is full.
    """
    arch, values = hf_metadata(file.config)
    entries: Entries = {
        "general.architecture": entry(arch),
        "general.type": entry("model"),
        "general.name": entry(f"{_NAME}, experts {file.experts.name}"),
        "tokenizer.ggml.model": entry("no_vocab"),
        **{key: entry(value) for key, value in values.items()},
    }
    tensors = _tensors(file, arch)
    placed = [Placed(one.name, one.shape, QuantType[one.stored]) for one in tensors]
    layout = lay_out(arch, entries, placed)
    layout = replace(layout, nbytes=-(-layout.nbytes // _PAGE) * _PAGE)  # whole sectors, see loop_device.py
    if _is_there(file.path, layout):
        _write_routers(file.path, layout, tensors)
        return layout
    with PartialFile(file.path, layout, f"routing {file.routing}") as out:
        write_tensors(out, tensors, {}, usable_cores(), lambda nbytes: None)
        out.finish()
    return layout


def routing_of(model: GGUFModel) -> str | None:
    """Return the routing of a file that `write_model` wrote, by its first router; None for another one."""
    names = [name for name in model.tensors if name.endswith(_ROUTER)]
    if not names or not str(model.metadata.get("general.name", "")).startswith(_NAME):
        return None
    router = model.raw(names[0])
    is_even = not router.data.view(torch.float32).reshape(router.shape)[:, 0].any()
    return ROUTINGS[0] if is_even else ROUTINGS[1]


def _is_there(path: Path, layout: GGUFLayout) -> bool:
    if not path.is_file() or path.stat().st_size != layout.nbytes:
        return False
    with path.open("rb") as file:
        return file.read(len(layout.header)) == layout.header


def _write_routers(path: Path, layout: GGUFLayout, tensors: Sequence[OutTensor]) -> None:
    with path.open("r+b") as file:
        for tensor, placed in zip(tensors, layout.tensors, strict=True):
            if tensor.name.endswith(_ROUTER):
                (matrix,) = tensor.matrices()
                assert isinstance(matrix, torch.Tensor)
                file.seek(placed.offset)
                file.write(matrix.numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())


def _tensors(file: ModelFile, arch: str) -> list[OutTensor]:
    """All tensors of the file, each made when it is opened."""
    opened = open_synthetic(EngineConfig(), file.config)
    source, top_k = opened.source, opened.facts.top_k() or 1

    def router(name: str, shape: tuple[int, ...]) -> Sequence[Matrix]:
        rows = router_rows((shape[0], shape[1]), top_k, file.routing, zlib.crc32(name.encode()))
        return [torch.from_numpy(rows)]

    def made(tensor: OutTensor) -> OutTensor:
        name, shape = tensor.name, tensor.shape
        if name.endswith(_ROUTER):
            return replace(tensor, stored="F32", matrices=lambda: router(name, shape))
        if name == _EMBEDDING:
            return replace(tensor, stored="Q8_0", matrices=lambda: [_embedding(shape)])
        qtype = file.experts if name.endswith(_EXPERTS) else QuantType[tensor.stored]
        if block_size(qtype) == 1:
            return tensor
        return replace(tensor, stored=qtype.name, matrices=lambda: _blocks(name, shape, qtype))

    return [made(tensor) for tensor in hf_tensors(opened.model, opened.facts, source, arch)]


def _blocks(name: str, shape: tuple[int, ...], qtype: QuantType, gain: float = 1.0) -> list[RawTensor]:
    """Matrices [rows, cols] of one tensor."""
    *_, rows, cols = shape
    size = row_bytes(qtype, cols)
    data = torch.empty(math.prod(shape[:-1]) * size, dtype=torch.uint8)
    for start in range(0, data.numel(), _PIECE_ROWS * size):
        seed = (zlib.crc32(name.encode()), start)
        random_blocks(data[start : start + _PIECE_ROWS * size].numpy(), qtype, seed, gain)
    starts = range(0, data.numel(), rows * size)
    return [RawTensor(data[start : start + rows * size], qtype, (rows, cols)) for start in starts]


def _embedding(shape: tuple[int, ...]) -> RawTensor:
    """Q8_0 [V, hidden] whose first column is the largest number of its block, with a positive sign."""
    (table,) = _blocks(_EMBEDDING, shape, QuantType.Q8_0, EMBEDDING_GAIN)
    rows = table.data.numpy().reshape(shape[0], -1)
    is_negative = rows[:, 1] >= 128  # the upper byte of the block's fp16 scale
    rows[:, 2] = np.where(is_negative, np.uint8(129), np.uint8(127))  # as int8 -127 and 127
    return table


def _model_file(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    shape = find_shape(args.shape)
    file = ModelFile(args.out, shape.config(args.layers), EXPERT_TYPES[args.experts], args.routing)
    return print_record("disk_model_file", args.json, partial(_written, file))


def _written(file: ModelFile) -> Record:
    layout = write_model(file)
    nbytes = sum(one.nbytes for one in layout.tensors if one.name.endswith(_EXPERTS))
    print(f"{file.path}: {layout.nbytes / 1e9:.2f} GB, of which {nbytes / 1e9:.2f} GB are experts; {file.routing}")
    return {"path": str(file.path), "nbytes": layout.nbytes, "expert_bytes": nbytes, "routing": file.routing}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "Writes a GGUF file of random weights in a published shape. One that is there gets the routers asked for."
    parser, group = benchmark_parser("disk.model_file", text, _model_file)
    group.add_argument("out", type=user_path, metavar="OUT", help="the file, named *.gguf")
    group.add_argument("--shape", default="qwen3-30b-a3b", choices=list(SHAPES), help="%(default)s")
    group.add_argument("--layers", type=int, help="the first layers only; default: all")
    group.add_argument("--experts", default="q8_0", choices=list(EXPERT_TYPES), help="their type (%(default)s)")
    text = (
        "how tokens choose experts; skewed: by a Zipf-like law, a quarter of them has 70 %% of the picks (%(default)s)"
    )
    group.add_argument("--routing", default="even", choices=ROUTINGS, help=text)
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.expert_store`: what a store of experts costs where all are in memory, and how fast it reads.

Decode: calls of one row of a layer whose experts are all in slots, in turns with the same call of experts without a
store. Prompts: calls of many rows of layers of which nothing is in memory; beside them the disk's rate, of as many
threads that read the same file in pieces of 1 MiB and do nothing else.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.command import benchmark_parser
from ktransformers.bench.common.machine import machine_facts, shown_machine
from ktransformers.bench.common.random_weights import random_weight
from ktransformers.bench.common.report import Column, FigureTable, Record, print_record
from ktransformers.cli import run_command
from ktransformers.kernels.cpu import ExpertStore, MoeKernel, WorkerPool, pack_all
from ktransformers.kernels.cpu.base import CpuLayout
from ktransformers.kernels.cpu.expert_store import DISK_BLOCK, Extent, RecordLayout, RecordPart
from ktransformers.kernels.types import ActivationSpec, ExpertWeights, PackedTensor, QuantType
from ktransformers.system.cores import usable_cores

__all__ = ["main"]

_PIECE, _HUGE_PAGE = 1 << 20, 2 << 20
_COLUMNS = (
    Column("what", 22),
    Column("rows", 5),
    Column("us", 10, ".1f"),
    Column("of_limit", 9, ".1%", "of limit"),
    Column("gb_s", 7, ".2f", "GB/s"),
    Column("disk_gb_s", 7, ".2f", "disk"),
)


_Matrices = list[list[PackedTensor]]
"""gate, up and down, of each expert."""


def _experts(args: argparse.Namespace, pool: WorkerPool) -> _Matrices:
    """One layer's; all layers have the same."""
    qtype = QuantType[args.type.upper()]
    shapes = ((args.width, args.hidden), (args.width, args.hidden), (args.hidden, args.width))
    return [pack_all([random_weight(qtype, *shape) for _ in range(args.experts)], pool) for shape in shapes]


def _write(path: Path, matrices: _Matrices, layers: int) -> tuple[RecordLayout, list[list[list[Extent]]]]:
    parts, offset = list[RecordPart](), 0
    for first in (given[0] for given in matrices):
        rows, cols = first.shape
        parts.append(RecordPart(first.qtype, rows, cols, CpuLayout.TILES, offset, first.data.numel()))
        offset += -(-first.data.numel() // 64) * 64
    layout = RecordLayout(parts[0], parts[1], parts[2], -(-offset // DISK_BLOCK) * DISK_BLOCK)
    extents: list[list[list[Extent]]] = []
    with path.open("wb") as file:
        for _ in range(layers):
            extents.append([])
            for expert in zip(*matrices, strict=True):
                extents[-1].append([Extent(0, file.tell(), layout.nbytes)])
                record = torch.zeros(layout.nbytes, dtype=torch.uint8)
                for part, matrix in zip(parts, expert, strict=True):
                    record[part.offset : part.offset + part.nbytes] = matrix.data
                file.write(record.numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
    return layout, extents


def _disk_rate(path: Path, readers: int) -> float:
    """Bytes per second of the whole file, read by so many threads that do nothing else."""
    fd, count = os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size // _PIECE
    pieces, lock = iter(range(count)), threading.Lock()

    def read() -> None:
        # Pages as the store has them: of small ones, scattered in memory, a request to the disk takes few only.
        room = mmap.mmap(-1, 2 * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.madvise(mmap.MADV_HUGEPAGE)
        first = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            os.preadv(fd, [memoryview(room)[first : first + _PIECE]], piece * _PIECE)

    began, threads = time.perf_counter(), [threading.Thread(target=read) for _ in range(readers)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    took = time.perf_counter() - began
    os.close(fd)
    return count * _PIECE / took


class _Bench:
    def __init__(self, args: argparse.Namespace, pool: WorkerPool, path: Path) -> None:
        self.args, self.pool, self.path = args, pool, path
        matrices = _experts(args, pool)
        self.weights = ExpertWeights(matrices[0], matrices[1], matrices[2])
        self.layout, self.extents = _write(path, matrices, args.layers)
        self.table = FigureTable(_COLUMNS)

    def store(self, layers: int, slots: int) -> tuple[ExpertStore, list[MoeKernel]]:
        store = ExpertStore([self.path], self.pool, slots * self.layout.nbytes, self.args.io_threads)
        numbers = [store.add_layer(number, self.layout, self.extents[number]) for number in range(layers)]
        store.open(self.args.top_k)
        none = ExpertWeights(None, [], [])
        return store, [MoeKernel(none, ActivationSpec(), self.pool, n, (store, n)) for n in numbers]

    def inputs(self, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.rand(rows, self.args.experts, generator=generator).topk(self.args.top_k).indices
        return torch.randn(rows, self.args.hidden, generator=generator), ids, torch.rand(ids.shape, generator=generator)

    def decode(self) -> None:
        store, (kernel,) = self.store(1, self.args.experts)
        store.fill(wait=True)
        plain = MoeKernel(self.weights, ActivationSpec(), self.pool, 0)
        times: dict[bool, list[float]] = {False: [], True: []}
        inputs = [self.inputs(1, seed) for seed in range(61)]
        out = torch.empty(1, self.args.hidden)
        for call in range(self.args.calls):
            for is_stored in (False, True) if call % 2 else (True, False):
                chosen = inputs[(call + 31 * is_stored) % 61]  # not the experts that the other has just left in a cache
                began = time.perf_counter()
                (kernel if is_stored else plain).forward(*chosen, out)
                times[is_stored].append(time.perf_counter() - began)
        store.close()
        limit = median(times[False])
        self.table.add({"what": "decode, in memory", "rows": 1, "us": limit * 1e6})
        of_limit = median(times[True]) / limit
        self.table.add(
            {"what": "decode, store, all hit", "rows": 1, "us": median(times[True]) * 1e6, "of_limit": of_limit}
        )

    def prompt(self, rows: int) -> None:
        """Rounds of the disk alone, a store, and the disk again, whose better rate counts: what was just read may lie
        in a cache of the disk's or of a machine that this one is a guest of.
        """
        figures = []
        for _ in range(self.args.rounds):
            before = _disk_rate(self.path, self.args.io_threads)
            store, kernels = self.store(self.args.layers, self.args.slots)
            inputs, began = self.inputs(rows, rows), time.perf_counter()
            for kernel in kernels:
                kernel.forward(*inputs)
            took = time.perf_counter() - began
            rate = store.stats().bytes_read / took
            store.close()
            figures.append((rate, max(before, _disk_rate(self.path, self.args.io_threads)), took))
        rate, disk, took = (median(column) for column in zip(*figures, strict=True))
        row = {"what": "prompt, from the disk", "rows": rows, "us": took / self.args.layers * 1e6}
        self.table.add(row | {"gb_s": rate / 1e9, "disk_gb_s": disk / 1e9, "of_limit": rate / disk})


def _measure(args: argparse.Namespace) -> Record:
    pool = WorkerPool(args.cpu_infer or usable_cores())
    machine = machine_facts(pool)
    print(shown_machine(machine))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        bench = _Bench(args, pool, Path(folder, "experts"))
        bench.decode()
        for rows in (int(one) for one in args.rows.split(",")):
            bench.prompt(rows)
    pool.close()
    return {"machine": machine, "record_nbytes": bench.layout.nbytes, "figures": bench.table.rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""

    def run(args: argparse.Namespace) -> int:
        return print_record("expert_store", args.json, lambda: _measure(args))

    text = "What a store of experts costs where all are in memory, and how fast it reads where none are."
    parser, group = benchmark_parser("expert_store", text, run)
    for name, default, what in (
        ("experts", 128, "experts of a layer"),
        ("top_k", 8, "experts per token"),
        ("hidden", 2048, "hidden size"),
        ("width", 768, "intermediate size of an expert"),
        ("layers", 4, "layers in the file"),
        ("slots", 40, "slots while prompts are measured"),
        ("io_threads", 8, "threads that read"),
        ("calls", 2000, "of one row"),
        ("rounds", 5, "of each prompt"),
        ("cpu_infer", 0, "threads that compute; 0: one per core"),
    ):
        group.add_argument(f"--{name}", type=int, default=default, help=f"{what} (%(default)s)")
    group.add_argument("--type", default="q4_k", help="of the weights (%(default)s)")
    group.add_argument("--rows", default="64,512", help="of prompts (%(default)s)")
    group.add_argument("--folder", help="on the disk to be measured; default: that of temporary files")
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

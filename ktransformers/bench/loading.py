"""How fast a GGUF is loaded, beside what the machine can do.

The file is in the system's cache, or taken out of it before each run. A run builds an engine and lets go of it; its
seconds are those of `load_plan`: reading, transcoding, re-laying, nothing else. Then the limits, with as many threads:

    copy    from the file's map to memory that is there already
    fresh   the same to new memory, as loading does: the system clears pages, and a virtual machine may have to ask its
            host for them first, which can cost more than all the rest

Memory that was just let go of is often new without being fresh, so the first run on an idle machine is the slowest.
"""

from __future__ import annotations

import gc
import os
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as QuantType

from ktransformers.bench.machine import measured_machine, shown_machine
from ktransformers.bench.report import Column, Record, Row, Table
from ktransformers.config import EngineConfig
from ktransformers.engine import builder
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.weights import transcode
from ktransformers.weights.mapped_file import map_file
from ktransformers.weights.synthetic import random_blocks

__all__ = ["FileShape", "LoadingWork", "bench_loading", "write_model"]

COPY_BYTES = 4 << 30
_PHASES: tuple[tuple[Any, str, str], ...] = (
    (builder, "load_plan", "load"),
    (cpu, "pack", "re-lay"),
    (cpu, "pack_all", "re-lay"),
    (cpu, "page_out", "page out"),
    (transcode.Transcoded, "_made", "transcode"),
)
_COLUMNS = (
    Column("run", 3),
    Column("seconds", 8, ".2f"),
    Column("gb_per_s", 6, ".2f", "GB/s"),
    Column("re-lay", 8, ".2f"),
    Column("transcode", 9, ".2f"),
    Column("page out", 8, ".2f"),
    Column("other", 8, ".2f"),
    Column("peak_gb", 8, ".2f", "peak GB"),
)


@dataclass(frozen=True, slots=True)
class FileShape:
    """A Qwen3-MoE model, that of 30B-A3B; its layers share their bytes."""

    layers: int
    hidden: int = 2048
    experts: int = 128
    width: int = 768
    heads: int = 32
    vocab: int = 151_936
    kv_heads: int = 4
    head_dim: int = 128


@dataclass(frozen=True, slots=True)
class LoadingWork:
    """`runs` times with `threads`. path: a GGUF file; None: one is written. is_cold: from the disk."""

    path: Path | None
    shape: FileShape
    threads: int
    runs: int
    is_cold: bool


def write_model(path: Path, shape: FileShape) -> None:
    """Random weights in a mixture of types as llama.cpp's Q4_K_M."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(shape.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_feed_forward_length(3 * shape.hidden)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(8)
    writer.add_expert_feed_forward_length(shape.width)
    writer.add_vocab_size(shape.vocab)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    made: dict[tuple[QuantType, tuple[int, ...]], np.ndarray] = {}
    for name, qtype, size in _tensors(shape):
        if (qtype, size) not in made:
            made[qtype, size] = _random_tensor(qtype, size, seed=len(made))
        writer.add_tensor(name, made[qtype, size], raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _random_tensor(qtype: QuantType, size: tuple[int, ...], seed: int) -> np.ndarray:
    if qtype is QuantType.F32:
        return np.ones(size, dtype=np.float32)
    block, nbytes = gguf.GGML_QUANT_SIZES[qtype]
    data = np.empty(int(np.prod(size)) // block * nbytes, dtype=np.uint8)
    random_blocks(data, qtype, (seed,))
    return data.reshape(*size[:-1], -1)


def _tensors(shape: FileShape) -> Iterator[tuple[str, QuantType, tuple[int, ...]]]:
    """Name, type and size of every one."""
    q4, q6, f32 = QuantType.Q4_K, QuantType.Q6_K, QuantType.F32
    hidden, experts, width = shape.hidden, shape.experts, shape.width
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", q4, (shape.vocab, hidden)
    yield "output.weight", q6, (shape.vocab, hidden)
    yield "output_norm.weight", f32, (hidden,)
    for layer in range(shape.layers):
        for name, qtype, size in (
            ("attn_norm", f32, (hidden,)),
            ("ffn_norm", f32, (hidden,)),
            ("attn_q_norm", f32, (shape.head_dim,)),
            ("attn_k_norm", f32, (shape.head_dim,)),
            ("ffn_gate_inp", f32, (experts, hidden)),
            ("attn_q", q4, (queries, hidden)),
            ("attn_k", q4, (keys, hidden)),
            ("attn_v", q4, (keys, hidden)),
            ("attn_output", q4, (hidden, queries)),
            ("ffn_gate_exps", q4, (experts, width, hidden)),
            ("ffn_up_exps", q4, (experts, width, hidden)),
            ("ffn_down_exps", q6, (experts, hidden, width)),
        ):
            yield f"blk.{layer}.{name}.weight", qtype, size


@contextmanager
def _timed(owner: Any, name: str, seconds: dict[str, float], label: str) -> Iterator[None]:
    """While this is open, what calls of `owner.name` take is added up."""
    inner: Callable[..., Any] = getattr(owner, name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        before = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            seconds[label] += time.perf_counter() - before

    setattr(owner, name, measured)
    try:
        yield
    finally:
        setattr(owner, name, inner)


def _settle(path: Path, is_cold: bool) -> None:
    """Have the file in the system's cache, or not."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        if is_cold:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return
        room = bytearray(8 << 20)
        while file.readinto(room):
            pass


def _load_once(path: Path, threads: int) -> Row:
    """Build an engine and let go of it."""
    seconds: dict[str, float] = defaultdict(float)
    with ExitStack() as stack:
        for owner, name, label in _PHASES:
            stack.enter_context(_timed(owner, name, seconds, label))
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        engine = builder.build_engine(EngineConfig(gguf_path=path, cpu_infer=threads, cache_lens=256))
    total, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    engine.close()
    phases = dict(seconds) | {"other": 2 * seconds["load"] - sum(seconds.values())}
    return {
        "seconds": phases["load"],
        "gb_per_s": path.stat().st_size / seconds["load"] / 1e9,
        "phases": phases,
        "engine_seconds": total,
        "cpu_seconds": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime,
        "system_seconds": after.ru_stime - before.ru_stime,
        "peak_gb": after.ru_maxrss / 1e6,
        "planned_gb": engine.plan.weight_bytes["cpu"] / 1e9,
    }


def _copy_speeds(path: Path, threads: int) -> dict[str, float]:
    """GB/s of a plain copy out of the file's map, to new memory and to the same memory again."""
    source = map_file(path).numpy()[:COPY_BYTES]
    with closing(WorkerPool(1)) as pool:
        target = cpu.empty_bytes(source.size, pool).numpy()
    step = -(-source.size // threads)

    def copy(first: int) -> None:
        for start in range(first, min(first + step, source.size), 1 << 20):
            stop = min(start + (1 << 20), first + step, source.size)
            np.copyto(target[start:stop], source[start:stop])

    speeds = {}
    with ThreadPoolExecutor(threads) as workers:
        for name in ("fresh", "copy"):
            before = time.perf_counter()
            list(workers.map(copy, range(0, source.size, step)))
            speeds[name] = source.size / (time.perf_counter() - before) / 1e9
    return speeds


def bench_loading(work: LoadingWork) -> Record:
    """Print a table, a line per run, and the limits."""
    with tempfile.TemporaryDirectory() as folder:
        path = work.path
        if path is None:
            path = Path(folder) / "random.gguf"
            write_model(path, work.shape)
        return _measure(path, work)


def _measure(path: Path, work: LoadingWork) -> Record:
    machine, file_gb = measured_machine(work.threads), path.stat().st_size / 1e9
    print(f"{shown_machine(machine)}; {path.name}, {file_gb:.2f} GB, {'cold' if work.is_cold else 'cached'}")
    table = Table(_COLUMNS)
    for number in range(1, work.runs + 1):
        _settle(path, work.is_cold)
        row = _load_once(path, work.threads)
        table.add(row, run=number, **row["phases"])
        gc.collect()
    _settle(path, False)
    limits = _copy_speeds(path, work.threads)
    best = max(row["gb_per_s"] for row in table.rows)
    print(
        f"a copy with {work.threads} threads: {limits['copy']:.2f} GB/s, to fresh memory {limits['fresh']:.2f} GB/s; "
        f"the best run is at {best / limits['fresh']:.2f} of that"
    )
    record = {"machine": machine, "file_gb": file_gb, "is_cold": work.is_cold, "runs": table.rows}
    return record | {"limits_gb_per_s": limits}

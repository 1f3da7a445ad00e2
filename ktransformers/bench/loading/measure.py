"""The speed at which a model's files are loaded, beside what the machine can do.

The files are in the system's cache (warm), or taken out of it before each run (cold). A run builds an engine and lets
go of it; its seconds are those of `load_plan`: reading, transcoding, packing, uploading, nothing else.

    read       out of the files, by the threads that pack: seconds of all of them over their number
    pack       into tiles, into new memory that the system clears; likewise
    upload     to a GPU, without what it reads
    transcode  types without a kernel
    other      what is left: Python, threads without work

Then the limits, with as many threads:

    disk       reading the files when they are not in the system's cache
    cache      reading them when they are, into the same little memory again
    copy       from the files' maps to memory that is there already
    fresh      the same to new memory, as loading does: the system clears pages, and a virtual machine may have to ask
               its host for them first, which can cost more than all the rest

Memory that was just let go of is often new without being fresh, so the first run on an idle machine is the slowest.
"""

from __future__ import annotations

import gc
import os
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ktransformers.bench.common.machine import measured_machine, ram_now, ram_peak, reset_ram_peak, shown_machine
from ktransformers.bench.common.report import Column, FigureTable, Record, Row
from ktransformers.bench.loading.files import FileFormat, FileShape, write_files
from ktransformers.config import EngineConfig
from ktransformers.engine.load import builder, stages
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.experts import resident
from ktransformers.operators.linear import matrix
from ktransformers.weights.mapped_file import map_file
from ktransformers.weights.quantize import transcode

__all__ = ["CACHE_STATES", "CacheState", "LoadWork", "bench_load"]

CacheState = Literal["warm", "cold"]
CACHE_STATES: tuple[CacheState, ...] = get_args(CacheState)

LIMIT_BYTES = 4 << 30
"""Of the files, at most, by which a limit is measured."""
_CHUNK = 1 << 20
_COLUMNS = (
    Column("cache", 5),
    Column("run", 3),
    Column("seconds", 8, ".2f"),
    Column("gb_per_s", 6, ".2f", "GB/s"),
    Column("read", 8, ".2f"),
    Column("pack", 8, ".2f"),
    Column("upload", 8, ".2f"),
    Column("transcode", 9, ".2f"),
    Column("other", 8, ".2f"),
    Column("cpu_seconds", 8, ".2f", "CPU s"),
    Column("peak_gb", 8, ".2f", "peak GB"),
    Column("peak_over_stays", 10, ".2f", "over stays"),
)


@dataclass(frozen=True, slots=True)
class LoadWork:
    """Loading to measure, `runs` times in each state of the system's cache.

    config: names the files, and the threads; without files, one of `shape` is written in `kind`.
    """

    config: EngineConfig
    shape: FileShape
    kind: FileFormat
    runs: int
    states: Sequence[CacheState]


@dataclass
class _Load:
    """What one `load_plan` took. waits: seconds by column, of calls that nothing runs beside."""

    seconds: float
    waits: dict[str, float]
    read: float
    pack: float
    peak: int
    stays: int


def _timed(seconds: dict[str, float], label: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """What calls of `inner` take is added up, without what threads read meanwhile."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        before, began = cpu.pack_times(), time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            seconds[label] += time.perf_counter() - began
            seconds[f"{label} read"] += cpu.pack_times()[0] - before[0]

    return measured


@contextmanager
def _watched(threads: int, loads: list[_Load]) -> Iterator[None]:
    """While this is open, each `load_plan` is noted."""
    waits: dict[str, float] = defaultdict(float)
    inner: Callable[..., None] = getattr(stages, "load_plan")  # noqa: B009 (the name by which loading calls it)

    def load_plan(*args: Any, **kwargs: Any) -> None:
        reset_ram_peak()
        waits.clear()
        before, began = cpu.pack_times(), time.perf_counter()
        inner(*args, **kwargs)
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        seconds, (read, pack) = time.perf_counter() - began, cpu.pack_times()
        shared = {label: waits[label] - waits[f"{label} read"] / threads for label in ("upload", "transcode")}
        times = (read - before[0]) / threads, (pack - before[1]) / threads
        stays = ram_now()
        loads.append(_Load(seconds, shared, *times, max(ram_peak(), stays), stays))  # the system counts both roughly

    with ExitStack() as stack:
        for owner, name, label in (
            (resident, "upload", "upload"),
            (matrix, "upload", "upload"),
            (transcode.Transcoded, "_made", "transcode"),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, _timed(waits, label, getattr(owner, name)))
        stack.callback(setattr, stages, "load_plan", inner)
        setattr(stages, "load_plan", load_plan)  # noqa: B010 (mypy forbids to assign to a function)
        yield


def _settle(paths: Sequence[Path], state: CacheState) -> None:
    """Have the files in the system's cache, or not."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            if state == "cold":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if state == "warm":
        _read_speed(paths, threads=2, most=None)


def _load_once(config: EngineConfig, nbytes: int) -> Row:
    """Build an engine and let go of it."""
    loads = list[_Load]()
    with _watched(config.cpu_infer, loads):
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        engine = builder.build_engine(config)
        total, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    engine.close()
    (load,) = loads
    phases = {"read": load.read, "pack": load.pack} | load.waits
    phases["other"] = load.seconds - sum(phases.values())
    return {
        "seconds": load.seconds,
        "gb_per_s": nbytes / load.seconds / 1e9,
        "phases": phases,
        "engine_seconds": total,
        "cpu_seconds": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime,
        "system_seconds": after.ru_stime - before.ru_stime,
        "peak_gb": load.peak / 1e9,
        "stays_gb": load.stays / 1e9,
        "peak_over_stays": load.peak / load.stays,
        "planned_gb": sum(engine.plan.weight_bytes.values()) / 1e9,
    }


def _pieces(paths: Sequence[Path], most: int | None) -> list[tuple[Path, int, int]]:
    """(file, first byte, bytes), _CHUNK at a time."""
    made, room = list[tuple[Path, int, int]](), most
    for path in paths:
        size = path.stat().st_size if room is None else min(path.stat().st_size, room)
        made += [(path, at, min(_CHUNK, size - at)) for at in range(0, size, _CHUNK)]
        room = None if room is None else room - size
    return made


def _read_speed(paths: Sequence[Path], threads: int, most: int | None = LIMIT_BYTES) -> float:
    """GB/s of reading the files, each thread into a little memory of its own, in the order of the files."""
    files = {path: os.open(path, os.O_RDONLY) for path in paths}
    pieces = _pieces(paths, most)

    def read(first: int) -> None:
        room = bytearray(_CHUNK)
        for path, at, size in pieces[first::threads]:
            os.preadv(files[path], [memoryview(room)[:size]], at)

    try:
        before = time.perf_counter()
        with ThreadPoolExecutor(threads) as workers:
            list(workers.map(read, range(threads)))
        return sum(size for _, _, size in pieces) / (time.perf_counter() - before) / 1e9
    finally:
        for file in files.values():
            os.close(file)


def _copy_speeds(paths: Sequence[Path], threads: int) -> dict[str, float]:
    """GB/s of a plain copy out of the files' maps, to new memory and to the same memory again."""
    pieces, maps = _pieces(paths, LIMIT_BYTES), {path: map_file(path).numpy() for path in paths}
    total = sum(size for _, _, size in pieces)
    with closing(WorkerPool(1)) as pool:
        target = cpu.empty_bytes(total, pool).numpy()
    share = -(-len(pieces) // threads)

    def copy(first: int) -> None:
        at = sum(size for _, _, size in pieces[:first])
        for path, start, size in pieces[first : first + share]:
            target[at : at + size] = maps[path][start : start + size]
            at += size

    speeds = {}
    with ThreadPoolExecutor(threads) as workers:
        for name in ("fresh", "copy"):
            before = time.perf_counter()
            list(workers.map(copy, range(0, len(pieces), share)))
            speeds[name] = total / (time.perf_counter() - before) / 1e9
    return speeds


def bench_load(work: LoadWork) -> Record:
    """Load a model's files repeatedly; print a table, a line per run, and the limits."""
    named = work.config.gguf_path or work.config.model_path
    if named is not None:
        return _measure(named, work)
    with tempfile.TemporaryDirectory() as folder:
        path = write_files(Path(folder), work.shape, work.kind)
        is_gguf = work.kind == "gguf"
        config = replace(work.config, gguf_path=path) if is_gguf else replace(work.config, model_path=path)
        return _measure(path, replace(work, config=config))


def _files(named: Path) -> list[Path]:
    if named.is_file():
        return [named]
    return sorted(path for path in named.iterdir() if path.suffix in (".safetensors", ".gguf"))


def _measure(named: Path, work: LoadWork) -> Record:
    config, paths = work.config, _files(named)
    threads, nbytes = config.cpu_infer, sum(path.stat().st_size for path in paths)
    machine = measured_machine(threads)
    print(f"{shown_machine(machine)}; {named.name}, {nbytes / 1e9:.2f} GB")
    table = FigureTable(_COLUMNS)
    for state in work.states:
        for number in range(1, work.runs + 1):
            _settle(paths, state)
            row = _load_once(config, nbytes)
            table.add({"cache": state, "run": number} | row, **row["phases"])
            gc.collect()
    limits = {}
    if "cold" in work.states:
        _settle(paths, "cold")
        limits["disk"] = _read_speed(paths, threads)
    _settle(paths, "warm")
    limits |= {"cache": _read_speed(paths, threads)} | _copy_speeds(paths, threads)
    shown = ", ".join(f"{name} {rate:.2f}" for name, rate in limits.items())
    print(f"limits with {threads} threads, GB/s: {shown}")
    for state in work.states:
        best = max(row["gb_per_s"] for row in table.rows if row["cache"] == state)
        limit = limits["disk"] if state == "cold" else limits["fresh"]
        print(f"{state}: the best run has {best:.2f} GB/s, {best / limit:.2f} of {limit:.2f}")
    return {"machine": machine, "file_gb": nbytes / 1e9, "runs": table.rows, "limits_gb_per_s": limits}

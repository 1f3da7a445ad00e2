"""How fast a GGUF is loaded for the CPU, beside what the machine can do; the last line is JSON.

    python benchmarks/loading.py --gguf_path MODEL.gguf [--threads N] [--runs N] [--cold]
    python benchmarks/loading.py --layers 48      writes random weights in Qwen3-30B's shape first (0.4 GB a layer)

The file is in the system's cache (--cold: taken out of it before each run). A run builds an engine and lets go of it;
its seconds are those of `load_plan`: reading, transcoding, re-laying, nothing else. Then the limits, with as many
threads:

    copy    from the file's map to memory that is there already
    fresh   the same to new memory, as loading does: the system clears pages, and a virtual machine may have to ask its
            host for them first, which can cost more than all the rest

With CUDA_VISIBLE_DEVICES= set to nothing all weights go to the CPU; else as `ktransformers plan` says.
Memory that was just let go of is often new without being fresh, so the first run on an idle machine is the slowest.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as QuantType

from ktransformers.config import EngineConfig, cpu_name, physical_cores
from ktransformers.engine import builder
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.weights import transcode
from ktransformers.weights.mapped_file import map_file
from ktransformers.weights.synthetic import random_blocks

HIDDEN, EXPERTS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 128, 768, 32, 4, 128, 151_936
COPY_BYTES = 4 << 30


def write_model(path: Path, num_layers: int) -> None:
    """Q4_K_M as llama.cpp mixes it; layers share their bytes."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(num_layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_feed_forward_length(6144)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(8)
    writer.add_expert_feed_forward_length(WIDTH)
    writer.add_vocab_size(VOCAB)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    made: dict[tuple[QuantType, tuple[int, ...]], np.ndarray] = {}

    def matrix(name: str, qtype: QuantType, *shape: int) -> None:
        if (qtype, shape) not in made:
            block, nbytes = gguf.GGML_QUANT_SIZES[qtype]
            data = np.empty(int(np.prod(shape)) // block * nbytes, dtype=np.uint8)
            random_blocks(data, qtype, (len(made),))
            made[qtype, shape] = data.reshape(*shape[:-1], -1)
        writer.add_tensor(name, made[qtype, shape], raw_dtype=qtype)

    def floats(name: str, *shape: int) -> None:
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))

    q4, q6 = QuantType.Q4_K, QuantType.Q6_K
    matrix("token_embd.weight", q4, VOCAB, HIDDEN)
    matrix("output.weight", q6, VOCAB, HIDDEN)
    floats("output_norm.weight", HIDDEN)
    for layer in range(num_layers):
        at = f"blk.{layer}."
        for name, size in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn_q_norm", 128), ("attn_k_norm", 128)):
            floats(f"{at}{name}.weight", size)
        floats(f"{at}ffn_gate_inp.weight", EXPERTS, HIDDEN)
        matrix(f"{at}attn_q.weight", q4, HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{at}attn_k.weight", q4, KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{at}attn_v.weight", q4, KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{at}attn_output.weight", q4, HIDDEN, HEADS * HEAD_DIM)
        matrix(f"{at}ffn_gate_exps.weight", q4, EXPERTS, WIDTH, HIDDEN)
        matrix(f"{at}ffn_up_exps.weight", q4, EXPERTS, WIDTH, HIDDEN)
        matrix(f"{at}ffn_down_exps.weight", q6, EXPERTS, HIDDEN, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def timed(owner: Any, name: str, seconds: Counter[str], label: str) -> None:
    """Add up what calls of `owner.name` take."""
    inner: Callable[..., Any] = getattr(owner, name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        before = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            seconds[label] += time.perf_counter() - before

    setattr(owner, name, measured)


def settle(path: Path, is_cold: bool) -> None:
    """Have the file in the system's cache, or not."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        if is_cold:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return
        room = bytearray(8 << 20)
        while file.readinto(room):
            pass


def load_once(path: Path, threads: int, seconds: Counter[str]) -> dict[str, Any]:
    seconds.clear()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    engine = builder.build_engine(EngineConfig(gguf_path=path, cpu_infer=threads, cache_lens=256))
    total, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    engine.close()
    phases = {label: round(value, 3) for label, value in seconds.items()}
    phases["other"] = round(2 * seconds["load"] - sum(seconds.values()), 3)
    return {
        "seconds": phases["load"],
        "gb_per_s": round(path.stat().st_size / seconds["load"] / 1e9, 2),
        "phases": phases,
        "engine_seconds": round(total, 3),
        "cpu_seconds": round(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, 2),
        "system_seconds": round(after.ru_stime - before.ru_stime, 2),
        "peak_gb": round(after.ru_maxrss / 1e6, 2),
        "planned_gb": round(engine.plan.weight_bytes["cpu"] / 1e9, 2),
    }


def copy_speeds(path: Path, threads: int) -> dict[str, float]:
    """GB/s of a plain copy out of the file's map, to new memory and to the same memory again."""
    source = map_file(path).numpy()[:COPY_BYTES]
    pool = WorkerPool(1)
    target = cpu.empty_bytes(source.size, pool).numpy()
    pool.close()
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
            speeds[name] = round(source.size / (time.perf_counter() - before) / 1e9, 2)
    return speeds


def measure(path: Path, threads: int, runs: int, is_cold: bool) -> dict[str, Any]:
    seconds: Counter[str] = Counter()
    for owner, name, label in (
        (builder, "load_plan", "load"),
        (cpu, "pack", "re-lay"),
        (cpu, "pack_all", "re-lay"),
        (cpu, "page_out", "page out"),
        (transcode.Transcoded, "_made", "transcode"),
    ):
        timed(owner, name, seconds, label)
    rows = []
    for number in range(runs):
        settle(path, is_cold)
        rows.append(load_once(path, threads, seconds))
        gc.collect()
        print(f"run {number + 1}: {rows[-1]['seconds']:.2f} s, {rows[-1]['gb_per_s']} GB/s, {rows[-1]}", flush=True)
    settle(path, False)
    limits = copy_speeds(path, threads)
    best = max(row["gb_per_s"] for row in rows)
    print(f"limits with {threads} threads: {limits} GB/s; the best run is at {best / limits['fresh']:.2f} of fresh")
    return {
        "benchmark": "loading",
        "device": cpu_name(),
        "cores": physical_cores(),
        "threads": threads,
        "torch": torch.__version__,
        "file_gb": round(path.stat().st_size / 1e9, 2),
        "is_cold": is_cold,
        "runs": rows,
        "limits_gb_per_s": limits,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf_path", type=Path)
    parser.add_argument("--layers", type=int, default=8, help="of the file that is written without --gguf_path")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    if args.gguf_path is not None:
        result = measure(args.gguf_path, args.threads, args.runs, args.cold)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "random.gguf"
            write_model(path, args.layers)
            result = measure(path, args.threads, args.runs, args.cold)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

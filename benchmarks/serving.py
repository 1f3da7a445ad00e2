"""Throughput of balance_serve at several concurrencies in one run, beside what the memory allows.

Starts a server on a free port, sends streamed completions of random token ids (so that models without a vocabulary work
too), first alone and then N at once, and prints for each N: total tokens/s, time to first token and inter-token latency
as percentiles, distinct experts that a layer touches per step, and the bound:

    tokens/s <= N * read bandwidth / (dense bytes + expert layers * touched experts * bytes of one expert)

Every decode step reads the dense weights once and each touched expert once, whatever the number of sequences. The read
bandwidth is measured in the same run (sums over a gigabyte, all threads). The last line is JSON.

    python benchmarks/serving.py --gguf_path Qwen3-30B-A3B-Q4_K_M.gguf
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch

from ktransformers.config import DEMO_MODEL_PATH, physical_cores

GIB = 1 << 30


@dataclass(slots=True)
class Stream:
    """One answer: seconds on the benchmark's clock."""

    sent_at: float
    token_times: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Weights:
    """What a decode step reads, in bytes."""

    dense: int
    expert: int  # one expert of one layer
    expert_layers: int
    vocab_size: int

    def per_step(self, touched: float) -> float:
        return self.dense + self.expert_layers * touched * self.expert


def weights_of(path: Path) -> Weights:
    """From the file's headers. The embedding table is read row by row and does not count, unless it is tied."""
    reader = gguf.GGUFReader(path)
    names = {tensor.name for tensor in reader.tensors}
    dense = expert = 0
    layers = set()
    for tensor in reader.tensors:
        if "_exps." in tensor.name:
            layers.add(tensor.name.split(".")[1])
            expert += int(tensor.n_bytes) // int(tensor.shape[-1])
        elif tensor.name != "token_embd.weight" or "output.weight" not in names:
            dense += int(tensor.n_bytes)
    vocab = next(int(tensor.shape[-1]) for tensor in reader.tensors if tensor.name == "token_embd.weight")
    return Weights(dense, expert // max(len(layers), 1), len(layers), vocab)


def read_bandwidth(num_threads: int) -> float:
    """Bytes per second of the best of five sums over a gigabyte."""
    torch.set_num_threads(num_threads)
    values = torch.ones(GIB // 4)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        values.sum()
        best = max(best, GIB / (time.perf_counter() - began))
    return best


class Server:
    """`ktransformers serve` in a child process."""

    def __init__(self, args: argparse.Namespace):
        command = [sys.executable, "-m", "ktransformers", "serve", str(args.gguf_path), "--port", "0"]
        command += ["--backend_type", args.backend_type, "--cpu_infer", str(args.cpu_infer)]
        if args.backend_type == "balance_serve":
            command += ["--max_batch_size", str(max(args.concurrency))]
            command += ["--cache_lens", str(max(args.concurrency) * (args.prompt_len + args.max_tokens + 128))]
        command += getattr(args, "flags", [])
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            found = re.search(r"serving .* on http://127\.0\.0\.1:(\d+)/v1", line)
            if found:
                self.port = int(found[1])
                break
        else:
            raise SystemExit("the server did not start:\n" + "".join(lines))
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        assert self.process.stderr is not None
        for _ in self.process.stderr:
            pass

    def metrics(self) -> dict[str, float]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name.partition("{")[0]: float(value) for name, value in pairs}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def stream_one(server: Server, prompt: list[int], max_tokens: int, seed: int) -> Stream:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "seed": seed}
    body |= {"temperature": 1.0, "return_token_ids": True}  # token ids: every token has its chunk, with text or without
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=1200)
    stream = Stream(time.perf_counter())
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            stream.error = response.read(300).decode(errors="replace")
            return stream
        for line in response:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    stream.error = str(chunk["error"])
                    break
                stream.token_times += [time.perf_counter()] * len(chunk["choices"][0]["token_ids"])
    finally:
        connection.close()
    return stream


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def run(server: Server, concurrency: int, args: argparse.Namespace, weights: Weights) -> dict[str, Any]:
    """`concurrency` streams, all sent at once; rounds of them."""
    rng = random.Random(concurrency)
    streams: list[Stream] = []
    before = server.metrics()
    began = time.perf_counter()
    for _ in range(args.rounds):
        batch: list[Stream | None] = [None] * concurrency

        def one(index: int, batch: list[Stream | None] = batch) -> None:
            prompt = [rng.randrange(weights.vocab_size) for _ in range(args.prompt_len)]
            batch[index] = stream_one(server, prompt, args.max_tokens, index)

        threads = [threading.Thread(target=one, args=(i,)) for i in range(concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        streams += [stream for stream in batch if stream is not None]
    seconds = time.perf_counter() - began
    after = server.metrics()
    errors = [stream.error for stream in streams if stream.error]
    if errors:
        raise SystemExit(f"a request failed: {errors[0]}")
    num_tokens = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    ttft = [stream.token_times[0] - stream.sent_at for stream in streams if stream.token_times]
    gaps = [gap for stream in streams for gap in stream.gaps]
    decode_seconds = max(statistics.mean(stream.token_times[-1] - stream.token_times[0] for stream in streams), 1e-9)
    return {
        "concurrency": concurrency,
        "tokens": int(num_tokens),
        "seconds": seconds,
        "total_tokens_per_s": num_tokens / seconds,
        "decode_tokens_per_s": concurrency * (args.max_tokens - 1) / decode_seconds,
        "ttft_s": {"p50": percentile(ttft, 0.5), "p99": percentile(ttft, 0.99)},
        "inter_token_s": {"p50": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99)},
        "experts_touched": after.get("ktransformers:experts_touched", float("nan")),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gguf_path", type=Path, default=next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))), None))
    parser.add_argument("--backend_type", default="balance_serve")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt_len", type=int, default=64)
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cpu_infer", type=int, default=physical_cores())
    args = parser.parse_args(argv)
    weights, bandwidth = weights_of(args.gguf_path), read_bandwidth(args.cpu_infer)
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    print(f"{cpu}, {args.cpu_infer} threads, read bandwidth {bandwidth / 1e9:.1f} GB/s; {args.gguf_path.name}")
    print(
        f"a decode step reads {weights.dense / 1e6:.1f} MB dense and {weights.expert / 1e6:.3f} MB per touched expert "
        f"in {weights.expert_layers} layers"
    )
    server = Server(args)
    try:
        run(server, 1, argparse.Namespace(**vars(args) | {"rounds": 1, "max_tokens": 8}), weights)  # warm-up
        results = [run(server, concurrency, args, weights) for concurrency in args.concurrency]
    finally:
        server.close()
    print(f"{'N':>3} {'total t/s':>10} {'decode t/s':>11} {'TTFT p50/p99 s':>17} {'ITL p50/p99 ms':>17} {'experts':>8} "
          f"{'bound t/s':>10} {'of bound':>9}")  # fmt: skip
    for result in results:
        result["bound_tokens_per_s"] = result["concurrency"] * bandwidth / weights.per_step(result["experts_touched"])
        ttft, gap = result["ttft_s"], result["inter_token_s"]
        print(
            f"{result['concurrency']:>3} {result['total_tokens_per_s']:>10.1f} {result['decode_tokens_per_s']:>11.1f} "
            f"{ttft['p50']:>8.3f}/{ttft['p99']:>8.3f} {1e3 * gap['p50']:>8.1f}/{1e3 * gap['p99']:>8.1f} "
            f"{result['experts_touched']:>8.1f} {result['bound_tokens_per_s']:>10.1f} "
            f"{result['decode_tokens_per_s'] / result['bound_tokens_per_s']:>8.0%}"
        )
    machine = {"cpu": cpu, "threads": args.cpu_infer, "read_bandwidth_gb_s": bandwidth / 1e9}
    print(json.dumps({"machine": machine, "model": args.gguf_path.name, "runs": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

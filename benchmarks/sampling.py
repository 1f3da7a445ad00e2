"""What choosing a token costs, ours beside torch's; the last line is JSON.

    python benchmarks/sampling.py [--vocab N] [--threads N] [--seconds S]

Ours is `sample_batch`, as the engine calls it, one row and 16 rows of fp32 logits at a time. torch's is what
transformers' logits processors do with the same numbers: a division, `topk` and a comparison (top_k), an ascending
sort, softmax and cumulative sum scattered back (top_p), softmax and a comparison (min_p), then softmax and
`multinomial`; `argmax` when greedy. Both have the same threads. Logits: "peaked" is normal with five tokens far above,
as a model's are; "normal" has a standard deviation of 3, a nucleus of hundreds of tokens. The bound is reading the
logits once from memory; one row, and here often 16, come from a cache instead.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from ktransformers.config import cpu_name
from ktransformers.core import SamplingParams
from ktransformers.engine.sampler import RequestSampler, sample_batch
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.limits import read_bandwidth

CASES = {
    "greedy": SamplingParams(temperature=0.0, seed=0),
    "temperature": SamplingParams(temperature=0.6, seed=0),
    "top_p": SamplingParams(temperature=0.6, top_p=0.95, seed=0),
    "top_k, top_p": SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=0),
    "min_p": SamplingParams(temperature=0.6, min_p=0.05, seed=0),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5, seed=0),
}


def best_ms(run: Callable[[], object], seconds: float) -> float:
    """Shortest of the runs that fit in `seconds` (at least three), in milliseconds."""
    run()
    best, start, count = float("inf"), time.perf_counter(), 0
    while count < 3 or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - before)
        count += 1
    return best * 1e3


def make_logits(kind: str, num_rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if kind == "normal":
        return torch.randn(num_rows, vocab, generator=generator) * 3
    logits = torch.randn(num_rows, vocab, generator=generator) * 2.5 + 2
    best = torch.randint(vocab, (num_rows, 5), generator=generator)
    return logits.scatter(1, best, torch.rand(num_rows, 5, generator=generator) * 10 + 15)


def torch_choice(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """One token per row [B], as transformers does it."""
    if params.logprobs is not None:
        torch.log_softmax(logits, dim=-1).topk(params.logprobs)
    if params.is_greedy:
        return logits.argmax(dim=-1)
    scores = logits / params.temperature
    if params.top_k > 0:
        scores = scores.masked_fill(scores < scores.topk(params.top_k)[0][..., -1:], -torch.inf)
    if params.top_p < 1.0:
        ordered, order = scores.sort(descending=False)
        removed = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - params.top_p
        removed[..., -1:] = False
        scores = scores.masked_fill(removed.scatter(1, order, removed), -torch.inf)
    if params.min_p > 0.0:
        weights = scores.softmax(dim=-1)
        scores = scores.masked_fill(weights < params.min_p * weights.amax(dim=-1, keepdim=True), -torch.inf)
    return torch.multinomial(scores.softmax(dim=-1), 1)[:, 0]


def measure(
    kind: str, name: str, num_rows: int, vocab: int, pool: WorkerPool, seconds: float, bandwidth: float
) -> dict[str, object]:
    logits, params = make_logits(kind, num_rows, vocab), CASES[name]
    requests = [RequestSampler(params, [], vocab) for _ in range(num_rows)]
    positions = list(range(num_rows))
    ours = best_ms(lambda: sample_batch(logits, requests, positions, pool), seconds)
    theirs = best_ms(lambda: torch_choice(logits, params), seconds)
    case: dict[str, object] = {
        "logits": kind,
        "case": name,
        "rows": num_rows,
        "ms": round(ours, 3),
        "torch_ms": round(theirs, 3),
        "bound_ms": round(num_rows * vocab * 4 / bandwidth * 1e3, 3),
    }
    print(
        f"{kind:7s} {name:13s} {num_rows:2d} rows {ours:8.3f} ms  torch {theirs:8.3f} ms  x{theirs / ours:<6.1f}"
        f" bound {case['bound_ms']} ms"
    )
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pool = WorkerPool(args.threads)
    bandwidth = read_bandwidth(pool, nbytes=1 << 28)
    cases = [
        measure(kind, name, num_rows, args.vocab, pool, args.seconds, bandwidth)
        for kind in ("peaked", "normal")
        for name in CASES
        for num_rows in (1, 16)
    ]
    result = {
        "benchmark": "sampling",
        "device": cpu_name(),
        "isa": pool.isa.value,
        "threads": args.threads,
        "vocab": args.vocab,
        "gb_per_s": round(bandwidth / 1e9, 1),
        "cases": cases,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

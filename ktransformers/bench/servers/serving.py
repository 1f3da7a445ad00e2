"""Throughput of a server at several concurrencies in one run, beside what the memory allows.

Starts a server on a free port, sends streamed completions of random token ids (so that models without a vocabulary work
too), first one for warming up and then N at once, and prints for each N: total tokens/s, time to first token and
inter-token latency as percentiles, distinct experts that a layer touches per step, and the bound:

    tokens/s <= N * read bandwidth / (dense bytes + expert layers * touched experts * bytes of one expert)

Every decode step reads the dense weights once and each touched expert once, whatever the number of sequences. The read
bandwidth is measured in the same run.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ktransformers.bench.common.machine import measured_machine, shown_machine
from ktransformers.bench.common.report import Column, FigureTable, Record, Row
from ktransformers.bench.servers.client import RequestError
from ktransformers.bench.servers.process import ServerProcess
from ktransformers.bench.servers.weights import Weights, shown_weights, weights_of
from ktransformers.weights.gguf.file import open_gguf

__all__ = ["ServingWork", "bench_serving"]

_COLUMNS = (
    Column("concurrency", 3, title="N"),
    Column("total_tokens_per_s", 10, ".1f", "total t/s"),
    Column("decode_tokens_per_s", 11, ".1f", "decode t/s"),
    Column("ttft", 17, title="TTFT p50/p99 s"),
    Column("gap", 17, title="ITL p50/p99 ms"),
    Column("experts_touched", 8, ".1f", "experts"),
    Column("bound_tokens_per_s", 10, ".1f", "bound t/s"),
    Column("share", 9, ".0%", "of bound"),
)


@dataclass(frozen=True, slots=True)
class ServingWork:
    """The load: `rounds` of N streams for each N of `concurrency`, prompts of prompt_len tokens, answers of max_tokens.

    more: flags of the server.
    """

    gguf_path: Path
    concurrency: Sequence[int]
    prompt_len: int
    max_tokens: int
    rounds: int
    cpu_infer: int
    backend_type: str = "balance_serve"
    more: Sequence[str] = ()

    def flags(self) -> list[str]:
        """The flags with which the server is started."""
        flags = [str(self.gguf_path), "--backend_type", self.backend_type, "--cpu_infer", str(self.cpu_infer)]
        flags += self.more
        if self.backend_type == "balance_serve":
            most = max(self.concurrency)
            flags += ["--max_batch_size", str(most)]
            flags += ["--cache_lens", str(most * (self.prompt_len + self.max_tokens + 128))]
        return flags


@dataclass(slots=True)
class _Stream:
    """One answer: seconds on the benchmark's clock."""

    sent_at: float
    token_times: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


def bench_serving(work: ServingWork) -> Record:
    """Start a server and measure it; print a table, a line per number of streams."""
    weights, machine = weights_of(open_gguf(work.gguf_path)), measured_machine(work.cpu_infer)
    print(f"{shown_machine(machine)}; {work.gguf_path.name}\n{shown_weights(weights)}")
    server = ServerProcess(work.flags())
    try:
        _run(server, 1, replace(work, rounds=1, max_tokens=8), weights)  # warm-up
        table = FigureTable(_COLUMNS)
        for concurrency in work.concurrency:
            row = _run(server, concurrency, work, weights)
            touched = row["experts_touched"] or 0.0
            row["bound_tokens_per_s"] = concurrency * machine["read_bandwidth_gb_s"] * 1e9 / weights.per_step(touched)
            ttft, gap = row["ttft_s"], row["inter_token_s"]
            table.add(
                row,
                ttft=f"{ttft['p50']:.3f}/{ttft['p99']:.3f}",
                gap=f"{1e3 * gap['p50']:.1f}/{1e3 * gap['p99']:.1f}",
                share=row["decode_tokens_per_s"] / row["bound_tokens_per_s"],
            )
    finally:
        server.close()
    return {"machine": machine, "model": work.gguf_path.name, "weights": asdict(weights), "runs": table.rows}


def _run(server: ServerProcess, concurrency: int, work: ServingWork, weights: Weights) -> Row:
    """`concurrency` streams, all sent at once; rounds of them."""
    rng = random.Random(concurrency)
    before, began = server.metrics(), time.perf_counter()
    streams: list[_Stream] = []
    with ThreadPoolExecutor(concurrency) as threads:
        for _ in range(work.rounds):
            prompts = [[rng.randrange(weights.vocab_size) for _ in range(work.prompt_len)] for _ in range(concurrency)]
            tasks = [threads.submit(_stream, server, prompt, work.max_tokens, i) for i, prompt in enumerate(prompts)]
            streams += [task.result() for task in tasks]
    seconds, after = time.perf_counter() - began, server.metrics()
    num_tokens = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    gaps = [gap for stream in streams for gap in stream.gaps]
    decode_seconds = max(statistics.mean(stream.token_times[-1] - stream.token_times[0] for stream in streams), 1e-9)
    return {
        "concurrency": concurrency,
        "tokens": int(num_tokens),
        "seconds": seconds,
        "total_tokens_per_s": num_tokens / seconds,
        "decode_tokens_per_s": concurrency * (work.max_tokens - 1) / decode_seconds,
        "ttft_s": _percentiles([stream.token_times[0] - stream.sent_at for stream in streams]),
        "inter_token_s": _percentiles(gaps),
        "experts_touched": after.get("ktransformers:experts_touched"),
    }


def _stream(server: ServerProcess, prompt: list[int], max_tokens: int, seed: int) -> _Stream:
    """Send one completion and time its tokens. Raises RequestError."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "seed": seed}
    body |= {"temperature": 1.0, "return_token_ids": True}  # token ids: every token has its chunk, with text or without
    stream = _Stream(time.perf_counter())
    for chunk in server.client.events("/v1/completions", body):
        stream.token_times += [time.perf_counter()] * len(chunk["choices"][0]["token_ids"])
    if not stream.token_times:
        raise RequestError("an answer had no tokens")
    return stream


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {f"p{share}": ordered[min(share * len(ordered) // 100, len(ordered) - 1)] for share in (50, 99)}

"""Measures a whole model on the CPU, ours and a peer's in turns, beside what the memory's read bandwidth allows.

Ours is the engine of balance_serve without its scheduler: the operators, kernels and sampler of every other way to run
a model, over a paged cache, greedy sampling included. Prompts and decoded tokens are random ids, so that experts are
spread as the router spreads them. The bound counts the bytes of weights that a step reads, once each:

    tokens/s <= tokens of a step * read bandwidth / (dense bytes + expert layers * touched experts * bytes of an expert)

It is the limit of decoding; that of prefill is arithmetic.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.command import benchmark_parser
from benchmarks.peers.base import PeerProcess, is_missing
from benchmarks.peers.llama_model import llama_model_peer
from benchmarks.peers.work import ModelWork
from ktransformers.bench.common.machine import machine_facts, shown_machine
from ktransformers.bench.common.report import Column, FigureTable, Record, print_record
from ktransformers.bench.servers.weights import Weights, shown_weights, weights_of
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import (
    add_gguf_path,
    add_threads,
    check_between,
    check_threads,
    numbers,
)
from ktransformers.cli.parsing.options import engine_config, set_up_logging, with_default_model
from ktransformers.cli.parsing.parser import user_path
from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.errors import ConfigError
from ktransformers.scheduler.records import NewSequence, ScheduledSequence, StepPlan
from ktransformers.system.cores import usable_cores
from ktransformers.weights.gguf.file import open_gguf

__all__ = ["PAGE_SIZE", "OurSteps", "bench_model", "main", "num_slots"]

PAGE_SIZE = 64
_COLUMNS = (
    Column("phase", 8),
    Column("size", 6, title="tokens"),  # of the prompt, or the sequences that decode a token each
    Column("tokens_s", 9, ".1f", "tokens/s"),
    Column("touched_experts", 8, ".1f", "experts"),
    Column("bound_tokens_s", 10, ".1f", "bound t/s"),
    Column("share", 9, ".0%", "of bound"),
)
_PEERS = {"llama.cpp": ("llama_cpp", "llama-cpp-python", llama_model_peer)}


@dataclass(frozen=True, slots=True)
class Figure:
    """seconds of num_tokens in num_steps. num_samples layer calls were looked at, which touched num_touched experts."""

    num_tokens: int
    num_steps: int
    seconds: float
    num_samples: int
    num_touched: int

    @property
    def touched(self) -> float | None:
        """Distinct experts per layer and step; None when none were counted."""
        return self.num_touched / self.num_samples if self.num_samples else None

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds

    def bound(self, weights: Weights, bandwidth: float) -> float | None:
        """Tokens per second at which reading the weights takes all the time."""
        if weights.expert_layers and self.touched is None:
            return None
        return self.num_tokens * bandwidth / (self.num_steps * weights.per_step(self.touched or 0.0))


def best_of(rounds: Sequence[Figure]) -> Figure:
    """The fastest of rounds of the same work, experts counted over all."""
    samples, touched = sum(one.num_samples for one in rounds), sum(one.num_touched for one in rounds)
    return replace(min(rounds, key=lambda one: one.seconds), num_samples=samples, num_touched=touched)


class OurSteps:
    """Steps of a paged engine. Sequence i owns the i-th share of the pages."""

    def __init__(self, engine: Engine, vocab_size: int):
        self._engine, self._vocab_size = engine, vocab_size
        self._rng = random.Random(0)
        self._step_ids, self._run_ids = itertools.count(), itertools.count(1)
        self._running: list[int] = []
        self._pages_each = 0
        self._counts = (0, 0)  # layer calls looked at, experts touched in them

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]

    def _begin(self, prompts: Sequence[list[int]], length: int) -> tuple[list[NewSequence], list[int]]:
        """New sequences of up to `length` tokens instead of those before, which end."""
        ended, self._running = self._running, [next(self._run_ids) for _ in prompts]
        self._pages_each = -(-length // PAGE_SIZE)
        params = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
        starts = [
            NewSequence(run_id=run, request_id=str(run), params=params, prompt_len=len(prompt), token_ids=prompt)
            for run, prompt in zip(self._running, prompts, strict=True)
        ]
        return starts, ended

    def _row(self, index: int, start: int, token_ids: list[int], is_sampled: bool = True) -> ScheduledSequence:
        first = index * self._pages_each
        return ScheduledSequence(
            run_id=self._running[index],
            start=start,
            token_ids=token_ids,
            token_source=None,
            block_table=range(first, first + self._pages_each),
            is_sampled=is_sampled,
            read_slot=index if start else -1,
            write_slot=index,
        )

    def _step(
        self, rows: list[ScheduledSequence], starts: Sequence[NewSequence] = (), ended: Sequence[int] = ()
    ) -> float:
        """Seconds of one step."""
        plan = StepPlan(step_id=next(self._step_ids), starts=starts, rows=rows, ended=ended)
        began = time.perf_counter()
        result = self._engine.executor.execute(plan)
        took = time.perf_counter() - began
        self._counts = self._counts[0] + result.experts[1], self._counts[1] + result.experts[2]
        return took

    def measure(self, phase: str, size: int, work: ModelWork) -> Figure:
        """One round: a prompt of `size` tokens, or the steps of `size` sequences."""
        return self._prefill(size) if phase == "prefill" else self._decode(size, work)

    def _prefill(self, tokens: int) -> Figure:
        """In the engine's chunks."""
        chunk, prompt = self._engine.config.chunk_size, self._tokens(tokens)
        starts, ended = self._begin([prompt], tokens)
        self._counts, seconds = (0, 0), 0.0
        for at in range(0, tokens, chunk):
            row = self._row(0, at, prompt[at : at + chunk], is_sampled=at + chunk >= tokens)
            seconds += self._step([row], starts if at == 0 else (), ended if at == 0 else ())
        return Figure(tokens, -(-tokens // chunk), seconds, *self._counts)

    def _decode(self, sequences: int, work: ModelWork) -> Figure:
        """All sequences together; neither their prompts nor the warm-ups count."""
        prompts = [self._tokens(work.context) for _ in range(sequences)]
        starts, ended = self._begin(prompts, work.sequence_len)
        self._step([self._row(i, 0, prompt) for i, prompt in enumerate(prompts)], starts, ended)
        seconds = 0.0
        for step in range(work.warm_ups + work.steps):
            if step == work.warm_ups:
                self._counts, seconds = (0, 0), 0.0
            seconds += self._step([self._row(i, work.context + step, self._tokens(1)) for i in range(sequences)])
        return Figure(sequences * work.steps, work.steps, seconds, *self._counts)


def num_slots(work: ModelWork) -> int:
    """Cache slots for the longest prompt and for the largest batch."""
    pages = [-(-tokens // PAGE_SIZE) for tokens in work.prefill]
    pages += [batch * -(-work.sequence_len // PAGE_SIZE) for batch in work.batches]
    return max(pages) * PAGE_SIZE


def _start_peers(names: list[str], path: Path, threads: int, weights: Weights, work: ModelWork) -> list[PeerProcess]:
    chosen = [_PEERS[name][2] for name in dict.fromkeys(names) if not is_missing(name, *_PEERS[name][:2])]
    return [start(path, threads, weights.vocab_size, work) for start in chosen]


def bench_model(config: EngineConfig, work: ModelWork, peers: list[str]) -> Record:
    """Print a table, a line per figure. Returns the record. config names a GGUF.

    peers: of llama.cpp; one that is not installed is said and left out. Errors are those of `build_engine`.
    """
    config = replace(config, cache_lens=num_slots(work), use_cuda=False).resolved()
    assert config.gguf_path is not None
    gguf = open_gguf(config.gguf_path)
    weights, threads = weights_of(gguf), config.cpu_infer or usable_cores()
    with ExitStack() as stack:
        children = _start_peers(peers, gguf.files[0].path, threads, weights, work)
        for child in children:
            stack.callback(child.close)
        engine = build_engine(config, page_size=PAGE_SIZE, max_batch_size=max(work.batches))
        stack.callback(engine.close)
        machine = machine_facts(engine.pool)
        print(f"{shown_machine(machine)}\n{engine.model.description}\n{shown_weights(weights)}")
        columns = [
            (Column(peer.name, 10, ".1f"), Column(f"ours / {peer.name}", 8, ".2f", "ours, x")) for peer in children
        ]
        table = FigureTable([*_COLUMNS, *(one for pair in columns for one in pair)])
        ours = OurSteps(engine, min(weights.vocab_size, engine.model.vocab_size))
        for phase, size in [*(("prefill", n) for n in work.prefill), *(("decode", n) for n in work.batches)]:
            figure, theirs = _rounds(ours, children, phase, size, work)
            bound = figure.bound(weights, machine["read_bandwidth_gb_s"] * 1e9)
            row: Record = {"phase": phase, "size": size, "tokens_s": figure.rate, "touched_experts": figure.touched}
            row |= {"bound_tokens_s": bound, "peer_tokens_s": theirs}
            ratios = {f"ours / {name}": figure.rate / rate if rate else None for name, rate in theirs.items()}
            table.add(row, **theirs, **ratios, share=figure.rate / bound if bound else None)
    facts = {"machine": machine, "model": config.gguf_path.name, "weights": asdict(weights), "work": asdict(work)}
    return facts | {"rows": table.rows}


def _rounds(
    ours: OurSteps, peers: list[PeerProcess], phase: str, size: int, work: ModelWork
) -> tuple[Figure, dict[str, float | None]]:
    """The best round of each, in turns, so that a busy minute hits all."""
    figures: list[Figure] = []
    theirs: dict[str, float | None] = {peer.name: None for peer in peers}
    for _ in range(work.repeats):
        figures.append(ours.measure(phase, size, work))
        for peer in peers:
            rates = (theirs[peer.name], peer.ask(f"{phase} {size}"))
            theirs[peer.name] = max((rate for rate in rates if rate is not None), default=None)
    return best_of(figures), theirs


def _model(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_between(args, steps=1 << 20, context=1 << 20, repeats=1000)
    check_threads(args)
    work = ModelWork(
        prefill=numbers(args.prefill, "prefill"),
        batches=numbers(args.batches, "batches"),
        steps=args.steps,
        context=args.context,
        repeats=args.repeats,
    )
    config = replace(engine_config(args), cpu_infer=args.threads)
    if config.gguf_path is None and config.model_path is not None:
        raise ConfigError("name the GGUF file too: python -m benchmarks.model GGUF --model_path FOLDER")
    config = with_default_model(config)
    return print_record("model", args.json, partial(bench_model, config, work, args.peer))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "A whole model on the CPU: tokens/s of prefill and decode, beside what the read bandwidth allows."
    parser, model = benchmark_parser("model", text, _model)
    add_gguf_path(parser, model)
    model.add_argument("--model_path", type=user_path, help="folder with config.json, for a GGUF that says too little")
    add_threads(model)
    model.add_argument("--prefill", default="128,256,512,2048", help="prompt lengths (%(default)s)")
    model.add_argument("--batches", default="1,4", help="sequences that decode together (%(default)s)")
    model.add_argument("--steps", type=int, default=32, help="decode steps (%(default)s)")
    model.add_argument("--context", type=int, default=64, help="tokens before the first decode step (%(default)s)")
    model.add_argument("--repeats", type=int, default=2, help="rounds per figure, the best counts (%(default)s)")
    model.add_argument("--peer", action="append", choices=list(_PEERS), default=[], help="measure it too")
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

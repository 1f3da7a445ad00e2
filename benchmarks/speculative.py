"""What draft tokens gain, and what they cost where they gain nothing: the same answers with them and without.

A model answers three kinds of prompts, alternately with --speculative ngram and off, so that what else the machine does
meets both: "code" is code that is repeated (a grammar holds the answer to that, since small models cannot), "text" is
drawn at temperature 0.8, and "noise" at one at which hardly anything repeats. Tokens must be equal, `==`. The bound is
what steps allow: an answer of n tokens of which a were accepted takes n - a steps, so that it would be n / (n - a)
times as fast if a step took the same with draft tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from benchmarks.command import benchmark_parser
from ktransformers.bench.common.machine import machine_facts, shown_machine
from ktransformers.bench.common.report import Column, FigureTable, Record, Row, print_record
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import add_threads, check_between, check_threads, numbers
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.core import Constraint, ConstraintKind, SamplingParams
from ktransformers.engine.api.llm import LLM, RequestOutput
from ktransformers.errors import EngineError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.system.cores import usable_cores

__all__ = ["bench_speculative", "main"]

_CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]
"""
_TEXT = "Tell me about the sea and the history of ships."
_PROMPTS: dict[str, tuple[str, SamplingParams]] = {
    "code": (
        f"This code:\n{_CODE}\nThe same code again:\n",
        SamplingParams(temperature=0.0, constraint=Constraint(ConstraintKind.CHOICE, json.dumps([_CODE]))),
    ),
    "text": (_TEXT, SamplingParams(temperature=0.8, ignore_eos=True)),
    "noise": (_TEXT, SamplingParams(temperature=2.0, ignore_eos=True)),
}
_COLUMNS = (
    Column("prompts", 7),
    Column("streams", 7),
    Column("off_ms", 8, ".3f", "off ms"),
    Column("ms", 8, ".3f", "ngram ms"),
    Column("ratio", 8, ".2f", "x faster"),
    Column("bound", 7, ".2f"),
    Column("accepted", 8),
    Column("drafted", 7),
)


_MAX_TOKENS = 200


def _answers(llm: LLM, kind: str, num_streams: int, seed: int) -> tuple[float, list[RequestOutput]]:
    """Seconds of the decode of `num_streams` answers side by side, and these."""
    prompt, asked = _PROMPTS[kind]
    params = [replace(asked, max_tokens=_MAX_TOKENS, seed=seed + i) for i in range(num_streams)]
    outputs = llm.generate([prompt] * num_streams, params)
    return max(output.stats.decode_seconds for output in outputs), outputs


def _compare(plain: LLM, drafting: LLM, kind: str, num_streams: int, repeats: int) -> Row:
    """One line of the table. Raises EngineError when an answer is another one with draft tokens."""
    off, on = list[float](), list[float]()
    num_tokens = num_drafted = num_accepted = 0
    for seed in range(1 + repeats):
        seconds, want = _answers(plain, kind, num_streams, seed)
        other, got = _answers(drafting, kind, num_streams, seed)
        if [one.token_ids for one in want] != [one.token_ids for one in got]:
            raise EngineError(f"{kind}, seed {seed}: an answer is another one with draft tokens")
        if not seed:
            continue  # what was never run before is slower
        longest = max(len(one.token_ids) for one in want)
        off.append(seconds / longest * 1e3)
        on.append(other / longest * 1e3)
        num_tokens += sum(len(one.token_ids) for one in got)
        num_drafted += sum(one.stats.num_drafted for one in got)
        num_accepted += sum(one.stats.num_accepted for one in got)
    return {
        "prompts": kind,
        "streams": num_streams,
        "off_ms": median(off),
        "ms": median(on),
        "ratio": median(before / after for before, after in zip(off, on, strict=True)),
        "bound": num_tokens / (num_tokens - num_accepted),
        "accepted": num_accepted,
        "drafted": num_drafted,
    }


def bench_speculative(model: str | None, streams: Sequence[int], threads: int, repeats: int) -> Record:
    """Print a table, a line per kind of prompts and number of streams. model: as LLM takes it."""
    pool = WorkerPool(threads)
    machine = machine_facts(pool)
    pool.close()
    print(shown_machine(machine))
    table = FigureTable(_COLUMNS)
    for num_streams in streams:
        load = partial(LLM, model, cpu_infer=threads, max_batch_size=num_streams)
        with load(speculative="off") as plain, load(speculative="ngram") as drafting:
            for kind in _PROMPTS:
                table.add(_compare(plain, drafting, kind, num_streams, repeats))
    return {"machine": machine, "model": model or "bundled", "rows": table.rows}


def _speculative(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_between(args, repeats=1000)
    check_threads(args)
    streams = numbers(args.streams, "streams", 256)
    measure = partial(bench_speculative, args.model, streams, args.threads or usable_cores(), args.repeats)
    return print_record("speculative", args.json, measure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "What draft tokens gain: answers with them, alternately with the same without."
    parser, group = benchmark_parser("speculative", text, _speculative)
    group.add_argument("--model", help="a GGUF file or a model's folder; default: the bundled model")
    group.add_argument("--streams", default="1,16", help="answers at once (%(default)s)")
    group.add_argument("--repeats", type=int, default=9, help="pairs of answers per figure (%(default)s)")
    add_threads(group, 1)
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

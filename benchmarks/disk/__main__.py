"""Measures a model that is larger than the memory it may use: ours, and llama.cpp on the mapped file.

Each program runs alone in a control group of its own (see control_group.py), which begins with nothing of the file in
the system's cache. It loads the model, decodes in rounds (the first is cold, the last warm), and reads a prompt.
Both get the same random token ids, so that routers choose the same experts but for rounding. Figures:

    tokens/s    without loading
    read        from the disk, all that the process has had read, in GB; GB/s is that over the time
    hits        of decoding: the share of the experts' bytes which tokens need and that were not read. Pages around what
                is needed count as read, so a program that reads ahead in vain has less
    of disk     GB/s over what threads read of the same file in random pieces of 1 MiB with O_DIRECT, just before
    others      the share of the machine's CPU time that other programs had meanwhile
    queued      the largest share of the time that one of the program's threads was ready to run and had no core, since
                others had them: on an idle machine tokens/s may be higher by as much
    peak        of the group, which counts what it holds of the file in the system's cache
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial

from benchmarks.disk.control_group import ControlGroup
from benchmarks.disk.counters import Use, drop_cache
from benchmarks.disk.loop_device import LoopDevice, read_ahead_of
from benchmarks.disk.model_file import routing_of
from benchmarks.disk.options import OURS, PEER, DiskWork, disk_parser, disk_work
from benchmarks.disk.ours import start_ours
from benchmarks.peers.base import PeerProcess, is_missing
from benchmarks.peers.llama_model import mapped_llama_peer
from ktransformers.bench.common.machine import measured_machine, shown_machine
from ktransformers.bench.common.report import Column, FigureTable, Record, Row, print_record
from ktransformers.bench.servers.weights import Weights, shown_weights, weights_of
from ktransformers.cli import run_command
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.system.disk_speed import measure_disk
from ktransformers.weights.gguf.file import GGUFModel, open_gguf

__all__ = ["bench_disk", "main"]

DISK_SECONDS = 3.0

_COLUMNS = (
    Column("limit_gib", 6, title="GiB"),
    Column("program", 10),
    Column("phase", 8),
    Column("state", 5),
    Column("tokens_s", 9, ".2f", "tokens/s"),
    Column("read_gb", 8, ".2f", "read GB"),
    Column("gb_s", 6, ".2f", "GB/s"),
    Column("of_disk", 8, ".0%", "of disk"),
    Column("hits", 6, ".0%"),
    Column("others", 6, ".0%"),
    Column("queued", 6, ".0%"),
    Column("peak_gb", 8, ".2f", "peak GB"),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A figure to ask for. num_tokens: that are computed for it, those before the clock starts included."""

    phase: str
    size: int
    state: str
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.phase} {self.size}"


def questions(given: DiskWork) -> list[Question]:
    """Return the figures of one program under one limit, in the order in which they are asked for."""
    rounds = ["cold", *["later"] * (given.rounds - 2), "warm"][: given.rounds]
    decodes = [Question("decode", 1, state, given.work.sequence_len) for state in rounds]
    return decodes + [Question("prefill", size, "warm", size) for size in given.work.prefill]


@dataclass(frozen=True, slots=True)
class _Model:
    """The model, and the bytes of experts that a token needs."""

    weights: Weights
    token_bytes: int

    @classmethod
    def of(cls, gguf: GGUFModel) -> _Model:
        weights, top_k = weights_of(gguf), gguf.metadata[f"{gguf.architecture}.expert_used_count"]
        assert isinstance(top_k, int)
        return cls(weights, weights.expert_layers * weights.expert * top_k)

    def hits(self, read: int, num_tokens: int) -> float:
        """The share of the experts' bytes which that many decoded tokens need that was not read, 0 at least."""
        return max(1 - read / (num_tokens * self.token_bytes), 0.0)


class _Group:
    """One program in one control group, and its figures."""

    def __init__(self, given: DiskWork, program: str, limit: int, argv: Sequence[str], model: _Model):
        self._given, self._model = given, model
        self._facts = {"limit_gib": limit >> 30, "program": program}
        drop_cache(given.path)
        with ExitStack() as stack:  # taken down where loading fails or is stopped
            began = time.perf_counter()
            self._group = stack.enter_context(ControlGroup(limit))
            self._child = self._start(program, argv, stack)
            stack.callback(self._child.close)
            self._seconds = time.perf_counter() - began
            self._stack = stack.pop_all()

    def _start(self, program: str, argv: Sequence[str], stack: ExitStack) -> PeerProcess:
        within = self._group.command
        if program == OURS:
            return start_ours(argv, within)
        given, path = self._given, self._given.path
        if given.read_ahead:
            path = stack.enter_context(LoopDevice(path, given.read_ahead)).path
        return mapped_llama_peer(path, given.threads, self._model.weights.vocab_size, given.work, within)

    def figures(self) -> Iterator[Row]:
        """That of loading, in which a program may read what it likes, and the answers to all questions."""
        if not self._child.is_dead:
            yield self._row("load", "cold", self._seconds, self._use())
        for question in questions(self._given):
            if not self._child.is_dead:
                yield self._ask(question)

    def _use(self) -> Use | None:
        return None if self._child.is_dead else Use.of(self._child.pid)

    def _ask(self, question: Question) -> Row:
        """One figure; without tokens/s where the program ends meanwhile."""
        before, began = Use.of(self._child.pid), time.perf_counter()
        rate = self._child.ask(str(question))
        seconds, after = time.perf_counter() - began, self._use()
        used = None if after is None else after.since(before)
        row = self._row(question.phase, question.state, seconds, used)
        if used is not None:
            row |= {"others": used.others(seconds), "queued": used.queued(seconds)}
            if question.phase == "decode":
                row["hits"] = self._model.hits(used.bytes_read, question.num_tokens)
        return row | {"tokens": question.num_tokens, "tokens_s": rate}

    def _row(self, phase: str, state: str, seconds: float, used: Use | None) -> Row:
        row: Row = {**self._facts, "phase": phase, "state": state, "seconds": seconds}
        if used is not None:
            row |= {"read_gb": used.bytes_read / 1e9, "gb_s": used.bytes_read / seconds / 1e9}
        row |= {"peak_gb": self._group.peak() / 1e9, "anonymous_gb": self._group.anonymous() / 1e9}
        return row | {"oom_kills": self._group.oom_kills()}

    def close(self) -> None:
        """End the program, then remove its group."""
        self._stack.close()


def bench_disk(given: DiskWork, argv: Sequence[str]) -> Record:
    """Print a table, a line per figure. Returns the record. argv: the flags that `given` was made of.

    Raises UnsupportedError where no control groups can be made.
    """
    with ControlGroup(given.limits[0]):  # before anything else: that it works
        machine = measured_machine(given.threads)
    gguf = open_gguf(given.path)
    model, routing = _Model.of(gguf), routing_of(gguf)
    ahead = given.read_ahead or read_ahead_of(given.path)
    print(f"{shown_machine(machine)}; llama.cpp's mapped file is read {ahead} KiB ahead")
    print(f"{given.path.name}, routing {routing or 'as trained'}; {shown_weights(model.weights)}")
    programs = [one for one in given.programs if one == OURS or not is_missing(PEER, "llama_cpp", "llama-cpp-python")]
    table = FigureTable(_COLUMNS)
    for limit in given.limits:
        for program in programs:
            speed = measure_disk(given.path, DISK_SECONDS).bytes_per_s / 1e9
            with closing(_Group(given, program, limit, argv, model)) as group:
                for row in group.figures():
                    table.add(row | {"disk_gb_s": speed, "of_disk": row["gb_s"] / speed if "gb_s" in row else None})
    ratios = _ratios(table.rows)
    for ratio in ratios:
        print("{limit_gib} GiB, {phase} {state}: {ratio:.2f} x llama.cpp".format(**ratio))
    facts = {"machine": machine, "model": given.path.name, "routing": routing, "file_bytes": given.path.stat().st_size}
    facts |= {"expert_bytes_per_token": model.token_bytes, "work": asdict(given.work), "read_ahead_kib": ahead}
    killed = [row for row in table.rows if row["oom_kills"] and row["program"] == OURS]
    return facts | {"rows": table.rows, "ratios": ratios, "is_failed": bool(killed)}


def _ratios(rows: Sequence[Row]) -> list[Row]:
    """Ours over the peer's tokens/s, where both have a figure of the same kind."""
    kinds: dict[tuple[int, str, str], dict[str, float]] = {}
    for row in rows:
        if row.get("tokens_s"):
            kinds.setdefault((row["limit_gib"], row["phase"], row["state"]), {})[row["program"]] = row["tokens_s"]
    return [
        {"limit_gib": limit, "phase": phase, "state": state, "ratio": rates[OURS] / rates[PEER]}
        for (limit, phase, state), rates in kinds.items()
        if OURS in rates and PEER in rates
    ]


def _disk(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    return print_record("disk", args.json, partial(bench_disk, disk_work(args), args.argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = disk_parser(_disk)
    parser.set_defaults(argv=given)
    return run_command(parser, given)


if __name__ == "__main__":
    sys.exit(main())

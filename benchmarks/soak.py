"""Keeps a balance_serve server under load for a while and looks at what it leaves behind.

N streams at a time of mixed requests, some of which leave in the middle, and engines killed now and then. Prints
memory and file descriptors of all three processes after a tenth of the time and at the end; pages and requests that are
still held then, and requests that failed, make it fail. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.command import benchmark_parser
from ktransformers.bench.common.report import Column, FigureTable, Record, print_record
from ktransformers.bench.servers.client import Client, RequestError
from ktransformers.bench.servers.process import ServerProcess
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import (
    add_gguf_path,
    check_between,
    check_range,
    gguf_file,
)
from ktransformers.cli.parsing.options import engine_config, set_up_logging, with_default_model
from ktransformers.system.cores import usable_cores
from ktransformers.system.cpu_names import cpu_name

__all__ = ["SoakWork", "bench_soak", "main"]

CHILDREN = ("scheduler", "engine")
_HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_MOMENTS = ("after a tenth", "at the end", "idle")

Usage = dict[str, dict[str, int]]
"""KiB of resident memory (rss_kib) and open file descriptors (fds) by process."""


@dataclass(frozen=True, slots=True)
class SoakWork:
    """`streams` requests at a time for `seconds`; an engine is killed every kill_every seconds, 0: never."""

    gguf_path: Path
    seconds: float
    streams: int
    kill_every: float

    def flags(self) -> list[str]:
        """Of the server."""
        flags = [str(self.gguf_path), "--backend_type", "balance_serve", "--cpu_infer", str(usable_cores())]
        flags += ["--max_batch_size", str(self.streams), "--cache_lens", str(self.streams * 508)]
        return [*flags, "--max_engine_restarts", "1000"] if self.kill_every else flags


def processes(api_pid: int) -> dict[str, int]:
    """Process ids by role. An engine that has just died has no successor yet, or one that is still called a spare."""
    found = {"api": api_pid}
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            role = (entry / "comm").read_text().strip().removeprefix("kt-")
        except (OSError, ValueError):
            continue
        if parent == api_pid and role in CHILDREN:
            found[role] = int(entry.name)
    return found


def usage(api_pid: int) -> Usage:
    """Of each process of a server; {} when one of them is missing or ends."""
    report, pids = {}, processes(api_pid)
    for role in ("api", *CHILDREN):
        try:
            status = Path(f"/proc/{pids[role]}/status").read_text()
            rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
            report[role] = {"rss_kib": rss, "fds": len(os.listdir(f"/proc/{pids[role]}/fd"))}
        except (OSError, KeyError, StopIteration):  # a zombie has no memory
            return {}
    return report


def settled_usage(look: Callable[[], Usage], tries: int = 600) -> Usage:
    """The first complete look: a restart may fall into a sample. Raises TimeoutError when there is none."""
    for _ in range(tries):
        report = look()
        if report:
            return report
        time.sleep(0.1)
    raise TimeoutError("a process of the server is missing, and did not come back in a minute")


def kill_engine(api_pid: int) -> bool:
    """Whether there was one: the last kill may not be repaired yet."""
    pid = processes(api_pid).get("engine")
    try:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return pid is not None


class Load:
    """Threads that ask one thing after another until they are stopped."""

    def __init__(self, client: Client, streams: int) -> None:
        self._client, self._stop, self._lock = client, threading.Event(), threading.Lock()
        self.counts = {"finished": 0, "left": 0, "failed": 0, "tokens": 0}
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._work, args=(i,)) for i in range(streams)]

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wait for the answers that are under way."""
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _work(self, number: int) -> None:
        rng = random.Random(number)
        while not self._stop.is_set():
            self._ask(rng)

    def _ask(self, rng: random.Random) -> None:
        length = rng.choice((1, 10, 64, 200, 600))
        body = {
            "prompt": [rng.randrange(1, 300) for _ in range(length)],
            "max_tokens": rng.randint(1, 80),
            "temperature": rng.choice((0.0, 0.8, 1.5)),
            "ignore_eos": rng.random() < 0.5,
            "stream": True,
            "return_token_ids": True,
        }
        leaves_after = rng.randint(0, 20) if rng.random() < 0.2 else None
        outcome, tokens = "finished", 0
        try:
            with closing(self._client.events("/v1/completions", body)) as events:
                for _ in events:
                    tokens += 1
                    if leaves_after is not None and tokens > leaves_after:
                        outcome = "left"
                        break
        except RequestError as error:
            outcome = "failed"
            with self._lock:
                self.errors.append(str(error))
        with self._lock:
            self.counts[outcome] += 1
            self.counts["tokens"] += tokens


def bench_soak(work: SoakWork) -> Record:
    """Print a table, a line per process. The record's is_failed says whether something is held or failed."""
    with closing(ServerProcess(work.flags())) as server:
        load = Load(server.client, work.streams)
        with closing(load):
            load.start()
            early = _wait(server.pid, work)
            late = settled_usage(lambda: usage(server.pid))
        figures, idle = _settle(server), settled_usage(lambda: usage(server.pid))
    held = {name: figures[name] for name in _HELD}
    looks = (early, late, idle)
    table = FigureTable([Column("process", 10), *(Column(moment, 20) for moment in _MOMENTS)])
    for role in idle:
        cells = (f"{look[role]['rss_kib'] / 1024:.1f} MiB {look[role]['fds']:>4} fds" for look in looks)
        table.add({"process": role} | dict(zip(_MOMENTS, cells, strict=True)))
    restarts = figures["ktransformers:engine_restarts_total"]
    print(f"{load.counts}; still held: {held}; restarts {restarts:.0f}")
    for error in load.errors[:5]:
        print(f"failed: {error}")
    return {
        "machine": {"cpu": cpu_name(), "cores": usable_cores()},
        "seconds": work.seconds,
        "streams": work.streams,
        **load.counts,
        "held": held,
        "early": early,
        "late": late,
        "idle": idle,
        "preemptions": figures["vllm:num_preemptions_total"],
        "restarts": restarts,
        "is_failed": bool(any(held.values()) or load.counts["failed"]),
    }


def _wait(api_pid: int, work: SoakWork) -> Usage:
    """Let the time pass, with kills. Returns what the processes held after a tenth of it."""
    began, early = time.monotonic(), Usage()
    next_kill = began + work.kill_every
    while time.monotonic() - began < work.seconds:
        time.sleep(min(0.5, work.seconds / 10))
        if not early and time.monotonic() - began > work.seconds / 10:
            early = settled_usage(lambda: usage(api_pid))
        if work.kill_every and time.monotonic() > next_kill and kill_engine(api_pid):
            next_kill += work.kill_every
    return early or settled_usage(lambda: usage(api_pid))


def _settle(server: ServerProcess) -> dict[str, float]:
    """The figures once nothing runs any more, or after a minute."""
    end = time.monotonic() + 60
    figures = server.metrics()
    while figures["vllm:num_requests_running"] and time.monotonic() < end:
        time.sleep(0.1)
        figures = server.metrics()
    return figures


def _soak(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_between(args, streams=4096)
    check_range("seconds", args.seconds, 0, 1 << 24)
    check_range("kill_every", args.kill_every, 0, 1 << 24)
    path = gguf_file(with_default_model(engine_config(args)))
    work = SoakWork(path, args.seconds, args.streams, args.kill_every)
    return print_record("soak", args.json, partial(bench_soak, work))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "Starts a server, keeps it busy with mixed requests, some of which leave, and says what memory, descriptors "
    text += "and requests are left. Exit code 1: something is still held, or a request failed."
    parser, group = benchmark_parser("soak", text, _soak)
    add_gguf_path(parser, group)
    group.add_argument("--seconds", type=float, default=600.0, help="how long (%(default)s)")
    group.add_argument("--streams", type=int, default=32, help="requests at a time (%(default)s)")
    text = "seconds between two kills of the engine; 0: never (%(default)s)"
    group.add_argument("--kill_every", type=float, default=0.0, help=text)
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

"""Keeps a balance_serve server under load for a while and looks at what it leaves behind.

N streams at a time of mixed requests, some of which leave in the middle, and engines killed now and then. Prints
memory and file descriptors of all three processes after a tenth of the time and at the end; pages and requests that are
still held then make it fail. The last line is JSON.

    python benchmarks/soak.py --seconds 600 --streams 32
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serving import Server

from ktransformers.config import DEMO_MODEL_PATH, physical_cores

CHILDREN = ("scheduler", "engine")


def processes(server: Server) -> dict[str, int]:
    """Process ids by role. An engine that has just died has no successor yet, or one that is still called a spare."""
    found = {"api": server.process.pid}
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            role = (entry / "comm").read_text().strip().removeprefix("kt-")
        except (OSError, ValueError):
            continue
        if parent == server.process.pid and role in CHILDREN:
            found[role] = int(entry.name)
    return found


def usage(server: Server) -> dict[str, dict[str, int]]:
    """Resident memory in KiB and open file descriptors of each process; {} when one of them is missing or ends."""
    report, pids = {}, processes(server)
    for role in ("api", *CHILDREN):
        try:
            status = Path(f"/proc/{pids[role]}/status").read_text()
            rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
            report[role] = {"rss_kib": rss, "fds": len(os.listdir(f"/proc/{pids[role]}/fd"))}
        except (OSError, KeyError, StopIteration):  # a zombie has no memory
            return {}
    return report


def settled_usage(look: Callable[[], dict[str, dict[str, int]]], tries: int = 600) -> dict[str, dict[str, int]]:
    """The first complete look: a restart may fall into a sample. Raises TimeoutError when there is none."""
    for _ in range(tries):
        report = look()
        if report:
            return report
        time.sleep(0.1)
    raise TimeoutError("a process of the server is missing, and did not come back in a minute")


def kill_engine(server: Server) -> bool:
    """Whether there was one: the last kill may not be repaired yet."""
    pid = processes(server).get("engine")
    try:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return pid is not None


class Load:
    """Threads that ask one thing after another until `stop`."""

    def __init__(self, port: int):
        self._port, self.stop = port, threading.Event()
        self._lock = threading.Lock()
        self.counts = {"finished": 0, "left": 0, "failed": 0, "tokens": 0}
        self.errors: list[str] = []

    def worker(self, number: int) -> None:
        rng = random.Random(number)
        while not self.stop.is_set():
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
        outcome, tokens, error = "failed", 0, ""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            error = f"status {response.status}"
            for line in response:
                if line.startswith(b"data: {"):
                    error = line.decode() if b'"error"' in line else ""
                    tokens += 1
                if line.startswith(b"data: [DONE]") and not error:
                    outcome = "finished"
                if leaves_after is not None and tokens > leaves_after:
                    outcome = "left"
                    break
        except (OSError, http.client.HTTPException) as problem:
            error = repr(problem)
        finally:
            connection.close()
        with self._lock:
            self.counts[outcome] += 1
            self.counts["tokens"] += tokens
            if outcome == "failed":
                self.errors.append(error)


def settle(server: Server) -> dict[str, float]:
    """The figures once nothing runs any more."""
    end = time.monotonic() + 60
    figures = server.metrics()
    while figures["vllm:num_requests_running"] and time.monotonic() < end:
        time.sleep(0.1)
        figures = server.metrics()
    return figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gguf_path", type=Path, default=next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))), None))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument(
        "--kill_every", type=float, default=0.0, help="seconds between two kills of the engine; 0: never"
    )
    args = parser.parse_args(argv)
    server = Server(
        argparse.Namespace(
            gguf_path=args.gguf_path, backend_type="balance_serve", cpu_infer=physical_cores(),
            concurrency=[args.streams], prompt_len=300, max_tokens=80,
            flags=["--max_engine_restarts", "1000"] if args.kill_every else [],
        )
    )  # fmt: skip
    load = Load(server.port)
    threads = [threading.Thread(target=load.worker, args=(i,)) for i in range(args.streams)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    early: dict[str, Any] = {}
    next_kill = began + args.kill_every
    while time.monotonic() - began < args.seconds:
        time.sleep(0.5)
        if not early and time.monotonic() - began > args.seconds / 10:
            early = settled_usage(lambda: usage(server))
        if args.kill_every and time.monotonic() > next_kill and kill_engine(server):
            next_kill += args.kill_every
    late = settled_usage(lambda: usage(server))
    load.stop.set()
    for thread in threads:
        thread.join()
    figures, idle = settle(server), settled_usage(lambda: usage(server))
    server.close()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    held = {name: figures[name] for name in names}
    print(f"{'':>10} {'after a tenth':>20} {'at the end':>20} {'idle':>20}")
    for role in idle:
        cells = [f"{r[role]['rss_kib'] / 1024:.1f} MiB {r[role]['fds']:>4} fds" for r in (early, late, idle)]
        print(f"{role:>10} " + " ".join(f"{cell:>20}" for cell in cells))
    print(f"{load.counts}; still held: {held}; restarts {figures['ktransformers:engine_restarts_total']:.0f}")
    for error in load.errors[:5]:
        print(f"failed: {error}")
    run = {"seconds": args.seconds, "streams": args.streams, **load.counts, "held": held}
    result = run | {"early": early, "late": late, "idle": idle, "preemptions": figures["vllm:num_preemptions_total"]}
    print(json.dumps(result))
    return 1 if any(held.values()) or load.counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

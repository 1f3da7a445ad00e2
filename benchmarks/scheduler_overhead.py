"""What the scheduler costs per step; the last line is JSON. No model, no processes: only the Python of planning.

    python benchmarks/scheduler_overhead.py [--sequences N] [--steps N]

Each case is timed over steps with N sequences decoding: schedule() and commit() alone, then with the plan encoded as
msgpack, as the engine process gets it. "mixed" keeps prefill chunks coming: every eighth step one sequence is aborted
and a new prompt takes its place. The first tokens of prompts are shared, so that the prefix tree has work too.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import msgspec

from ktransformers.core import SamplingParams
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.records import Request, RowResult
from ktransformers.scheduler.scheduler import Scheduler

LONGEST = 3000
VOCAB_SIZE = 32_000


class Load:
    """N sequences with prompts of 1 to LONGEST tokens, and answers that never end."""

    def __init__(self, num_sequences: int, page_size: int):
        self.rng = random.Random(0)
        self.prefix = [self.rng.randrange(VOCAB_SIZE) for _ in range(LONGEST)]
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_pages=num_sequences * 2 * LONGEST // page_size,
                page_size=page_size,
                chunk_size=512,
                max_batch_size=num_sequences,
                vocab_size=VOCAB_SIZE,
            )
        )
        self.names: list[str] = []
        for _ in range(num_sequences):
            self.add()

    def add(self) -> None:
        length = self.rng.randrange(1, LONGEST + 1)
        shared = self.rng.randrange(length)
        prompt = self.prefix[:shared] + [self.rng.randrange(VOCAB_SIZE) for _ in range(length - shared)]
        self.names.append(f"r{time.perf_counter_ns()}")
        self.scheduler.add(Request(request_id=self.names[-1], prompt_ids=prompt, params=SamplingParams()))

    def step(self, encoder: msgspec.msgpack.Encoder) -> tuple[float, float, bool]:
        """(seconds to schedule and commit, seconds to encode, whether every row was a decode) of one step."""
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        planned = time.perf_counter()
        if plan is None:
            raise RuntimeError("nothing to run: the load is over")
        encoder.encode(plan)
        results = [RowResult(self.rng.randrange(VOCAB_SIZE)) for row in plan.rows if row.is_sampled]
        encoded = time.perf_counter()
        self.scheduler.commit(plan.step_id, results)
        done = time.perf_counter()
        return planned - began + done - encoded, encoded - planned, all(row.num_tokens == 1 for row in plan.rows)


def measure(num_sequences: int, page_size: int, num_steps: int, is_mixed: bool) -> dict[str, object]:
    load, encoder = Load(num_sequences, page_size), msgspec.msgpack.Encoder()
    while not load.step(encoder)[2] or load.scheduler.stats().num_waiting:
        pass  # until everyone decodes
    own, wire = [], []
    for i in range(num_steps):
        if is_mixed and i % 8 == 0:
            load.scheduler.abort(load.names.pop(0))
            load.add()
        seconds, encode_seconds, _ = load.step(encoder)
        own.append(seconds * 1e6)
        wire.append(encode_seconds * 1e6)
    case: dict[str, object] = {
        "sequences": num_sequences,
        "page_size": page_size,
        "load": "mixed" if is_mixed else "decode",
        "us_median": round(statistics.median(own), 1),
        "us_p99": round(statistics.quantiles(own, n=100)[98], 1),
        "encode_us_median": round(statistics.median(wire), 1),
    }
    print("  ".join(f"{name} {value}" for name, value in case.items()))
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    cases = [
        measure(args.sequences, page_size, args.steps, is_mixed)
        for page_size in (16, 256)
        for is_mixed in (False, True)
    ]
    print(json.dumps({"benchmark": "scheduler_overhead", "steps": args.steps, "cases": cases}))


if __name__ == "__main__":
    main()

"""Joining records to lines, with times that are made up and sums that can be done by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ktransformers.profiling.join import HOLD_SECONDS, Joiner
from ktransformers.profiling.messages import NativeRecords, RequestRecord, StepRecord, TokensRecord
from ktransformers.profiling.oplog import OpLog, critical_ns
from ktransformers.profiling.records import OP
from tests.support.engines.fake_runtime import experts, op, step_begin, step_end

BEGAN = 1_000_000_000


class Lines:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.joiner = Joiner(lambda name, line: self.lines.append((name, line)), BEGAN, num_layers=3)

    def of(self, name: str) -> list[dict[str, Any]]:
        return [line for kind, line in self.lines if kind == name]


def step(step_id: int, began: int, ended: int, *, epoch: int = 0, **fields: Any) -> StepRecord:
    known = {"num_rows": 4, "prefill_rows": 3, "num_seqs": 2, "sampled": [("a", 2), ("b", 3)]}
    times = {"began_ns": BEGAN + began, "ended_ns": BEGAN + ended}
    return StepRecord(**{"epoch": epoch, "step_id": step_id, **times, **known, **fields})


def tokens(step_id: int, *made: tuple[str, int, int, int], at: int = 0, **fields: Any) -> TokensRecord:
    return TokensRecord(step_id=step_id, time_ns=BEGAN + at, tokens=made, **fields)


def test_a_step_and_its_tokens() -> None:
    data = (
        step_begin(BEGAN, 1)
        + op("norm", BEGAN + 1_000, 10_000, 0, num_threads=2, busy_ns=15_000, wait_ns=500)
        + op("experts", BEGAN + 20_000, 100_000, 2, num_threads=2, busy_ns=150_000, bytes=1 << 20)
        + experts(2, {2: [5, 1], 3: [1, -1]}, 8, counts=[0, 4, 0, 0, 0, 3, 0, 0])
        + op("sampling", BEGAN + 200_000, 20_000)
        + step_end(BEGAN + 290_000, 1)
        + op("norm", BEGAN + 400_000, 1_000)  # of the next step
    )
    made = Lines()
    made.joiner.take(NativeRecords(0, data), 0.0)
    made.joiner.take(step(1, 0, 300_000, sampling_ns=30_000), 0.0)
    made.joiner.settle(0.0)
    assert made.lines == []  # which tokens count is not known
    arrived = {"a": BEGAN - 200_000}
    made.joiner.take(tokens(1, ("a", 0, 7, 11), ("b", 4, 9, 12), arrived_ns=arrived, waiting=5), 0.0)
    made.joiner.settle(0.0)
    (line,) = made.of("steps")
    assert line == {
        "v": 1, "step": 1, "epoch": 0, "t": 0.0, "ms": 0.3, "rows": 4, "prefill_rows": 3, "sampled": 2, "seqs": 2,
        "waiting": 5,
        "parts_us": {"norm": 10.0, "experts": 100.0, "sampling": 30.0, "host": 160.0},
        "layers_us": {"norm": [10.0, 0.0, 0.0], "experts": [0.0, 0.0, 100.0]},
        "cpu": {"busy_us": 165.0, "idle_us": 435.0, "wait_us": 0.5, "num_threads": 2},
        "bytes": {"experts": 1 << 20}, "gpu_us": None, "experts": [[2, {"1": 4, "5": 3}]],
    }  # fmt: skip
    first, second = made.of("tokens")
    assert first == {
        "v": 1, "request": "a", "index": 0, "position": 7, "token": 11, "step": 1, "t": 0.0003, "ms": 0.5,
        "step_ms": 0.3, "batch": 4, "layers_us": [10.0, 0.0, 100.0], "experts": [None, None, [5, 1]],
    }  # fmt: skip
    assert (second["request"], second["ms"], second["experts"]) == ("b", None, [None, None, [1]])
    made.joiner.take(tokens(2, ("a", 1, 8, 13)), 0.0)
    made.joiner.take(step(2, 400_000, 700_000, sampled=[("a", 0)]), 0.0)
    made.joiner.finish()
    assert made.of("tokens")[2]["ms"] == 0.4
    assert made.of("tokens")[2]["experts_why"] == "no routed experts were recorded in the step"
    assert made.of("steps")[1]["parts_us"] == {"norm": 1.0, "host": 299.0}


def test_time_of_the_tower_is_not_the_hosts() -> None:
    made = Lines()
    made.joiner.take(NativeRecords(0, step_begin(BEGAN, 1) + step_end(BEGAN + 290_000, 1)), 0.0)
    made.joiner.take(step(1, 0, 300_000, sampling_ns=30_000, tower_ns=120_000), 0.0)
    made.joiner.finish()
    (line,) = made.of("steps")
    assert line["parts_us"] == {"sampling": 30.0, "tower": 120.0, "host": 150.0}


def test_tokens_whose_step_died_with_its_engine_have_their_line_all_the_same() -> None:
    made = Lines()
    made.joiner.take(tokens(1, ("a", 0, 5, 9), at=1000), 10.0)
    made.joiner.take(tokens(2, ("a", 1, 6, 8), at=3000), 10.0)
    made.joiner.take(step(2, 1000, 2000, epoch=1, sampled=[("a", 0)]), 10.0)
    made.joiner.take(RequestRecord(request="a", prompt_len=5, cached_len=0, completion_len=2, num_starts=2), 10.0)
    made.joiner.settle(10.0 + HOLD_SECONDS / 2)
    assert made.lines == []
    made.joiner.settle(10.0 + HOLD_SECONDS)
    assert [name for name, _ in made.lines] == ["tokens", "steps", "tokens", "requests"]
    lost, found = made.of("tokens")
    assert (lost["index"], lost["step_ms"], lost["layers_us"], lost["t"]) == (0, None, None, 1e-6)
    assert "lost" in lost["experts_why"]
    assert (found["index"], found["step_ms"]) == (1, 0.001)
    assert made.of("requests")[0]["preemptions"] == 1


def test_half_steps_do_not_pile_up() -> None:
    made = Lines()
    made.joiner.max_open = 10
    for number in range(100):
        made.joiner.take(tokens(number, ("a", number, number, 1)), 0.0)
        made.joiner.settle(0.0)
    assert (len(made.of("tokens")), made.joiner.num_hurried) == (90, 90)
    made.joiner.take(step(3, 0, 1000), 0.0)  # it comes at last
    made.joiner.finish()
    assert [line["index"] for line in made.of("tokens")] == list(range(100))
    assert [line["step"] for line in made.of("steps")] == [3]


def test_parts_that_took_longer_than_their_step_are_a_fault_that_shows() -> None:
    made = Lines()
    made.joiner.take(NativeRecords(0, op("mlp", BEGAN, 2_000) + op("mlp", BEGAN, 2_000)), 0.0)
    made.joiner.take(step(1, 0, 3_000), 0.0)
    made.joiner.take(tokens(1), 0.0)
    made.joiner.settle(0.0)
    assert made.joiner.num_overlaps == 1
    assert made.of("steps")[0]["parts_us"] == {"mlp": 4.0, "host": 0.0}


def test_what_a_gpu_hides_is_not_counted_twice() -> None:
    """The GPU works in [0, 100) and [200, 300): the CPU's [50, 250) costs the step what lies between."""
    data = (
        op("attention", BEGAN, 100, 0, device=1)
        + op("wait_cpu", BEGAN + 200, 100, 0, device=1)
        + op("experts", BEGAN + 50, 200, 0)
        + op("sampling", BEGAN + 320, 30)
    )
    ops = np.frombuffer(data, OP)
    assert critical_ns(ops).tolist() == [100, 100, 100, 30]
    made = Lines()
    made.joiner.take(NativeRecords(0, data), 0.0)
    made.joiner.take(step(1, 0, 400), 0.0)
    made.joiner.take(tokens(1), 0.0)
    made.joiner.settle(0.0)
    (line,) = made.of("steps")
    assert line["parts_us"] == {"attention": 0.1, "experts": 0.1, "sampling": 0.0, "wait_cpu": 0.1, "host": 0.1}
    assert line["gpu_us"] == {"attention": 0.1, "wait_cpu": 0.1}
    assert line["layers_us"]["experts"] == [0.2, 0.0, 0.0]


def test_critical_time_is_that_of_counting_nanoseconds() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        num = int(rng.integers(1, 12))
        ops = np.zeros(num, OP)
        ops["begin_ns"], ops["duration_ns"] = rng.integers(0, 60, num), rng.integers(0, 20, num)
        ops["device"] = rng.integers(0, 2, num)
        covered = np.zeros(100, bool)
        for one in ops[ops["device"] > 0]:
            covered[int(one["begin_ns"]) : int(one["begin_ns"] + one["duration_ns"])] = True
        for one, critical in zip(ops, critical_ns(ops), strict=True):
            inside = covered[int(one["begin_ns"]) : int(one["begin_ns"] + one["duration_ns"])]
            assert critical == (len(inside) if one["device"] else int((~inside).sum()))


@pytest.mark.parametrize("cut", [1, 7, 8, 20, 63])
def test_records_that_cannot_be_are_counted(cut: int) -> None:
    log = OpLog()
    good = op("norm", 10, 5)
    log.feed(good + good[:cut])
    assert (log.num_lost, len(log.take(1, 0, 100).ops)) == (1, 1)
    wild = bytearray(experts(0, {0: [1]}, 4))
    wild[16:20] = (1 << 30).to_bytes(4, "little")  # num_experts
    log.feed(bytes(wild))
    log.feed(np.array([9 << 32 | 8], "<u8").tobytes() + good)  # of a kind that nobody knows
    assert (log.num_lost, len(log.take(2, 0, 100).ops)) == (3, 1)


def test_ops_of_no_step_and_too_many_of_them_are_counted() -> None:
    log = OpLog(max_ops=5)
    log.feed(b"".join(op("norm", time, 1) for time in range(8)))
    assert log.num_lost == 3
    assert len(log.take(1, 2, 4).ops) == 2
    assert log.num_outside == 2
    assert len(log.take(2, 4, 9).ops) == 1


def test_several_tokens_of_one_request_in_one_step() -> None:
    """Of a row with draft tokens: each token has the experts of the row behind which it was sampled."""
    data = (
        step_begin(BEGAN, 1)
        + experts(0, {0: [7], 1: [1], 2: [2], 3: [3]}, 8, counts=[0, 1, 1, 1, 0, 0, 0, 1])
        + op("experts", BEGAN + 20_000, 100_000, 0)
        + step_end(BEGAN + 290_000, 1)
    )
    made = Lines()
    made.joiner.num_layers = 1
    made.joiner.take(NativeRecords(0, data), 0.0)
    # b's token, then the three of a that were accepted of the four rows that it had: rows 1, 2, 3.
    sampled = [("b", 0), ("a", 1), ("a", 2), ("a", 3)]
    made.joiner.take(step(1, 0, 300_000, num_rows=5, prefill_rows=0, sampled=sampled), 0.0)
    came = [("b", 4, 9, 12), ("a", 5, 20, 31), ("a", 6, 21, 32), ("a", 7, 22, 33)]
    made.joiner.take(tokens(1, *came, arrived_ns={"a": BEGAN - 100_000}), 0.0)
    record = RequestRecord(
        request="a", prompt_len=15, cached_len=0, completion_len=8, num_starts=1, num_drafted=3, num_accepted=2
    )
    made.joiner.take(record, 0.0)
    made.joiner.settle(0.0)
    (line,) = made.of("steps")
    assert (line["rows"], line["sampled"], line["seqs"]) == (5, 4, 2)
    shown = [(one["request"], one["index"], one["position"], one["experts"]) for one in made.of("tokens")]
    assert shown == [
        ("b", 4, 9, [[7]]),
        ("a", 5, 20, [[1]]),
        ("a", 6, 21, [[2]]),
        ("a", 7, 22, [[3]]),
    ]
    # Time passes before the first of them alone; each says what the step took, which is not the sum.
    assert [one["ms"] for one in made.of("tokens")] == [None, 0.4, 0.0, 0.0]
    assert [one["step_ms"] for one in made.of("tokens")] == [0.3] * 4
    (request,) = made.of("requests")
    assert (request["num_drafted"], request["num_accepted"], request["preemptions"]) == (3, 2, 0)

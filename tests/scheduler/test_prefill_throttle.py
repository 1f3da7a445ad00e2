"""Steps by time: what is learnt of made-up machines, and the scheduler beside a clock that such a machine drives."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

import pytest

from ktransformers.errors import ConfigError
from ktransformers.scheduler.prefill_throttle import (
    REFRESH,
    WINDOW,
    WORTH,
    PendingPrefill,
    PrefillThrottle,
    cheapest_rows,
)
from ktransformers.scheduler.records import RowResult, StepPlan, StepResult
from ktransformers.scheduler.scheduler import Scheduler
from ktransformers.scheduler.step_times import StepTimes
from tests.support.servers.fake_engine import make_config, make_request

Machine = Callable[[int, int], float]  # decodes, rows of prompts -> seconds


def graphs(decodes: int, rows: int) -> float:
    """Weights read once, then padded rows: as steps of a GPU are replayed."""
    if not rows:
        return 0.004
    return 0.004 + 2e-5 * 2 ** math.ceil(math.log2(decodes + rows))


def cpu(decodes: int, rows: int) -> float:
    """Experts in RAM: a row of a few costs nearly as much as the first, until all experts are read."""
    return 0.02 * (1 - 0.94 ** (decodes + rows)) / 0.06 + 1e-4 * (decodes + rows)


def even(decodes: int, rows: int) -> float:
    """Weights read once, and so much for a row: as large steps of a GPU."""
    return 0.004 + 1e-5 * (decodes + rows)


def cores(decodes: int, rows: int) -> float:
    """A small model on a CPU."""
    return 0.0014 + 8e-5 * (decodes + rows)


def learnt(machine: Machine, noise: Callable[[], float] = lambda: 1.0) -> StepTimes:
    times = StepTimes()
    for _ in range(9):
        for decodes in (1, 4):
            times.add(decodes, 0, machine(decodes, 0) * noise())
    for _ in range(9):
        for rows in (16, 63, 127, 255, 511):
            times.add(1, rows, machine(1, rows) * noise())
    return times


@pytest.mark.parametrize("machine", [graphs, cpu])
def test_what_was_timed_is_known_and_never_falls(machine: Machine) -> None:
    rng = random.Random(1)
    exact, noisy = learnt(machine), learnt(machine, lambda: rng.lognormvariate(0, 0.3))
    for rows in (16, 63, 127, 255, 511):
        assert exact.more(rows) == pytest.approx(machine(1, rows) - machine(1, 0))
    assert exact.alone(1) == machine(1, 0)
    assert exact.alone(99) == exact.alone(4) == machine(4, 0)
    for times in (exact, noisy):
        said = [times.more(rows) for rows in range(1, 1000)]
        assert None not in said
        assert said == sorted(said)  # type: ignore[type-var]
        assert [times.alone(decodes) for decodes in range(1, 9)] == sorted(times.alone(i) or 0 for i in range(1, 9))


def test_outside_of_known_sizes_the_line_from_nothing_counts() -> None:
    times = learnt(cpu)
    for rows in range(1, 16):
        said = times.more(rows)
        assert said is not None
        assert said <= cpu(1, rows) - cpu(1, 0)
    for rows in range(512, 1022):
        said = times.more(rows)
        assert said is not None
        assert said >= cpu(1, rows) - cpu(1, 0)
    assert times.more(1025) is None


def test_one_slow_step_among_others_changes_nothing() -> None:
    times, before = learnt(cpu), learnt(cpu)
    times.add(1, 127, 60.0)
    times.add(1, 0, 60.0)
    for rows in range(1, 900, 7):
        assert times.more(rows) == before.more(rows)
    assert times.alone(1) == before.alone(1)


def test_a_size_that_was_slow_once_is_forgotten_soon_and_one_that_always_was_later() -> None:
    times = StepTimes()
    times.add(1, 0, 0.01)
    times.add(1, 127, 5.01)
    for _ in range(127):
        times.add(1, 63, 0.015)
        assert times.more(127) == pytest.approx(5.0)
    times.add(1, 63, 0.015)
    assert times.more(127) == pytest.approx(0.005 * 127 / 63)  # as if it had never been tried
    for _ in range(9):
        times.add(1, 127, 5.01)
    for _ in range(500):
        times.add(1, 63, 0.015)
    assert times.more(127) == pytest.approx(5.0)
    for _ in range(20):
        times.add(1, 63, 0.015)
    assert times.more(127) == pytest.approx(0.005 * 127 / 63)


def test_mixed_steps_before_any_of_decodes_alone_say_nothing() -> None:
    times = StepTimes()
    times.add(1, 63, 1.0)
    assert (times.more(63), times.alone(1), cheapest_rows(times, 1, 511, 9.0)) == (None, None, None)


def test_prompts_alone_tell_of_sizes_that_nobody_had_beside_decodes() -> None:
    times = StepTimes()
    times.add(0, 4096, 0.375)
    assert (times.more(4096), times.largest) == (0.375, 4096)
    times.add(1, 0, 0.016)
    times.add(1, 512, 0.216)
    assert times.more(4096) == pytest.approx(0.375 - 0.016)
    times.add(1, 4096, 0.4)
    assert times.more(4096) == pytest.approx(0.384)


def test_the_cheapest_rows_are_the_fewest_within_their_worth() -> None:
    times = learnt(cpu)
    rates = {rows: rows / (times.more(rows) or 1) for rows in (15, 31, 63, 127, 255, 383, 511)}
    found = cheapest_rows(times, 1, 511, 9.0)
    assert found in rates
    assert rates[found] * WORTH >= max(rates.values()) == rates[511]
    assert all(rate * WORTH < rates[511] for rows, rate in rates.items() if rows < found)
    short = cheapest_rows(times, 1, 511, (times.more(100) or 0))
    assert short == 95  # as many as the time allows; of the choices
    assert cheapest_rows(times, 1, 511, 1e-9) == 7
    assert [cheapest_rows(times, 1, most, 9.0) for most in (1, 5, 12)] == [1, 5, 7]


def test_twice_the_largest_is_tried_while_rows_become_cheaper() -> None:
    times = StepTimes()
    times.add(1, 0, 0.01)
    times.add(1, 63, 0.11)
    assert cheapest_rows(times, 1, 4000, 9.0) == 95  # of the choices, the last within twice as many
    times.add(1, 126, 0.12)
    assert cheapest_rows(times, 1, 4000, 9.0) == 191
    assert cheapest_rows(times, 1, 4000, 0.12) == 127  # more of them might take too long
    times.add(1, 252, 0.41)  # 63 were as cheap
    assert cheapest_rows(times, 1, 4000, 9.0) == 127


def test_a_pacer_times_decodes_alone_now_and_then() -> None:
    prefill_throttle, some = PrefillThrottle(2.0), PendingPrefill(99)
    assert prefill_throttle.rows(1, 99, some) == 0  # nothing is known
    assert [prefill_throttle.rows(1, 99, some) for _ in range(5)] == [63, 63, 63, 63, 0]  # nor did anything come
    prefill_throttle.took(1, 0, 0.01)
    prefill_throttle.took(1, 99, 0.011)
    said = [prefill_throttle.rows(1, 99, some) for _ in range(2 * REFRESH + 2)]
    assert [i for i, rows in enumerate(said) if not rows] == [REFRESH, 2 * REFRESH + 1]
    assert prefill_throttle.rows(1, 99, None) == 99
    assert all(prefill_throttle.rows(1, 99, some) for _ in range(REFRESH))


KNOWN = (1, 0, 0.016), (1, 7, 0.05), (1, 64, 0.13), (1, 4095, 0.4)
"""Steps of a GPU with experts in RAM: decodes, rows of prompts, seconds."""


def test_a_short_prompt_goes_where_a_chunk_does_not_fit() -> None:
    prefill_throttle = PrefillThrottle(2.0, 0.5)
    for step in KNOWN:
        prefill_throttle.took(*step)
    prefill_throttle.rows(1, 4095, None)
    chunk = prefill_throttle.rows(1, 4095, PendingPrefill(99999, 4096))
    assert chunk > 2000
    prefill_throttle.took(1, chunk, 0.33)  # of one second, beside what was spent before
    assert prefill_throttle.rows(1, 4095, PendingPrefill(99999, 4096)) == 0
    assert prefill_throttle.rows(1, 4095, PendingPrefill(99999, 9)) == 9
    for _ in range(126):  # two seconds of decodes
        prefill_throttle.took(1, 0, 0.016)
    assert prefill_throttle.rows(1, 4095, PendingPrefill(99999, 9)) == chunk


def test_what_is_in_flight_counts() -> None:
    prefill_throttle = PrefillThrottle(2.0, 0.5)
    for step in (*KNOWN, *((1, 0, 0.016),) * 130):
        prefill_throttle.took(*step)
    prefill_throttle.rows(1, 4095, None)
    chunks = []
    for _ in range(5):
        chunks.append(prefill_throttle.rows(1, 4095, PendingPrefill(99999)))
        prefill_throttle.planned(1, chunks[-1])
    assert chunks[0] > 2000
    assert chunks == [chunks[0]] * 3 + [0] * 2
    prefill_throttle.lost()
    assert prefill_throttle.rows(1, 4095, PendingPrefill(99999)) == chunks[0]


class Clocked:
    """A scheduler with two steps in flight and a machine for them. steps: (decodes, rows of prompts, seconds)."""

    def __init__(self, machine: Machine, ratio: float = 2.0, chunk_size: int = 4096, max_gap_ms: float = 0.0):
        config = make_config(
            num_pages=600,
            page_size=256,
            max_batch_size=16,
            chunk_size=chunk_size,
            max_itl_ratio=ratio,
            max_gap_ms=max_gap_ms,
        )
        self.scheduler, self.machine = Scheduler(config), machine
        self.flight: deque[StepPlan] = deque()
        self.steps: list[tuple[int, int, float]] = []

    def add(self, name: str, prompt_len: int, max_tokens: int) -> None:
        prompt = [int(name) + 10] * prompt_len
        self.scheduler.add(make_request(name, prompt, max_tokens, ignore_eos=True))

    def step(self) -> bool:
        while (plan := self.scheduler.schedule()) is not None:
            self.flight.append(plan)
        if len(self.steps) % 100 == 0:
            self.scheduler.check_integrity()
        if not self.flight:
            return False
        plan = self.flight.popleft()
        decodes = sum(row.num_tokens == 1 for row in plan.rows)
        rows = plan.num_tokens - decodes
        seconds = self.machine(decodes, rows)
        self.steps.append((decodes, rows, seconds))
        results = [RowResult(1) for row in plan.rows if row.is_sampled]
        self.scheduler.commit(StepResult(step_id=plan.step_id, results=results, seconds=seconds))
        return True

    def run(self, count: int) -> list[tuple[int, int, float]]:
        first = len(self.steps)
        while len(self.steps) < first + count and self.step():
            pass
        return self.steps[first:]


def vram(decodes: int, rows: int) -> float:
    """Experts on a GPU, read once however many rows there are."""
    return 0.003 + 0.006 * (1 - 0.94 ** (decodes + rows)) + 2e-5 * (decodes + rows)


def streamed(decodes: int, rows: int) -> float:
    """Experts in RAM beside a GPU, as one was timed: the CPU computes few rows, many have the experts copied."""
    total = decodes + rows
    few = 0.012 + 0.16 * (1 - 0.97**total) + 2e-4 * total
    return few if total < 128 else min(few, 0.19 + 4.5e-5 * total)


def amx(decodes: int, rows: int) -> float:
    """All on a CPU with fast products: memory for few rows, and then as many as it can."""
    return 0.01 + 0.1 * (1 - 0.95 ** (decodes + rows)) + 3e-4 * (decodes + rows)


def slow(decodes: int, rows: int) -> float:
    """Two cores and a large model: a token takes a third of a second."""
    return 0.3 + 1.5 * (1 - 0.94 ** (decodes + rows)) + 0.01 * (decodes + rows)


MACHINES = [even, graphs, cpu, cores, vram, streamed, amx, slow]


def least_cost(machine: Machine, rows: int, most: int, longest: float) -> float:
    """By brute force: the least time that chunks of these rows in all can take beside one decode, each of them at most
    `most` rows and `longest` seconds. Sizes are multiples of 8."""
    alone = machine(1, 0)
    costs = {size: machine(1, size) - alone for size in range(8, most + 1, 8)}
    allowed = [(size, cost) for size, cost in costs.items() if alone + cost <= longest] or [(8, costs[8])]
    best = [0.0]
    for total in range(8, rows + 1, 8):
        best.append(min(best[max(total - size, 0) // 8] + cost for size, cost in allowed))
    return best[-1]


@pytest.mark.every(5)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("ratio", "gap"), [(2.0, 500.0), (2.0, 100.0), (4.0, 500.0), (1.25, 500.0)])
def test_streams_keep_their_share_and_prompts_are_nearly_as_fast_as_can_be(
    machine: Machine, ratio: float, gap: float
) -> None:
    loop, alone = Clocked(machine, ratio, chunk_size=1024, max_gap_ms=gap), machine(1, 0)
    loop.add("1", 20, 100000)
    loop.run(20)
    loop.add("2", 6000, 1)
    while len(loop.scheduler._running) + len(loop.scheduler._waiting) > 1:
        loop.step()  # whatever is tried
    loop.run(40)
    first = len(loop.steps)
    loop.add("3", 4096, 1)
    while len(loop.scheduler._running) + len(loop.scheduler._waiting) > 1:
        loop.step()
    steps = loop.steps[first:]
    assert sum(rows for _, rows, _ in steps) in (4095, 4096)  # one that is left over counts as a decode
    longest = max(gap / 1000, 4 * alone)
    seven = machine(1, 7)  # where no chunk is short enough
    assert max(seconds for *_, seconds in steps) <= max(longest, seven) * 1.001
    window, ends = max(WINDOW, 8 * alone), [0.0]
    for *_, seconds in steps:
        ends.append(ends[-1] + seconds)
    for i, end in enumerate(ends):
        tokens = sum(end < other <= end + window for other in ends[i + 1 :])
        if end + window <= ends[-1] and max(seconds for *_, seconds in steps) <= longest:
            assert tokens >= math.floor(window / alone / ratio) - 2  # one is being computed, and less than one is owed
    # A window of its own, so that what is spent behind the last chunk does not count.
    wanted = least_cost(machine, 4096, 1023, min(longest, alone + (1 - 1 / ratio) * window))
    cost = sum(seconds - alone for _, rows, seconds in steps if rows)
    # Whole chunks a window may be a little smaller than the cheapest; sizes are tried, and the last has what is left.
    assert cost <= wanted * WORTH * 1.2 + 2 * (machine(1, 1023) - alone)
    share = (1 - 1 / ratio) * window
    paid = sum(window / max(share // (seconds - alone), 1) for _, rows, seconds in steps if rows)  # whole ones a window
    assert ends[-1] <= max(cost * ratio / (ratio - 1), paid) * 1.05 + 2 * longest + window / 2


def test_where_each_step_may_carry_some_gaps_are_even() -> None:
    """Rows that cost the same in steps of any size: every step has as many as the ratio allows."""
    loop = Clocked(even)
    loop.add("1", 20, 10000)
    loop.run(20)
    loop.add("2", 30000, 1)
    loop.run(20)
    steps = loop.run(40)
    assert {rows for _, rows, _ in steps} == {0, 383}
    assert sum(rows == 0 for _, rows, _ in steps) <= 2  # these are timed anew
    assert all(seconds <= 2 * even(1, 0) for *_, seconds in steps)


def test_with_experts_in_ram_chunks_are_large_and_have_half_of_the_time() -> None:
    loop = Clocked(streamed, max_gap_ms=500.0)
    loop.add("1", 20, 10000)
    loop.run(20)
    loop.add("2", 60000, 1)
    loop.run(150)
    steps = loop.run(200)
    chunks = [rows for _, rows, _ in steps if rows]
    assert min(chunks) >= 2000
    assert max(seconds for *_, seconds in steps) <= 0.5
    share = sum(seconds - streamed(1, 0) for _, rows, seconds in steps if rows) / sum(seconds for *_, seconds in steps)
    assert 0.4 <= share <= 0.51


def test_a_question_behind_long_prompts_is_answered_soon() -> None:
    """Six prompts of 8,000 tokens on a GPU with experts in RAM, and nine tokens behind them."""
    loop = Clocked(streamed, max_gap_ms=500.0)
    for number in range(1, 7):
        loop.add(str(number), 8000, 500)
    loop.run(20)
    first = len(loop.steps)
    loop.add("7", 9, 3)
    while any(seq.request_id == "7" and seq.completion_len == 0 for seq in loop.scheduler._requests.values()):
        loop.step()
    assert sum(seconds for *_, seconds in loop.steps[first:]) <= 1.2


def test_prompts_in_every_step_from_the_first_on_are_paced_too() -> None:
    loop = Clocked(streamed, max_gap_ms=500.0)
    loop.add("1", 20, 10000)
    loop.add("2", 30000, 1)
    steps = [step for step in loop.run(300) if step[0]]
    assert max(seconds for *_, seconds in steps) <= 0.5
    assert max(rows for _, rows, _ in steps) >= 1500


def test_a_lonely_prompt_and_no_ratio_have_chunks_of_the_whole_size() -> None:
    loop = Clocked(graphs)
    loop.add("1", 5000, 2)
    assert [rows for _, rows, _ in loop.run(2)] == [4096, 904]
    loop = Clocked(graphs, ratio=0)
    loop.add("1", 20, 10000)
    loop.run(5)
    loop.add("2", 5000, 1)
    assert [rows for _, rows, _ in loop.run(4)] == [0, 4095, 905, 0]


def test_what_an_engine_taught_outlives_it() -> None:
    loop = Clocked(even)
    loop.add("1", 20, 10000)
    loop.run(5)
    loop.add("2", 4000, 1)
    loop.run(20)
    loop.scheduler.engine_lost()
    loop.flight.clear()
    loop.run(5)
    loop.add("3", 2000, 1)
    assert next(rows for _, rows, _ in loop.run(5) if rows) == 383


@pytest.mark.parametrize("gap", [-1.0, float("nan"), float("inf")])
def test_gaps_that_are_none(gap: float) -> None:
    with pytest.raises(ConfigError, match="--max_gap_ms must be a number of milliseconds, or 0 for no limit"):
        make_config(max_gap_ms=gap)


@pytest.mark.parametrize("ratio", [1.0, -1.0, float("nan"), float("inf")])
def test_ratios_that_are_none(ratio: float) -> None:
    with pytest.raises(ConfigError, match="--max_itl_ratio must be more than 1, or 0 for no limit"):
        make_config(max_itl_ratio=ratio)

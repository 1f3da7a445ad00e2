"""Steps by time: what is learnt of made-up machines, and the scheduler beside a clock that such a machine drives."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

import pytest

from ktransformers.errors import ConfigError
from ktransformers.scheduler.pacing import LEAST_ROWS, REFRESH, Pacer, paced_rows
from ktransformers.scheduler.records import RowResult, StepPlan
from ktransformers.scheduler.scheduler import Scheduler
from ktransformers.scheduler.step_times import StepTimes
from tests.support.fake_engine import make_config, make_request

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
    assert (times.more(63), times.alone(1)) == (None, None)
    assert paced_rows(times, 2.0, 1, 511) == LEAST_ROWS - 1
    times.add(1, 0, 1.0)
    assert paced_rows(times, 2.0, 1, 511) == LEAST_ROWS - 1


@pytest.mark.parametrize(("decodes", "most", "rows"), [(1, 4000, 63), (40, 4000, 32), (500, 12, 12), (1, 1, 1)])
def test_prompts_get_their_least_however_slow_they_are(decodes: int, most: int, rows: int) -> None:
    times = StepTimes()
    for _ in range(9):
        times.add(decodes, 0, 0.001)
    for count in (1, rows, 2 * rows):
        times.add(decodes, count, 9.0 * count)
    assert paced_rows(times, 2.0, decodes, most) == rows


def test_a_pacer_times_decodes_alone_now_and_then() -> None:
    pacer = Pacer(2.0)
    assert pacer.rows(1, 99, has_prompts=True) == 0  # nothing is known
    assert [pacer.rows(1, 99, has_prompts=True) for _ in range(5)] == [63, 63, 63, 63, 0]  # nor did anything come
    pacer.took(1, 0, 0.01)
    said = [pacer.rows(1, 99, has_prompts=True) for _ in range(2 * REFRESH + 2)]
    assert [i for i, rows in enumerate(said) if not rows] == [REFRESH, 2 * REFRESH + 1]
    assert pacer.rows(1, 99, has_prompts=False) == 99
    assert all(pacer.rows(1, 99, has_prompts=True) for _ in range(REFRESH))


class Clocked:
    """A scheduler with two steps in flight and a machine for them. steps: (decodes, rows of prompts, seconds)."""

    def __init__(self, machine: Machine, ratio: float = 2.0, chunk_size: int = 4096):
        config = make_config(num_pages=4000, page_size=16, chunk_size=chunk_size, max_itl_ratio=ratio)
        self.scheduler, self.machine = Scheduler(config), machine
        self.flight: deque[StepPlan] = deque()
        self.steps: list[tuple[int, int, float]] = []

    def add(self, name: str, prompt_len: int, max_tokens: int) -> None:
        prompt = [int(name) + 10] * prompt_len
        self.scheduler.add(make_request(name, prompt, max_tokens, ignore_eos=True))

    def step(self) -> bool:
        while (plan := self.scheduler.schedule()) is not None:
            self.flight.append(plan)
        self.scheduler.check_integrity()
        if not self.flight:
            return False
        plan = self.flight.popleft()
        decodes = sum(row.num_tokens == 1 for row in plan.rows)
        rows = plan.num_tokens - decodes
        seconds = self.machine(decodes, rows)
        self.steps.append((decodes, rows, seconds))
        results = [RowResult(1) for row in plan.rows if row.is_sampled]
        self.scheduler.commit(plan.step_id, results, seconds=seconds)
        return True

    def run(self, count: int) -> list[tuple[int, int, float]]:
        first = len(self.steps)
        while len(self.steps) < first + count and self.step():
            pass
        return self.steps[first:]


@pytest.mark.parametrize(("machine", "rows"), [(even, 383), (graphs, 127)])
def test_steps_beside_a_stream_are_within_the_budget(machine: Machine, rows: int) -> None:
    """`rows`: of the choices, the most that this machine does in the time."""
    loop, budget = Clocked(machine), 2 * machine(1, 0)
    loop.add("1", 20, 10000)
    loop.run(20)
    for number in range(2, 12):
        loop.add(str(number), 2000, 1)
        steps = loop.run(40)  # the prompt, and then some steps alone
        assert sum(rows for _, rows, _ in steps) == 2000
        assert all(decodes >= 1 for decodes, _, _ in steps)
        assert sum(step[1] == rows for step in steps) >= 2000 // rows - 4  # others are tried before
    over = [step for step in loop.steps[1:] if step[2] > budget]
    assert len(over) <= (machine is graphs) * 2 * -(-len(loop.steps) // 128)  # 192 rows, padded to 256, are tried


def test_a_budget_follows_its_ratio() -> None:
    loop = Clocked(graphs, ratio=4.0)
    loop.add("1", 20, 10000)
    loop.run(5)
    loop.add("2", 9000, 1)
    assert max(rows for _, rows, _ in loop.run(60)) == 511


def test_where_the_budget_is_too_small_prompts_get_their_least() -> None:
    loop = Clocked(lambda decodes, rows: 0.02 + 0.01 * rows)
    loop.add("1", 20, 10000)
    loop.run(5)
    loop.add("2", 6000, 1)
    rows = [rows for _, rows, _ in loop.run(110) if rows]
    assert sum(rows) == 6000
    assert all(one in (63, 126) for one in rows[:-1])
    assert rows.count(126) <= 3  # tried: with two steps in flight, and another planned before the first is known


def test_where_long_steps_take_hardly_longer_they_grow() -> None:
    """As with experts in RAM, all of which a step of 64 rows has read or copied already."""
    loop = Clocked(cpu)
    loop.add("1", 20, 10000)
    loop.run(5)
    loop.add("2", 2000, 1)
    rows = [rows for _, rows, _ in loop.run(40) if rows]
    assert rows[:-1] == sorted(rows[:-1])
    assert sum(rows) == 2000
    assert rows[-2] >= 504
    loop.run(5)
    for prompt in ("3", "4"):
        loop.add(prompt, 2000, 1)
        longest = max(rows for _, rows, _ in loop.run(20))
    assert longest == 2000


def test_where_only_few_rows_are_within_the_budget_steps_have_few() -> None:
    loop = Clocked(cores)
    loop.add("1", 20, 10000)
    loop.run(5)
    loop.add("2", 2000, 1)
    rows = [rows for _, rows, _ in loop.run(200) if rows]
    assert rows[:2] == [63, 63]  # nothing is known of others
    assert set(rows[2:-1]) == {15}
    assert sum(rows) == 2000


@pytest.mark.parametrize(("seven", "share", "rows"), [(0.5, 1.0, 15), (0.9, 1.9, 7), (1.1, 1.9, 15), (1.1, 2.1, 63)])
def test_a_budget_that_is_missed_by_little_does_not_make_steps_long(seven: float, share: float, rows: int) -> None:
    """seven, share: what 7 and 15 rows take, of the time that there is for them."""
    times = StepTimes()
    for _ in range(9):
        times.add(1, 0, 0.01)
    times.add(1, 7, 0.01 + seven * 0.01)
    for count in (15, 63, 126):
        times.add(1, count, 0.01 + share * 0.01 * count / 15)
    assert paced_rows(times, 2.0 + 1e-9, 1, 4000) == rows


def test_a_lonely_prompt_and_no_ratio_have_chunks_of_the_whole_size() -> None:
    loop = Clocked(graphs)
    loop.add("1", 5000, 2)
    assert [rows for _, rows, _ in loop.run(2)] == [4096, 904]
    loop = Clocked(graphs, ratio=0)
    loop.add("1", 20, 10000)
    loop.run(5)
    loop.add("2", 5000, 1)
    assert [rows for _, rows, _ in loop.run(4)] == [0, 4095, 905, 0]


def test_prompts_in_every_step_from_the_first_on_are_paced_too() -> None:
    loop = Clocked(graphs)
    loop.add("1", 20, 10000)
    loop.add("2", 30000, 1)
    steps = [step for step in loop.run(200) if step[0]]
    assert sum(seconds > 2 * graphs(1, 0) for _, _, seconds in steps) <= 4
    assert sum(rows == 127 for _, rows, _ in steps) > 150


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


@pytest.mark.parametrize("ratio", [1.0, -1.0, float("nan"), float("inf")])
def test_ratios_that_are_none(ratio: float) -> None:
    with pytest.raises(ConfigError, match="--max_itl_ratio must be more than 1, or 0 for no limit"):
        make_config(max_itl_ratio=ratio)

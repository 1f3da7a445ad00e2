"""Pages and states below the cache: what a later request, or a later scheduler, still has to compute."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from ktransformers.core import FinishReason
from ktransformers.scheduler.tier_rates import MAX_DECLINED, Option, TierRates
from ktransformers.scheduler.tier_records import TierStats
from tests.support.servers.fake_engine import FakeDisk, Loop, make_config, make_request, make_tiers

PROMPT = [i % 11 for i in range(30)]  # 7 pages of 4, and 2 tokens
LARGE = 1 << 20


def loop_of(disk: FakeDisk | None = None, tiers: dict[str, object] | None = None, **changes: object) -> Loop:
    values: dict[str, object] = {"num_pages": 12, "chunk_size": 16, "tiers": make_tiers(**(tiers or {}))}
    return Loop(make_config(**(values | changes)), disk)


def recurrent(disk: FakeDisk | None = None, tiers: dict[str, object] | None = None, **changes: object) -> Loop:
    return loop_of(disk, tiers, **({"num_states": 4, "max_batch_size": 2, "snapshot_align": 4} | changes))


def run(loop: Loop, name: str, prompt: list[int], max_tokens: int = 1) -> int:
    """How many tokens were computed for it."""
    before = loop.engine.num_rows
    loop.add(make_request(name, prompt, max_tokens, ignore_eos=True))
    loop.drain()
    loop.check_answers()
    return loop.engine.num_rows - before


def fill(loop: Loop) -> None:
    """Have the cache's pages taken by others."""
    run(loop, f"other {len(loop.requests)}", [len(loop.requests) + i % 3 for i in range(47)])


@pytest.mark.parametrize("make", [loop_of, recurrent])
def test_what_the_cache_had_no_room_for_comes_back_from_host_memory(make: type[Loop]) -> None:
    loop = make()
    assert run(loop, "first", PROMPT) == 30
    fill(loop)
    assert run(loop, "again", PROMPT) == 2
    stats = loop.scheduler.stats().tiers
    assert stats is not None
    assert (stats.host_hit_len, stats.disk_hit_len) == (28, 0)
    without = make(tiers={"host_pages": 0, "host_states": 0})
    run(without, "first", PROMPT)
    fill(without)
    assert run(without, "again", PROMPT) == 30


@pytest.mark.parametrize("make", [loop_of, recurrent])
@pytest.mark.parametrize("num_done", [1000, 1])
def test_another_service_goes_on_from_the_files(make: type[Loop], num_done: int) -> None:
    disk, files = FakeDisk(num_done=lambda: num_done), {"disk_bytes": LARGE}
    first, history = make(disk, files, num_pages=30), list(PROMPT)
    for turn in range(4):
        run(first, f"turn {turn}", history, max_tokens=6)
        history += [*first.answers[f"turn {turn}"], 1, 2]
    first.engine.tiers.work(1000, is_ending=False)  # type: ignore[union-attr]
    second = make(disk, files, num_pages=30)
    computed = run(second, "turn 4", history)
    assert computed <= 2 + 3 + 4  # the new tokens, and those of a page that was not full
    stats = second.scheduler.stats().tiers
    assert stats is not None
    assert stats.disk_hit_len == len(history) - computed


def test_other_salts_models_and_kinds_have_files_of_their_own() -> None:
    disk = FakeDisk()
    files = {"disk_bytes": LARGE}
    run(loop_of(disk, files), "first", PROMPT)
    for changes in ({"fingerprint": b"n" * 32}, {"kv_type": "int8"}):
        assert run(loop_of(disk, files | changes), "again", PROMPT) == 30
    loop = loop_of(disk, files)
    loop.add(make_request("salted", PROMPT, 1, cache_salt="tenant"))
    loop.drain()
    assert loop.engine.num_rows == 30
    assert run(loop_of(disk, files), "again", PROMPT) == 2


def test_files_that_cannot_be_read_are_computed_and_counted() -> None:
    disk = FakeDisk()
    files = {"disk_bytes": LARGE}
    run(loop_of(disk, files), "first", PROMPT)
    disk.is_bad = lambda: True
    loop = loop_of(disk, files)
    assert run(loop, "again", PROMPT) == 30
    stats = loop.scheduler.stats().tiers
    assert stats is not None
    assert stats.num_read_errors == 7
    assert stats.num_write_errors == 7  # it was written anew, in vain
    assert stats.disk_bytes == 0


def test_files_stay_within_their_bytes_and_the_first_pages_are_kept() -> None:
    disk, files = FakeDisk(), {"disk_bytes": 550}  # five pages
    loop = loop_of(disk, files)
    run(loop, "first", PROMPT)
    assert len(disk.files) == 5
    assert sorted(depth for depth, _ in disk.files.values())[0] == 0
    assert run(loop_of(disk, files), "again", PROMPT) < 30


def test_a_request_that_waits_for_files_lets_others_pass() -> None:
    disk, files = FakeDisk(), {"disk_bytes": LARGE}
    run(loop_of(disk, files), "first", PROMPT)
    disk.num_done = lambda: 0
    loop = loop_of(disk, files)
    loop.schedule()
    loop.commit()  # what there is
    loop.add(make_request("again", PROMPT, 4), make_request("other", [9, 9, 9, 9, 9], 4))
    plan = loop.schedule()
    assert plan is not None
    assert [start.request_id for start in plan.starts] == ["other"]
    assert plan.tiers is not None
    assert len(plan.tiers.reads) == 7
    loop.drain()
    loop.check_answers()
    assert loop.last["again"].cached_len == 28


def test_no_more_is_fetched_than_host_memory_holds_at_once() -> None:
    """The longest state whose pages all have room is begun from, not one whose pages have none."""
    disk, files = FakeDisk(), {"disk_bytes": LARGE}
    run(recurrent(disk, files, snapshot_interval=8, num_states=9), "first", PROMPT)
    loop = recurrent(disk, files | {"host_pages": 4}, snapshot_interval=8, num_states=9)
    assert run(loop, "again", PROMPT) == 30 - 16
    assert loop.scheduler.stats().tiers.num_read_errors == 0  # type: ignore[union-attr]


def test_a_request_that_leaves_while_files_are_read() -> None:
    disk, files = FakeDisk(), {"disk_bytes": LARGE}
    run(loop_of(disk, files), "first", PROMPT)
    disk.num_done = lambda: 0
    loop = loop_of(disk, files)
    loop.schedule()
    loop.commit()
    loop.add(make_request("again", PROMPT, 4))
    loop.schedule()
    loop.scheduler.finish("again", FinishReason.ABORT)
    loop.scheduler.check_integrity()
    loop.commit()
    assert run(loop, "once more", PROMPT) == 2


def test_an_engine_that_dies_takes_the_host_memory_along_and_leaves_the_files() -> None:
    for disk_bytes, computed in ((0, 30), (LARGE, 2)):
        loop = loop_of(tiers={"disk_bytes": disk_bytes})
        run(loop, "first", PROMPT)
        loop.crash()
        assert run(loop, "again", PROMPT) == computed


def test_preempted_runs_come_back_by_copy() -> None:
    loop = loop_of(num_pages=14, max_batch_size=2)
    prompts = {name: [seed + i % 7 for i in range(26)] for name, seed in (("a", 1), ("b", 2))}
    loop.add(*(make_request(name, prompt, 24, ignore_eos=True) for name, prompt in prompts.items()))
    loop.drain()
    loop.check_answers()
    assert loop.scheduler.stats().num_preemptions > 0
    assert loop.engine.num_rows < 2 * (26 + 23) + 10


def test_what_is_slower_than_computing_is_left() -> None:
    rates, options = TierRates(), [Option(0), Option(64, 100, 0), Option(128, 200, 100)]
    assert rates.best(options) == 2  # nothing is known: tried, and so measured
    rates.prefill.add(640, 1.0)
    assert rates.best(options) == 2
    rates.load.add(1000, 0.5)
    rates.read.add(100, 0.05)
    assert rates.best(options) == 1  # 0.1 s saved for 0.05 s; then another 0.1 s for 0.05 s and 0.05 s
    rates.read.add(10_000, 0.05)
    assert rates.best(options) == 2
    rates.load.add(100, 20.0)
    assert rates.best(options) == 0


def test_a_tier_that_was_slow_is_measured_again() -> None:
    rates, options = TierRates(), [Option(0), Option(64, 100, 100)]
    rates.prefill.add(640, 1.0)
    rates.read.add(1, 10.0)
    chosen = [rates.best(options) for _ in range(MAX_DECLINED + 1)]
    assert chosen == [0] * MAX_DECLINED + [1]


def test_rates_follow_what_was_measured_of_late() -> None:
    rates = TierRates()
    for _ in range(40):
        rates.load.add(100, 1.0)
    for _ in range(40):
        rates.load.add(1000, 1.0)
    assert rates.load.seconds_for(1000) == pytest.approx(1.0, rel=0.05)


def test_a_fast_prefill_is_not_made_to_wait() -> None:
    loop = loop_of(tiers={"disk_bytes": LARGE})
    run(loop, "first", PROMPT)
    tiers = loop.scheduler._pages.kv_offload
    assert tiers is not None
    tiers.rates.load.add(100, 1.0)
    fill(loop)
    assert run(loop, "again", PROMPT) == 30
    assert tiers.stats().recomputed_len == 28


def random_disk(rng: random.Random) -> FakeDisk:
    share, most = rng.choice((0.0, 0.0, 0.1)), rng.choice((0, 1, 4, 1000))
    return FakeDisk(is_bad=lambda: rng.random() < share, num_done=lambda: rng.randint(0, most))


def test_random_loads_with_lost_engines_and_bad_files_have_the_answers_of_each_alone(
    random_cases: Callable[[int, int], int],
) -> None:
    """FakeEngine checks every slot and state that a row reads. Also that the load meets everything that counts."""
    seen: Counter[str] = Counter()
    for seed in range(random_cases(40, 120)):
        rng = random.Random(seed)
        disk = random_disk(rng)
        tiers = {
            "host_pages": rng.choice((2, 6, 12, 100)),
            "host_states": rng.choice((1, 3, 20)),
            "disk_bytes": rng.choice((0, 2000, LARGE)),
        }
        config = make_config(
            num_pages=rng.choice((10, 16)),
            chunk_size=rng.choice((3, 8, 64)),
            num_states=rng.choice((0, 0, 4, 9)),
            snapshot_align=rng.choice((1, 8)),
            snapshot_interval=rng.choice((0, 8)),
            tiers=make_tiers(**tiers),
        )
        for _ in range(2):  # a service and its next start
            loop = Loop(config, disk)
            for count in range(14):
                first, length = rng.randint(1, 3) * 7, rng.choice((9, 17, 26))
                loop.add(
                    make_request(
                        f"r{count}",
                        [first + i % 5 for i in range(length)] + [rng.randint(0, 9)],
                        rng.choice((1, 6, 11)),
                        priority=rng.choice((0, 0, 1)),
                        cache_salt=rng.choice(("", "", "", "x")),
                        ignore_eos=True,
                    )
                )
                for _ in range(rng.randint(0, 9)):
                    while loop.schedule() is not None:
                        pass
                    if loop.results:
                        loop.commit()
                if rng.random() < 0.05:
                    loop.crash()
                if rng.random() < 0.1:
                    update = loop.scheduler.finish(f"r{count}", FinishReason.ABORT)
                    if update is not None:
                        loop.hear(update)
            loop.drain()
            loop.check_answers()
            stats = loop.scheduler.stats().tiers
            assert stats is not None
            seen.update(name for name in stats.__struct_fields__ if getattr(stats, name))
    assert min(seen[name] for name in TierStats.__struct_fields__ if name not in NOT_FAKED) >= random_cases(2, 5), seen


NOT_FAKED = ("recomputed_len", "loaded_bytes", "read_bytes")
"""The fake engine measures no copies."""

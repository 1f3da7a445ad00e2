"""Prefixes whose pages come from elsewhere, and answers that were begun elsewhere: as if computed here."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from math import lcm

import msgspec
import pytest

from tests.support.servers.fake_engine import Loop, answer_alone, make_config, make_request, make_tiers


def write(loop: Loop, token_ids: Sequence[int]) -> object:
    """What copies a prefix's contents into pages and slots."""
    size = loop.config.page_size

    def fill(first: int, pages: Sequence[int], slots: Mapping[int, int]) -> None:
        for i, page in enumerate(pages, first):
            for at in range(size):
                loop.engine.slots[page * size + at] = "", tuple(token_ids[: i * size + at + 1])
        for length, slot in slots.items():
            loop.engine.states[slot] = "", tuple(token_ids[:length])

    return fill


def adopt(loop: Loop, token_ids: Sequence[int], state_lens: Sequence[int] = ()) -> int:
    found = loop.scheduler.pages.adopt("", token_ids, state_lens, write(loop, token_ids))  # type: ignore[arg-type]
    loop.scheduler.check_integrity()
    return found


def random_loop(rng: random.Random) -> Loop:
    return Loop(
        make_config(
            num_pages=rng.choice((6, 16, 40)),
            page_size=rng.choice((1, 2, 4)),
            chunk_size=rng.choice((1, 5, 16)),
            max_batch_size=3,
            num_states=rng.choice((0, 0, 3, 4, 9)),
            snapshot_align=rng.choice((2, 4)),
            has_prefix_cache=rng.random() < 0.9,
            tiers=rng.choice((None, make_tiers(host_pages=rng.choice((3, 40)), disk_bytes=rng.choice((0, 3000))))),
        )
    )


@pytest.mark.every(5)
@pytest.mark.parametrize("seed", range(150))
def test_random_prefixes_between_random_steps(seed: int) -> None:
    rng = random.Random(seed)
    loop, shared = random_loop(rng), [rng.randrange(40) for _ in range(60)]
    config = loop.config
    align = lcm(config.page_size, config.snapshot_align)
    for i in range(30):
        prompt = shared[: rng.randrange(1, config.max_len - 1)][-60:] + [rng.randrange(3)] * rng.randrange(2)
        prompt = prompt[: config.max_len - 1]
        match rng.randrange(5):
            case 0:
                request = make_request(f"r{i}", prompt, rng.randrange(1, 12))
                answer, _ = answer_alone(request, config)
                begun = answer[: rng.randrange(len(answer))]
                loop.add(msgspec.structs.replace(request, answer_ids=begun))
            case 1 if not loop.results:  # nothing is in flight
                length = rng.randrange(len(prompt) + 1)
                lens = [n for n in range(1, length + 1) if rng.random() < 0.5]
                found = adopt(loop, prompt[:length], lens)
                assert found % config.page_size == 0
                pages, slots = loop.scheduler.pages.find("", prompt[:length])
                assert len(pages) * config.page_size >= found
                assert all(length % align == 0 for length in slots)
                for length, slot in slots.items():
                    assert loop.engine.states[slot] == ("", tuple(prompt[:length]))
            case 2:
                while loop.results:
                    loop.commit()
            case _ if len(loop.results) < 2:
                loop.schedule()
    loop.drain()
    loop.check_answers()


def test_a_failing_copy_leaves_nothing() -> None:
    loop = Loop(make_config(num_states=8, snapshot_align=4))

    def fail(first: int, pages: Sequence[int], slots: Mapping[int, int]) -> None:
        assert (first, len(pages), sorted(slots)) == (0, 3, [4, 12])
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - the one above
        loop.scheduler.pages.adopt("", range(14), (4, 5, 12, 13), fail)
    loop.scheduler.check_integrity()
    assert loop.scheduler.pages.find("", range(14)) == ([], {})
    assert loop.scheduler.pages.num_available == loop.config.num_pages
    assert adopt(loop, range(14), (12,)) == 12
    loop.add(make_request("a", range(14), 2))
    loop.drain()
    assert loop.last["a"].cached_len == 12
    loop.check_answers()


def test_pages_of_runs_are_not_taken() -> None:
    loop = Loop(make_config(num_pages=4))
    loop.add(make_request("a", range(9), 4, ignore_eos=True))
    loop.schedule()
    loop.commit()
    assert adopt(loop, range(20, 36)) == 8  # two pages are free, two are held
    loop.drain()
    loop.check_answers()


def test_another_salt_does_not_find_it() -> None:
    loop = Loop(make_config())
    adopt(loop, range(12))
    assert loop.scheduler.pages.find("other", range(12)) == ([], {})
    loop.add(make_request("a", range(12), 2, cache_salt="other"))
    loop.drain()
    assert loop.last["a"].cached_len == 0


def test_what_was_adopted_comes_back_from_the_tiers_with_its_states() -> None:
    values = {"num_pages": 12, "chunk_size": 16, "num_states": 4, "max_batch_size": 2, "snapshot_align": 4}
    loop, prompt = Loop(make_config(tiers=make_tiers(), **values)), [i % 11 for i in range(30)]
    assert adopt(loop, prompt, [28]) == 28
    for name, ids in (("other", [30 + i % 3 for i in range(46)]), ("again", prompt)):
        before = loop.engine.num_rows
        loop.add(make_request(name, ids, 1))
        loop.drain()
    loop.check_answers()
    assert loop.engine.num_rows - before == 2

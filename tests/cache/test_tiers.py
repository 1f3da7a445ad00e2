"""Slots of host memory and files by name: any order of calls against a plain model of the tables in the docstrings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktransformers.cache.tiers import DiskTier, HostTier

NAMES = st.integers(0, 5).map(lambda i: b"p%d" % i)
CALLS = st.lists(st.tuples(st.sampled_from(["allocate", "await", "arrive", "fail", "pin", "unpin", "touch"]), NAMES))


@settings(max_examples=300, deadline=None)
@given(CALLS, st.integers(0, 4))
def test_host_slots_follow_their_table(calls: list[tuple[str, bytes]], num_slots: int) -> None:
    tier = HostTier(num_slots)
    recent: list[bytes] = []  # least recently used first
    pins: dict[bytes, int] = {}
    pending: set[bytes] = set()
    for call, name in calls:
        if call in ("allocate", "await") and name not in recent:
            victims = [one for one in recent if not pins.get(one)]
            slot = tier.allocate(name, is_pending=call == "await")
            if len(recent) == num_slots:
                assert (slot is None) == (not victims)
                if victims:
                    recent.remove(victims[0])
            if slot is not None:
                recent.append(name)
                if call == "await":
                    pending.add(name)
                    pins[name] = 1
        elif call in ("arrive", "fail") and name in pending:
            if call == "fail" and pins[name] > 1:
                continue
            (tier.arrived if call == "arrive" else tier.failed)(name)
            pending.remove(name)
            pins[name] -= 1
            if call == "fail":
                recent.remove(name)
        elif call == "pin" and name in recent:
            tier.pin(name)
            pins[name] = pins.get(name, 0) + 1
        elif call == "unpin" and pins.get(name, 0) > (name in pending):
            tier.unpin(name)
            pins[name] -= 1
        elif call == "touch":
            tier.touch(name)
            if name in recent:
                recent.remove(name)
                recent.append(name)
        tier.check_integrity()
        assert list(tier) == recent
        assert {one for one in tier if tier.is_ready(one)} == set(recent) - pending
        assert tier.num_available == num_slots - sum(1 for one in recent if pins.get(one))


def test_calls_that_break_the_table_are_errors() -> None:
    tier = HostTier(2)
    assert tier.allocate(b"pa") is not None
    with pytest.raises(RuntimeError, match="one slot"):
        tier.allocate(b"pa")
    with pytest.raises(RuntimeError, match="cannot be pinned"):
        tier.pin(b"pb")
    tier.pin(b"pa")
    with pytest.raises(RuntimeError, match="cannot be dropped"):
        tier.drop(b"pa")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["begin", "written", "drop", "touch"]), NAMES, st.integers(1, 60))))
def test_files_stay_within_their_bytes(calls: list[tuple[str, bytes, int]]) -> None:
    tier, recent, sizes, pending = DiskTier(100), [], {}, set()
    for call, name, nbytes in calls:
        if call == "begin" and name not in sizes:
            gone = tier.begin(name, nbytes)
            if sum(sizes[one] for one in pending) + nbytes > 100:
                assert gone is None
                continue
            recent.append(name)
            sizes[name] = nbytes
            pending.add(name)
            expected = []
            for one in list(recent):
                if sum(sizes.values()) > 100 and one not in pending:
                    expected.append(one)
                    recent.remove(one)
                    del sizes[one]
            assert gone == expected
        elif call == "written" and name in pending:
            tier.written(name)
            pending.remove(name)
        elif call == "drop":
            tier.drop(name)
            sizes.pop(name, None)
            pending.discard(name)
            recent = [one for one in recent if one != name]
        elif call == "touch":
            tier.touch(name)
            if name in recent:
                recent.remove(name)
                recent.append(name)
        tier.check_integrity()
        assert list(tier) == recent
        assert {one for one in tier if tier.is_ready(one)} == sizes.keys() - pending
        assert tier.num_bytes == sum(sizes.values())


def test_files_of_before_and_one_that_is_too_large() -> None:
    tier = DiskTier(100)
    assert tier.fill([(b"pa", 60), (b"pb", 30), (b"pc", 30), (b"pa", 60)]) == [b"pa"]
    assert tier.begin(b"pd", 101) is None
    assert list(tier) == [b"pb", b"pc"]
    assert tier.num_bytes == 60

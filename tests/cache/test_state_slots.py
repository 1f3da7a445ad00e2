"""Slots of states: who may have which, and what gives way."""

from __future__ import annotations

import pytest

from ktransformers.cache.state_slots import StateSlots


def kept(slots: StateSlots, *pages: int) -> None:
    for page in pages:
        slot = slots.begin_save()
        assert slot is not None
        slots.publish(page, slot)
        slots.check_integrity()


def test_runs_and_snapshots_have_slots_of_their_own() -> None:
    slots = StateSlots(4, 2)
    a, b = slots.allocate(), slots.allocate()
    kept(slots, 10, 11)
    assert {a, b, slots.use(10), slots.use(11)} == {0, 1, 2, 3}
    assert slots.allocate() is None  # both snapshots are about to be read
    slots.begin_step()
    assert slots.begin_save() is not None
    assert 10 not in slots
    assert 11 in slots


def test_the_snapshot_that_was_used_longest_ago_gives_way() -> None:
    slots = StateSlots(4, 1)
    kept(slots, 5, 6, 7)
    slots.use(5)
    slots.begin_step()
    kept(slots, 8)
    assert [page in slots for page in (5, 6, 7, 8)] == [True, False, True, True]


def test_as_many_slots_are_lent_as_there_are_beside_runs_and_snapshots() -> None:
    slots = StateSlots(6, 2, 2)
    assert slots.max_snapshots == 2
    first = slots.allocate()
    kept(slots, 10, 11)
    lent = [slots.lend() for _ in range(3)]
    assert None not in lent[:2]
    assert lent[2] is None
    assert 10 in slots
    assert 11 in slots
    slots.check_integrity()
    second = slots.allocate()
    assert {first, second, *lent[:2], slots.slot(10), slots.slot(11)} == set(range(6))
    slots.release(lent[0])
    assert slots.lend() == lent[0]
    with pytest.raises(ValueError, match="too few"):
        StateSlots(3, 2, 2)


def test_no_more_snapshots_on_their_way_than_the_budget_has() -> None:
    slots = StateSlots(3, 1)
    first, second = slots.begin_save(), slots.begin_save()
    assert slots.begin_save() is None
    assert first is not None
    slots.release(first)
    assert slots.begin_save() == first
    assert second is not None
    slots.publish(4, second)
    with pytest.raises(RuntimeError, match="not pending"):
        slots.publish(4, second)
    with pytest.raises(RuntimeError, match="held by no run"):
        slots.release(second)


def test_a_page_keeps_the_snapshot_that_it_has() -> None:
    slots = StateSlots(3, 1)
    kept(slots, 4)
    before = slots.use(4)
    slot = slots.begin_save()
    assert slot is not None
    assert not slots.publish(4, slot)
    assert slots.use(4) == before
    slots.drop(4)
    slots.drop(4)
    slots.check_integrity()
    assert not slots.num_snapshots


def test_too_few_slots() -> None:
    with pytest.raises(ValueError, match="too few"):
        StateSlots(1, 2)


def test_what_a_run_will_read_is_not_given_away() -> None:
    """Held over steps, by each run that waits for its first row."""
    slots = StateSlots(3, 1)
    for page in (5, 6):
        slot = slots.begin_save()
        assert slot is not None
        slots.publish(page, slot)
    slots.hold(5)
    slots.hold(5)
    slots.begin_step()
    assert slots.begin_save() is not None  # 6 gives way
    assert 5 in slots
    assert 6 not in slots
    assert not slots.can_save
    slots.let_go(5)
    assert slots.begin_save() is None
    slots.let_go(5)
    assert slots.can_save
    assert slots.begin_save() is not None
    slots.check_integrity()

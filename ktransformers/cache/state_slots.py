"""Assigns the slots of the recurrent layers' states to running sequences and snapshots. Ids only, no tensors.

    a slot is    held by                            comes from        goes to
    free         nobody                             release, drop     allocate(), begin_save()
    running      one run, for as long as it lasts   allocate(), lend()  release()
    pending      a snapshot that a step writes      begin_save()      publish(): kept; release(): never was
    kept         the page whose end it belongs to   publish()         drop(); given to others, least recently used first

A snapshot is the state behind the last position of a page of the prefix tree (`cache/prefix_tree.py`): the page's
number is its name. Steps run in their order, so a slot may change hands while a step that reads it is in flight: the
next owner writes in a later one. Only within a step that must not be: a snapshot that the step being planned reads is
*pinned* until the next one is begun. One that a run will read, of which no row is planned yet, is *held*.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

__all__ = ["StateSlots"]


class StateSlots:
    """Pool of slots 0 .. num_slots - 1 of states, of which num_running are for running sequences, num_lent for further
    states of these and the others for snapshots.

    Calls that break the table above raise RuntimeError: they are bugs of the caller.
    """

    def __init__(self, num_slots: int, num_running: int, num_lent: int = 0):
        if num_slots < num_running + num_lent or num_running < 1:
            raise ValueError(f"{num_slots} slots of states are too few for {num_running} running sequences")
        self.num_slots, self.max_snapshots, self._max_lent = num_slots, num_slots - num_running - num_lent, num_lent
        self._free = list(range(num_slots - 1, -1, -1))
        self._running: set[int] = set()
        self._lent: set[int] = set()  # of those, as many as runs have beside their own
        self._pending: set[int] = set()
        self._kept: OrderedDict[int, int] = OrderedDict()  # slot by page, least recently used first
        self._used: set[int] = set()  # pages whose snapshot a run began from
        self._pinned: set[int] = set()
        self._held: Counter[int] = Counter()  # pages, by how many runs

    def __contains__(self, page: int) -> bool:
        return page in self._kept

    def __iter__(self) -> Iterator[int]:
        """Pages that have a snapshot behind them."""
        return iter(self._kept)

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots that runs can begin from."""
        return len(self._kept)

    def begin_step(self) -> None:
        """Begin planning a step: what the last one reads may be written from now on."""
        self._pinned.clear()

    def allocate(self) -> int | None:
        """Take a slot for a run; None when there is none before the next step."""
        if not self._free and not self._evict():
            return None
        slot = self._free.pop()
        self._running.add(slot)
        return slot

    def lend(self) -> int | None:
        """Take a slot for a run that has one already; None when all of these are taken, or before the next step."""
        if len(self._lent) >= self._max_lent:
            return None
        slot = self.allocate()
        if slot is not None:
            self._lent.add(slot)
        return slot

    def begin_save(self) -> int | None:
        """Take a slot that a step will write a snapshot to; None when the budget is spent on others like it."""
        if len(self._kept) + len(self._pending) >= self.max_snapshots and not self._evict():
            return None
        if not self._free:
            return None
        slot = self._free.pop()
        self._pending.add(slot)
        return slot

    def publish(self, page: int, slot: int) -> bool:
        """Publish a pending snapshot that was written: runs can begin behind `page` from now on. False: another one is
        there.
        """
        if slot not in self._pending:
            raise RuntimeError(f"slot {slot} is not pending")
        self._pending.remove(slot)
        if page in self._kept:
            self._free.append(slot)
            return False
        self._kept[page] = slot
        return True

    @property
    def can_save(self) -> bool:
        """Whether `begin_save` would give a slot."""
        if self._idle() is not None:
            return True
        return bool(self._free) and len(self._kept) + len(self._pending) < self.max_snapshots

    def slot(self, page: int) -> int | None:
        """Return the slot of the snapshot behind a page, if there is one. Changes nothing."""
        return self._kept.get(page)

    def use(self, page: int) -> int:
        """Return the slot of a snapshot that a run begins from."""
        self._kept.move_to_end(page)
        self._used.add(page)
        self._pinned.add(page)
        return self._kept[page]

    def hold(self, page: int) -> None:
        """Keep the slot of a snapshot from being reused, until `let_go`."""
        self._held[page] += 1

    def let_go(self, page: int) -> None:
        """Undo one `hold` of a snapshot."""
        self._held[page] -= 1
        if not self._held[page]:
            del self._held[page]

    def is_used(self, page: int) -> bool:
        """Whether a run began from the snapshot behind a page."""
        return page in self._used

    def release(self, slot: int) -> None:
        """Free the slot of a run that is over, or of a snapshot that is not wanted any more."""
        if slot in self._running:
            self._running.remove(slot)
            self._lent.discard(slot)
        elif slot in self._pending:
            self._pending.remove(slot)
        else:
            raise RuntimeError(f"slot {slot} is held by no run and no step")
        self._free.append(slot)

    def drop(self, page: int) -> None:
        """Forget the snapshot behind a page, if there is one."""
        slot = self._kept.pop(page, None)
        if slot is not None:
            self._free.append(slot)
            self._used.discard(page)
            self._pinned.discard(page)

    def _evict(self) -> bool:
        page = self._idle()
        if page is None:
            return False
        self.drop(page)
        return True

    def _idle(self) -> int | None:
        """Of snapshots that nobody is about to read, the one not used for longest."""
        return next((page for page in self._kept if page not in self._pinned and page not in self._held), None)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is in one place, and snapshots are within their budget."""
        held = [*self._free, *self._running, *self._pending, *self._kept.values()]
        assert sorted(held) == list(range(self.num_slots)), "a slot is lost, or in two places"
        assert len(self._kept) + len(self._pending) <= self.max_snapshots, "more snapshots than there is room for"
        assert self._used <= self._kept.keys() >= self._pinned | self._held.keys(), "snapshots that are not there"

    def holders(self) -> tuple[set[int], set[int]]:
        """Return the slots of runs, and those that steps will write snapshots to."""
        return set(self._running), set(self._pending)

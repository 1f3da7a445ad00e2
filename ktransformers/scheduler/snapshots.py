"""Decides which states of recurrent layers are kept, so that later requests need not compute their history again.

    prompt  0 ... 64 ... 128 ... interval ............ border | last tokens | answer ... 64 ... 64 ...
                                    ^                    ^                            rolling: the last one only
A state belongs to a length: that of the tokens it has seen, a multiple of `align` and so the end of a page. Kept are
the last such length before the prompt's last token, lengths `interval` apart, and while an answer grows its latest one,
which gives way to the next unless another run began from it. Ids only: slots are cache/state_slots.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import TYPE_CHECKING

from ktransformers.cache.state_slots import StateSlots
from ktransformers.scheduler.sequence import RunningState

if TYPE_CHECKING:
    from ktransformers.scheduler.config import SchedulerConfig

__all__ = ["Snapshots"]


class Snapshots:
    """The slots of runs and of snapshots, for sequences of pages.

    on_final: told the page and the slot of each snapshot that will not give way to the next of its answer.
    """

    on_final: Callable[[int, int], None] = staticmethod(lambda page, slot: None)

    def __init__(self, config: SchedulerConfig):
        self.page_size = config.page_size
        self.align = lcm(config.snapshot_align, config.page_size)
        self.interval = -(-config.snapshot_interval // self.align) * self.align
        self._is_kept = config.has_prefix_cache
        self._size = config.num_states, config.max_running, config.num_draft_states
        self.slots = StateSlots(*self._size)

    def clear(self) -> None:
        """Forget everything: the engine is gone."""
        self.slots = StateSlots(*self._size)

    def border(self, known_len: int) -> int:
        """Return the longest length with a snapshot that leaves the last token to compute; 0 where none is kept."""
        return (known_len - 1) // self.align * self.align if self._is_kept and self.slots.max_snapshots else 0

    def begin(self, run: RunningState, page: int | None, known_len: int, loaded: int | None = None) -> bool:
        """Give a run its slot and what it begins from: the snapshot behind `page`, or zeros. False: no slot is left.

        loaded: a slot from `begin_save` that will have that snapshot, which the tree knows nothing of yet.
        """
        read = loaded
        if read is None:
            read = -1 if page is None else self.slots.use(page)  # pinned: the slot below is another one
        slot = self.slots.allocate()
        if slot is None:
            return False
        run.state_slot, run.read_slot, run.border = slot, read, self.border(known_len)
        return True

    def hold(self, run: RunningState, page: int) -> None:
        """Keep the snapshot behind `page`, which the run's first row will read, until that row is planned."""
        self.slots.hold(page)
        run.held = page

    def _let_go(self, run: RunningState) -> None:
        if run.held is not None:
            self.slots.let_go(run.held)
            run.held = None

    def plan(self, run: RunningState, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Plan, as (length, slot), the states that a row of the positions start .. end - 1 is to save."""
        if run.held is not None:
            self.slots.use(run.held)  # pinned in this step
            self._let_go(run)
        if not self._is_kept:
            return ()
        saves = []
        for length in range(start // self.align * self.align + self.align, end + 1, self.align):
            is_interval = self.interval > 0 and length % self.interval == 0
            if length >= run.border or is_interval:
                slot = self.slots.begin_save()
                if slot is not None:
                    run.saves[length] = slot
                    saves.append((length, slot))
        return tuple(saves)

    def draft_room(self, run: RunningState, most: int) -> int:
        """Count the draft tokens, at most `most`, that the run's next row can have: each has a slot for the state in
        front of it, and none of those states is one that is to be kept."""
        if self._is_kept:
            most = min(most, self.align - 2 - run.planned_len % self.align)
        while len(run.draft_slots) < most:
            slot = self.slots.lend()
            if slot is None:
                break
            run.draft_slots.append(slot)
        return max(min(most, len(run.draft_slots)), 0)

    def accept_drafts(self, run: RunningState, num_accepted: int, num_drafts: int) -> None:
        """Go on from the state behind the draft tokens that were accepted, of a row that had num_drafts."""
        if num_accepted < num_drafts:
            slot, run.draft_slots[num_accepted] = run.draft_slots[num_accepted], run.state_slot
            run.state_slot = run.read_slot = slot

    def publish(self, run: RunningState, saves: tuple[tuple[int, int], ...]) -> None:
        """Publish the states of a row that was computed, whose pages are in the tree: they can be found from now on."""
        for length, slot in saves:
            del run.saves[length]
            page = run.block_table[length // self.page_size - 1]
            is_new = self.slots.publish(page, slot)
            if length <= run.border:
                self._keep(page)
                continue
            if run.rolled is not None and not self.slots.is_used(run.rolled):
                self.slots.drop(run.rolled)
            run.rolled = page if is_new else None

    def _keep(self, page: int) -> None:
        slot = self.slots.slot(page)
        if slot is not None:
            self.on_final(page, slot)

    def begin_adoption(self, table: Sequence[int], lengths: Sequence[int]) -> dict[int, int]:
        """Return slots, by length, that states of a prefix from elsewhere are to be written to: the longest that can be
        used.

        table: the prefix's pages.
        """
        slots: dict[int, int] = {}
        for length in sorted(lengths, reverse=True):
            at = length // self.page_size - 1
            if length % self.align or not 0 <= at < len(table) or table[at] in self.slots:
                continue
            slot = self.slots.begin_save()
            if slot is None:
                break
            slots[length] = slot
        return slots

    def end(self, run: RunningState) -> None:
        """End a run, and the snapshots that are on their way."""
        self._let_go(run)
        if run.rolled is not None:
            self._keep(run.rolled)
        for slot in (run.state_slot, *run.draft_slots, *run.saves.values()):
            self.slots.release(slot)
        run.draft_slots.clear()
        run.saves.clear()

    def check_integrity(self, runs: list[RunningState], pages: set[int]) -> None:
        """Raise AssertionError unless slots are those of these runs, and snapshots belong to pages of the tree."""
        self.slots.check_integrity()
        running, pending = self.slots.holders()
        own = [slot for run in runs for slot in (run.state_slot, *run.draft_slots)]
        assert sorted(own) == sorted(running), "slots of runs"
        assert sorted(slot for run in runs for slot in run.saves.values()) == sorted(pending), "slots on their way"
        assert all(page in pages for page in self.slots), "a snapshot behind a page that is not in the tree"

"""States of the one sequence of a static cache: which lengths of it a step can begin from. Numbers only, no tensors.

Slot 0 has the state behind the last token that was run; the others have snapshots, each behind a length of the same
sequence. Keys and values can be overwritten from any position on, a state cannot be taken back: a new prompt begins at
the longest length of what it shares with the last one that has a state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ktransformers.core import SNAPSHOT_ALIGN
from ktransformers.engine.step.context import StepStateSlots
from ktransformers.errors import ConfigError

__all__ = ["KeptStates"]


class KeptStates:
    """The kept states of one sequence, in num_states slots. interval: tokens between snapshots inside of a prompt, 0
    for none.

    A step of several rows keeps the last border before its last row, in the place of the one of the step before it; one
    row at a time does the same, and leaves what the prompt's steps kept. What gives way is what was used longest ago.
    """

    def __init__(self, num_states: int, interval: int = 0):
        self._num_states = num_states
        self._free = list(range(num_states - 1, 0, -1))
        self._interval = -(-interval // SNAPSHOT_ALIGN) * SNAPSHOT_ALIGN
        self._kept: OrderedDict[int, int] = OrderedDict()  # slot by length, least recently used first
        self._len: int | None = 0  # of what slot 0 has seen; None when a step failed
        self._rolled: int | None = None
        self._was_prompt = False
        self._saves: dict[int, int] = {}

    def resume_len(self, shared: int) -> int:
        """Return the longest length up to `shared` that a step can begin from."""
        if shared == self._len:
            return shared
        return max((length for length in self._kept if length <= shared), default=0)

    def begin(self, start: int, num_rows: int) -> StepStateSlots:
        """Begin a step of num_rows rows from position `start` on. Raises ConfigError where there is no state to begin
        from."""
        if start == self._len:
            read = 0 if start else -1
        elif start in self._kept:
            read = self._kept[start]
            self._kept.move_to_end(start)
        elif start == 0:
            read = -1
        else:
            raise ConfigError(f"no state of the first {start} tokens is kept; the nearest is {self.resume_len(start)}")
        if start != self._len:
            self._rolled = None
        for length in [length for length in self._kept if length > start]:
            self._drop(length)
        self._saves = self._planned(start, num_rows, read)
        self._len = None
        return StepStateSlots(read, 0, [(length - start - 1, slot) for length, slot in self._saves.items()])

    def end(self, length: int) -> None:
        """Note that the step is over and the sequence has `length` tokens now."""
        self._len = length
        self._kept.update(self._saves)
        self._saves = {}

    def slots(self) -> dict[int, int]:
        """Slots of the states that a step can begin from, by length."""
        return dict(self._kept) | ({self._len: 0} if self._len else {})

    def restore(self, lengths: Sequence[int], end: int) -> dict[int, int]:
        """Forget all states, for another sequence of `end` tokens. Returns slots by length that its states are to be
        written to.

        lengths: of which there are states; the longest are taken, as many as there is room for.
        """
        self._kept.clear()
        self._free = list(range(self._num_states - 1, 0, -1))
        self._rolled, self._was_prompt, self._saves = None, False, {}
        self._len = end if end in lengths or not end else None
        others = sorted(length for length in lengths if 0 < length < end)
        for length in others[-len(self._free) :] if self._free else []:
            self._kept[length] = self._free.pop()
        return self.slots()

    def _planned(self, start: int, num_rows: int, read: int) -> dict[int, int]:
        """Slots by the lengths that the step is to keep."""
        is_prompt, end = num_rows > 1, start + num_rows
        last = (end - 1 if is_prompt else end) // SNAPSHOT_ALIGN * SNAPSHOT_ALIGN
        wanted = [n for n in range(self._interval, end, self._interval) if n > start] if self._interval else []
        if last > start:
            if self._was_prompt is is_prompt and self._rolled is not None and self._rolled != start:
                self._drop(self._rolled)
            self._rolled = None if last in wanted else last
            wanted = sorted({*wanted, last})
        if last > start or is_prompt:
            self._was_prompt = is_prompt
        saves: dict[int, int] = {}
        for length in wanted:
            slot = self._take(read)
            if slot is None:
                break
            saves[length] = slot
        return saves

    def _take(self, read: int) -> int | None:
        """A free slot, or the one that was used longest ago; never the one that the step reads."""
        if not self._free:
            oldest = next((length for length, slot in self._kept.items() if slot != read), None)
            if oldest is None:
                return None
            self._drop(oldest)
        return self._free.pop()

    def _drop(self, length: int) -> None:
        slot = self._kept.pop(length, None)
        if slot is not None:
            self._free.append(slot)

"""Places of copies of pages and of states outside of the device: slots of host memory, files. Ids only, no bytes.

    host slot     name   pins          may be given to another name
    free          no     0             yes
    pending       yes    1 or more     no: bytes are on their way into it
    ready         yes    0             yes, least recently used first
    in use        yes    1 or more     no: a step, the disk's thread or a waiting request reads it

A name is what the bytes are: a letter for their kind, then a page's key (`cache/page_keys.py`). Pages of one prompt are
used together, and one is of no use without those before it: callers touch the deepest first, so that it goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["PAGE", "STATE", "DiskTier", "HostTier", "page_name", "state_name"]

PAGE, STATE = b"p", b"s"


def page_name(key: bytes) -> bytes:
    """Return the name under which tiers keep the keys and values of a page."""
    return PAGE + key


def state_name(key: bytes) -> bytes:
    """Return the name under which tiers keep the recurrent layers' states behind a page."""
    return STATE + key


class HostTier:
    """Host memory as slots 0 .. num_slots - 1 of one size. Calls that break the table above raise RuntimeError: bugs of
    the caller.
    """

    def __init__(self, num_slots: int):
        if num_slots < 0:
            raise ValueError(f"num_slots must not be negative, got {num_slots}")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pins: dict[bytes, int] = {}
        self._pending: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._slots)

    def __contains__(self, name: bytes) -> bool:
        """Whether a slot is this name's, perhaps still without its bytes."""
        return name in self._slots

    def is_ready(self, name: bytes) -> bool:
        """Whether a name's bytes are in its slot, or will be before anything that is asked for from now on."""
        return name in self._slots and name not in self._pending

    @property
    def num_available(self) -> int:
        """Number of slots that can be given out now."""
        return len(self._free) + len(self._slots) - len(self._pins)

    @property
    def pins(self) -> Mapping[bytes, int]:
        """Counts of the pins of pinned names."""
        return self._pins

    def slot(self, name: bytes) -> int:
        """Return the slot of a name."""
        return self._slots[name]

    def allocate(self, name: bytes, *, is_pending: bool = False) -> int | None:
        """Take a slot for a new name; None when all are pinned. is_pending: pinned until `arrived` or `drop`."""
        if name in self._slots:
            raise RuntimeError("a name has one slot")
        if not self._free and not self._evict():
            return None
        slot = self._slots[name] = self._free.pop()
        if is_pending:
            self._pending.add(name)
            self.pin(name)
        return slot

    def arrived(self, name: bytes) -> None:
        """Unpin a pending slot: its bytes are there."""
        self._pending.remove(name)
        self.unpin(name)

    def failed(self, name: bytes) -> None:
        """Free a pending slot: its bytes will not come."""
        self._pending.remove(name)
        self.unpin(name)
        self.drop(name)

    def pin(self, name: bytes) -> None:
        """Keep a name in its slot until as many calls of `unpin`."""
        if name not in self._slots:
            raise RuntimeError("what is not there cannot be pinned")
        self._pins[name] = self._pins.get(name, 0) + 1

    def unpin(self, name: bytes) -> None:
        """Undo one `pin` of a name."""
        left = self._pins[name] - 1
        if left:
            self._pins[name] = left
        else:
            del self._pins[name]

    def touch(self, name: bytes) -> None:
        """Mark a name as used last, so that others are evicted first. What is not here is left alone."""
        if name in self._slots:
            self._slots.move_to_end(name)

    def drop(self, name: bytes) -> None:
        """Free the slot of a name."""
        if name in self._pins:
            raise RuntimeError("what is pinned cannot be dropped")
        self._free.append(self._slots.pop(name))

    def _evict(self) -> bool:
        name = next((name for name in self._slots if name not in self._pins), None)
        if name is None:
            return False
        self.drop(name)
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is in one place."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self.num_slots)), "a slot is lost, or twice"
        assert self._pins.keys() <= self._slots.keys() >= self._pending, "pins of names that are not there"
        assert self._pending <= self._pins.keys(), "a pending slot is not pinned"
        assert all(count > 0 for count in self._pins.values()), "pins that are none"


class DiskTier:
    """Disk tier: files of at most max_bytes together, by name. What is being written counts from the start."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pending: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._sizes)

    def __contains__(self, name: bytes) -> bool:
        """Whether its file is there or on its way."""
        return name in self._sizes

    def is_ready(self, name: bytes) -> bool:
        """Whether a name's file is written."""
        return name in self._sizes and name not in self._pending

    def fill(self, found: Iterable[tuple[bytes, int]]) -> list[bytes]:
        """Add files that were there before, (name, bytes), least recently used first. Returns those that have no room.

        They are not to be deleted: the folder may have another user with a larger quota, see PageFolder.
        """
        for name, nbytes in found:
            if name not in self._sizes:
                self._sizes[name] = nbytes
                self.num_bytes += nbytes
        return self._shrink()

    def begin(self, name: bytes, nbytes: int) -> list[bytes] | None:
        """Announce that a file of nbytes will be written. Returns those to be deleted before, None when there can be no
        room now.
        """
        if name in self._sizes:
            raise RuntimeError("a name has one file")
        if sum(self._sizes[one] for one in self._pending) + nbytes > self.max_bytes:
            return None
        self._sizes[name] = nbytes
        self._pending.add(name)
        self.num_bytes += nbytes
        return self._shrink()

    def written(self, name: bytes) -> None:
        """Note that the file which `begin` announced is there."""
        self._pending.remove(name)

    def touch(self, name: bytes) -> None:
        """Mark a name as used last, so that others are deleted first. What is not here is left alone."""
        if name in self._sizes:
            self._sizes.move_to_end(name)

    def drop(self, name: bytes) -> None:
        """Forget a name's file, written or not. What is not here is left alone."""
        self._pending.discard(name)
        self.num_bytes -= self._sizes.pop(name, 0)

    def _shrink(self) -> list[bytes]:
        gone = []
        while self.num_bytes > self.max_bytes:
            name = next(name for name in self._sizes if name not in self._pending)
            self.drop(name)
            gone.append(name)
        return gone

    def check_integrity(self) -> None:
        """Raise AssertionError unless sizes add up and are within their budget."""
        assert self.num_bytes <= self.max_bytes, "more bytes than there may be"
        assert self.num_bytes == sum(self._sizes.values()), "bytes do not add up"
        assert self._pending <= self._sizes.keys(), "a file on its way that is not counted"

"""Store of answers that later requests may refer to: bounded, in memory, each seen only by the API key that asked for
it.

Everything is kept as the JSON that it is, so that its size is known. A conversation's answers share its turns.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ktransformers.errors import UnknownIdError
from ktransformers.server.responses import json_bytes
from ktransformers.system.file_kinds import size_of

__all__ = ["KeptResponse", "ResponseStore", "Turn"]

logger = logging.getLogger(__name__)

_OVERHEAD = 1 << 10  # bytes per turn and answer beside their JSON, roughly
MAX_RESPONSES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Items that came together in one request or answer, as a JSON list. ids: theirs."""

    data: bytes
    ids: tuple[str, ...]

    @classmethod
    def of(cls, items: Iterable[dict[str, Any]]) -> Turn:
        """Return the turn of these items, each of which has an id."""
        made = list(items)
        return cls(json_bytes(made), tuple(item["id"] for item in made))

    def items(self) -> list[dict[str, Any]]:
        """Return the turn's items, parsed."""
        return list(json.loads(self.data))


@dataclass(frozen=True, slots=True, eq=False)
class KeptResponse:
    """A response that is kept for later requests. body: the response as JSON. context: what it answered, history first.
    answer: its own items.
    """

    id: str
    body: bytes
    context: tuple[Turn, ...]
    answer: Turn

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns that a request which follows this response begins with."""
        return (*self.context, self.answer)


@dataclass(slots=True)
class _OfKey:
    """responses: least recently used first. uses: in how many of them a turn is. turn_of: by an item's id."""

    responses: OrderedDict[str, KeptResponse] = field(default_factory=OrderedDict)
    uses: Counter[Turn] = field(default_factory=Counter)
    turn_of: dict[str, Turn] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, kept: KeptResponse) -> None:
        self.responses[kept.id] = kept
        self.num_bytes += len(kept.body) + _OVERHEAD
        for turn in kept.turns:
            if not self.uses[turn]:
                self.num_bytes += len(turn.data) + _OVERHEAD
                self.turn_of.update(dict.fromkeys(turn.ids, turn))
            self.uses[turn] += 1

    def remove(self, id: str) -> None:
        kept = self.responses.pop(id)
        self.num_bytes -= len(kept.body) + _OVERHEAD
        for turn in kept.turns:
            self.uses[turn] -= 1
            if not self.uses[turn]:
                del self.uses[turn]
                self.num_bytes -= len(turn.data) + _OVERHEAD
                for one in turn.ids:
                    if self.turn_of.get(one) is turn:
                        del self.turn_of[one]


class ResponseStore:
    """Store of at most max_bytes and max_responses. Beyond them the key that holds most loses what it has not used for
    longest.

    Used on the event loop only.
    """

    def __init__(self, max_bytes: int, max_responses: int = MAX_RESPONSES):
        self._max_bytes, self._max_responses = max_bytes, max_responses
        self._keys: dict[str, _OfKey] = {}
        self._has_said_large = False

    @property
    def is_on(self) -> bool:
        """Whether the store keeps anything at all."""
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all kept responses."""
        return sum(one.num_bytes for one in self._keys.values())

    def __len__(self) -> int:
        return sum(len(one.responses) for one in self._keys.values())

    def keep(self, key: str, kept: KeptResponse) -> None:
        """Keep a response, and make room for it. One that is larger than the whole store is not kept, and the log says
        so.
        """
        if not self.is_on:
            return
        size = len(kept.body) + sum(len(turn.data) + _OVERHEAD for turn in kept.turns) + _OVERHEAD
        if size > self._max_bytes:
            if not self._has_said_large:
                self._has_said_large = True
                logger.warning("a conversation of %s is not kept: it is over --responses_store", size_of(size))
            return
        self._keys.setdefault(key, _OfKey()).add(kept)
        while self.num_bytes > self._max_bytes or len(self) > self._max_responses:
            largest = max(self._keys, key=lambda one: self._keys[one].num_bytes)
            self._remove(largest, next(iter(self._keys[largest].responses)))

    def get(self, key: str, id: str) -> KeptResponse:
        """Return the kept response with this id. Raises UnknownIdError."""
        of_key = self._keys.get(key)
        if of_key is None or id not in of_key.responses:
            raise UnknownIdError(
                f"there is no response {id[:100]!r}: it was never kept (store: false), was deleted, or made room for "
                "newer ones (--responses_store)"
            )
        of_key.responses.move_to_end(id)
        return of_key.responses[id]

    def delete(self, key: str, id: str) -> None:
        """Delete the kept response with this id. Raises UnknownIdError. Answers that followed it keep their turns."""
        self.get(key, id)
        self._remove(key, id)

    def turn_of(self, key: str, id: str) -> Turn:
        """Return the turn that holds the item with this id. Raises UnknownIdError."""
        of_key = self._keys.get(key)
        turn = None if of_key is None else of_key.turn_of.get(id)
        if turn is None:
            raise UnknownIdError(f"there is no item {id[:100]!r} in what is kept here; send the item itself")
        return turn

    def _remove(self, key: str, id: str) -> None:
        self._keys[key].remove(id)
        if not self._keys[key].responses:
            del self._keys[key]

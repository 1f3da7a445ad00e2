"""The earlier turns that a request refers to, in bytes that stand beside its body in the journal.

The store is in memory: a request that goes on in the next server finds there neither the response that it follows nor
the items that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ktransformers.errors import ConfigError
from ktransformers.server.api.openai.responses.store import Turn

__all__ = ["Earlier"]


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """turns: JSON and ids of items, each turn once; history, referred: their places."""

    turns: tuple[tuple[bytes, tuple[str, ...]], ...]
    history: tuple[int, ...]
    referred: dict[str, int]


@dataclass(frozen=True, slots=True)
class Earlier:
    """The earlier turns that a request refers to. history: what previous_response_id stands for. referred: turns with
    items that are named by their ids.
    """

    history: tuple[Turn, ...] = ()
    referred: Mapping[str, Turn] = field(default_factory=dict)

    @property
    def turns(self) -> list[Turn]:
        """All earlier turns, each once."""
        return list(dict.fromkeys((*self.history, *self.referred.values())))

    def packed(self) -> bytes:
        """Return the earlier turns as bytes for the journal; b"" for none."""
        turns = self.turns
        if not turns:
            return b""
        places = {turn: place for place, turn in enumerate(turns)}
        packed = _Packed(
            tuple((turn.data, turn.ids) for turn in turns),
            tuple(places[turn] for turn in self.history),
            {id: places[turn] for id, turn in self.referred.items()},
        )
        return msgspec.msgpack.encode(packed)

    @classmethod
    def unpacked(cls, data: bytes) -> Earlier:
        """Return the earlier turns from bytes of `packed` that are not b"". Raises ConfigError for what another version
        wrote.
        """
        try:
            packed = msgspec.msgpack.decode(data, type=_Packed)
            turns = [Turn(*one) for one in packed.turns]
            history = tuple(turns[place] for place in packed.history)
            return cls(history, {id: turns[place] for id, place in packed.referred.items()})
        except (msgspec.MsgspecError, IndexError) as error:
            raise ConfigError("its earlier turns were written down by another version of this program") from error

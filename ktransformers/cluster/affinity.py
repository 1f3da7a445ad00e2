"""Chooses which replica gets a prompt: the one that knows the longest beginning of it, unless it has too much to do.

    prompt   [0 .. 64) [64 .. 128) [128 .. 192) rest           the rest is not looked at
    keys       k0        k1          k2                        k_i = digest(k_{i-1}, the ids of block i), salt first

Pure: knows neither Ray nor time. A key stands for a block and all that comes before it, as a page of the cache does.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

__all__ = ["KEY_SIZE", "PrefixAffinity", "block_keys", "keys_in"]

KEY_SIZE = 16
"""Bytes of a key: two blocks that differ have the same one about never."""

MAX_BLOCKS = 1 << 14
"""Blocks that are remembered of each replica: a million tokens in blocks of 64, and 2 MiB of memory here."""


def block_keys(token_ids: Sequence[int], salt: str, block_size: int) -> list[bytes]:
    """Return the keys of the full blocks of a prompt, in order. Prompts of different salts have no key in common."""
    key = blake2b(salt.encode(), digest_size=KEY_SIZE).digest()
    keys = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        key = blake2b(key + array("I", token_ids[end - block_size : end]).tobytes(), digest_size=KEY_SIZE).digest()
        keys.append(key)
    return keys


def keys_in(data: bytes) -> list[bytes]:
    """Split `data` into the keys that were joined to it."""
    return [data[at : at + KEY_SIZE] for at in range(0, len(data), KEY_SIZE)]


class PrefixAffinity:
    """Ranks replicas for a prompt by what they know of it and have to do. max_imbalance: see ReplicaArgs. max_blocks:
    of each replica; those that were used longest ago are forgotten."""

    def __init__(self, max_imbalance: int, max_blocks: int = MAX_BLOCKS):
        self._max_imbalance, self._max_blocks = max_imbalance, max_blocks
        self._known: dict[str, OrderedDict[bytes, None]] = {}

    def known_len(self, replica: str, keys: Sequence[bytes]) -> int:
        """Count the blocks at the beginning of a prompt that this replica has computed lately."""
        known = self._known.get(replica, OrderedDict())
        return next((at for at, key in enumerate(keys) if key not in known), len(keys))

    def ranked(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> list[str]:
        """Rank all replicas, the best one first. loads: answers that each has to do.

        First comes the one that knows most, if that is anything and if it has at most max_imbalance more to do than the
        least loaded one. The others follow by load; of equals the one that has least to forget.
        """
        if not loads:
            return []
        least = min(loads.values())
        by_load = sorted(loads, key=lambda name: (loads[name], len(self._known.get(name, ())), name))
        known = {name: self.known_len(name, keys) for name in by_load}
        best = max(by_load, key=lambda name: (known[name], -loads[name]))
        if known[best] and loads[best] - least <= self._max_imbalance:
            by_load.remove(best)
            by_load.insert(0, best)
        return by_load

    def took(self, replica: str, keys: Iterable[bytes]) -> None:
        """Note that a replica computes the prompt, and so knows it."""
        known = self._known.setdefault(replica, OrderedDict())
        for key in reversed(list(keys)):  # the first block is what all later ones need: it goes last
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._max_blocks:
            known.popitem(last=False)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all replicas but these: the others are gone."""
        alive = set(replicas)
        self._known = {name: known for name, known in self._known.items() if name in alive}

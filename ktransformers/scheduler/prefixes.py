"""Prefixes as the tiers see them: what a run may begin with, where it begins, where a copy lies. Data only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Copy", "Prefix", "PrefixStart"]


@dataclass(frozen=True, slots=True)
class PrefixStart:
    """The place where a run begins. num_pages: of its prefix. keys: of those of them that are loaded, the last ones.
    state: key of the page whose state is loaded, None when it is in the cache or there are no states. declined: pages
    that are known, and computed because that is faster."""

    num_pages: int
    keys: Sequence[bytes] = ()
    state: bytes | None = None
    declined: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that a run may begin with. pages: those of the tree. max_pages: most that need not be computed.

    has_state: whether the cache has the state behind a page; None: there are no states. can_load: whether a state can
    be loaded now.
    """

    salt: str
    token_ids: Sequence[int]
    pages: Sequence[int]
    max_pages: int
    has_state: Callable[[int], bool] | None = None
    can_load: bool = True


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a page or a state below the cache. slot: of host memory; None: in a file alone. depth: pages before
    it."""

    name: bytes
    depth: int
    slot: int | None

"""Copies what pages keep of a sequence out and in, by position. Knows neither files' bytes nor prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.cache.tiers import PAGE, STATE
from ktransformers.engine.sequence.session_file import SessionFile, state_name
from ktransformers.engine.step.kv_offload import TieredCache
from ktransformers.scheduler.page_tables import PageTables
from ktransformers.scheduler.prefixes import Copy

__all__ = ["PageStore", "States", "StoredSession", "put_rows"]

PIECE_BYTES = 64 << 20
"""Of host memory that are copied between two steps, and of files that are read until the next look at what there is."""

MOST_STATES = 4
"""States of recurrent layers in a file, the longest of those that there are: a next turn begins at one of the last."""


States = dict[int, Mapping[str, torch.Tensor] | Copy]
"""By length: copies of states in memory, or where a file has one."""


@dataclass(frozen=True, slots=True)
class StoredSession:
    """The kept part of a sequence, its first cached_len tokens: tensors as in a SessionFile, on the CPU."""

    cached_len: int
    state_lens: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]


class PageStore:
    """Copies sequences out of the pages of an engine for many sequences, and into them. Used between two steps. Without
    a salt, as requests of this process are.

    tiers: below the cache, None where there are none.
    """

    def __init__(self, cache: PagedCache, pages: PageTables, tiers: TieredCache | None = None):
        self._cache, self._pages, self._tiers = cache, pages, tiers

    @property
    def page_size(self) -> int:
        """Number of tokens of a page."""
        return self._cache.page_size

    @property
    def layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of what is kept of a position, by name."""
        return {name: form for name, form in _layout(self._cache).items() if not name.startswith("state ")}

    def count(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Count the leading tokens whose pages the cache has, and those whose pages it or the tiers have."""
        pages, _ = self._pages.find("", token_ids)
        offloaded, _ = self._pages.find_offloaded("", token_ids, len(pages))
        size = self._cache.page_size
        return len(pages) * size, (len(pages) + len(offloaded)) * size

    def nbytes(self, token_ids: Sequence[int]) -> int:
        """Count the bytes of what is kept of these tokens, in the cache and in tiers, states of recurrent layers
        included."""
        pages, slots = self._pages.find("", token_ids)
        offloaded, states_below = self._pages.find_offloaded("", token_ids, len(pages))
        known = (len(pages) + len(offloaded)) * self._cache.page_size
        per_token = sum(tensor.nbytes // len(tensor) for tensor in self._cache.tensors().values())
        states = self._cache.states
        per_state = 0 if states is None else states.nbytes // self._cache.num_states
        num_states = min(len(slots.keys() | states_below.keys()), MOST_STATES)
        return known * per_token + num_states * per_state

    def fill(
        self, token_ids: Sequence[int], num_filled: int, room: Mapping[str, torch.Tensor]
    ) -> tuple[int, list[Copy]]:
        """Copy more of these tokens to `room`, whose first num_filled rows are filled: all that the cache has, and then
        a piece of what host memory has.

        Returns how many rows are filled then, and some of the pages behind them if files alone have those.
        """
        size, at = self._cache.page_size, num_filled // self._cache.page_size
        pages, _ = self._pages.find("", token_ids)
        if len(pages) > at:
            rows = self._rows(pages[at:])
            for name, tensor in self._cache.tensors().items():
                _bytes(room[name])[at * size : at * size + len(rows)] = _bytes(tensor)[rows.to(tensor.device)].cpu()
            at = len(pages)
        _synchronize(self._cache)
        offloaded, _ = self._pages.find_offloaded("", token_ids, at)
        most = max(PIECE_BYTES // max(self._cache.nbytes // self._cache.num_pages, 1), 1)
        in_memory = list(takewhile(lambda copy: copy.slot is not None, offloaded[:most]))
        for i, copy in enumerate(in_memory, start=at):
            assert self._tiers is not None
            assert copy.slot is not None
            put_rows(room, i * size, self._tiers.in_slot(PAGE, copy.slot))
        in_files = takewhile(lambda copy: copy.slot is None, offloaded[len(in_memory) :])
        return (at + len(in_memory)) * size, list(islice(in_files, most))

    def read(self, copy: Copy) -> dict[str, torch.Tensor] | None:
        """Read what a file has of a page or state, on any thread, at any time. None when it cannot be used."""
        assert self._tiers is not None
        return self._tiers.in_file(copy.name, copy.depth)

    def take_states(self, token_ids: Sequence[int]) -> States:
        """Take the states behind the longest lengths within these tokens that have some."""
        pages, slots = self._pages.find("", token_ids)
        _, offloaded = self._pages.find_offloaded("", token_ids, len(pages))
        _synchronize(self._cache)
        found: States = {}
        for length in sorted(slots.keys() | offloaded.keys(), reverse=True)[:MOST_STATES]:
            copy = offloaded.get(length)
            if length in slots and self._cache.states is not None:
                found[length] = {
                    name: tensor[slots[length]].cpu().clone() for name, tensor in self._cache.states.tensors().items()
                }
            elif copy is not None and copy.slot is not None and self._tiers is not None:
                held = self._tiers.in_slot(STATE, copy.slot)
                found[length] = {name: tensor[0].clone() for name, tensor in held.items()}
            elif copy is not None:
                found[length] = copy
        return found

    def take(self, token_ids: Sequence[int]) -> tuple[int, dict[str, torch.Tensor]]:
        """Take the longest prefix of these tokens that is in whole pages of the cache: its length, a copy of its
        rows."""
        pages, _ = self._pages.find("", token_ids)
        rows = self._rows(pages)
        tensors = {
            name: _bytes(tensor)[rows.to(tensor.device)].cpu().view(tensor.dtype).view(len(rows), *tensor.shape[1:])
            for name, tensor in self._cache.tensors().items()
        }
        return len(rows), tensors

    def put(self, file: SessionFile) -> int:
        """Put a session's file into free pages, where prompts that begin so find it. Returns how many of the tokens
        there was room for.

        Raises SessionFileError before anything is changed.
        """
        file.check_tensors(_layout(self._cache))
        header, size = file.header, self._cache.page_size

        def fill(first: int, pages: Sequence[int], slots: Mapping[int, int]) -> None:
            rows = self._rows(pages)
            for name, tensor in self._cache.tensors().items():
                if len(rows):
                    new = file.tensors[name][first * size : first * size + len(rows)]
                    _bytes(tensor)[rows.to(tensor.device)] = _bytes(new).to(tensor.device)
            _put_states(self._cache, file, slots)
            _synchronize(self._cache)

        return self._pages.adopt("", file.token_ids[: header.cached_len], header.state_lens, fill)

    def _rows(self, pages: Sequence[int]) -> torch.Tensor:
        """The positions of pages in the cache's tensors, int64."""
        size = self._cache.page_size
        return (torch.tensor(list(pages), dtype=torch.int64)[:, None] * size + torch.arange(size)).flatten()


def put_rows(room: Mapping[str, torch.Tensor], first: int, rows: Mapping[str, torch.Tensor]) -> None:
    """Copy a page's rows to positions from `first` on."""
    for name, tensor in rows.items():
        room[name][first : first + len(tensor)].copy_(tensor)


def _put_states(cache: PagedCache, file: SessionFile, slots: Mapping[int, int]) -> None:
    for name, tensor in {} if cache.states is None else cache.states.tensors().items():
        for length, slot in slots.items():
            tensor[slot].copy_(file.tensors[state_name(length, name)])


def _layout(cache: PagedCache) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """See SessionFile.check_tensors."""
    tensors = dict(cache.tensors())
    if cache.states is not None:
        tensors |= {f"state {name}": tensor for name, tensor in cache.states.tensors().items()}
    return {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors.items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[slots, bytes], of the same memory: not every type can be written by index."""
    return tensor.view(len(tensor), -1).view(torch.uint8)


def _synchronize(cache: PagedCache) -> None:
    """Copies to GPUs are over before a step on another stream reads them."""
    for device in {tensor.device for tensor in cache.tensors().values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)

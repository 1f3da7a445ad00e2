"""Takes a sequence out of pages for a session's file, also what was pushed below the cache: in pieces, between steps.

    first visit      what the cache's pages have, a piece of what host memory has ─┐
    caller's thread  a piece of what files have ───────────────────────────────────┼─> room beside the session's file
    next visit ...   what is behind it, wherever that is by now ───────────────────┘

Nothing is held meanwhile: what is given up before its turn comes, and is nowhere else, ends what is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from ktransformers.engine.sequence.session_file import mapped_tensors, state_name
from ktransformers.engine.sequence.session_store import PageStore, States, StoredSession, put_rows
from ktransformers.scheduler.prefixes import Copy

__all__ = ["Visit", "take_pages"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Visit(Protocol):
    """A function that has something done between two steps."""

    def __call__(self, run: Callable[[PageStore], T], /) -> T:
        """What `run` returns."""
        ...


def take_pages(visit: Visit, token_ids: Sequence[int], path: Path) -> StoredSession:
    """Take what pages and the tiers below them keep of the longest prefix of these tokens, for a session at `path`.

    Raises SessionFileError when the disk there has no room, and what `visit` raises.
    """
    in_cache, known = visit(lambda store: store.count(token_ids))
    if in_cache == known:
        (num_tokens, rows), found = visit(lambda store: (store.take(token_ids), store.take_states(token_ids)))
    else:
        token_ids = token_ids[:known]
        rows = mapped_tensors(path, visit(lambda store: store.layout), known)
        num_tokens = _fill(visit, token_ids, rows)
        if num_tokens < known:
            logger.info("of %d tokens that tiers had, %d could be fetched for %s", known, num_tokens, path)
        found = visit(lambda store: store.take_states(token_ids[:num_tokens]))
    states = _read(visit, found)
    tensors = {name: tensor[:num_tokens] for name, tensor in rows.items()} if num_tokens else {}
    for length, state in states.items():
        if length <= num_tokens:
            tensors |= {state_name(length, name): tensor for name, tensor in state.items()}
    return StoredSession(num_tokens, tuple(sorted(length for length in states if length <= num_tokens)), tensors)


def _fill(visit: Visit, token_ids: Sequence[int], room: Mapping[str, torch.Tensor]) -> int:
    """How many tokens are in the room then."""
    num_tokens, store = 0, visit(lambda store: store)
    while num_tokens < len(token_ids):
        at = num_tokens
        num_tokens, files = visit(partial(PageStore.fill, token_ids=token_ids, num_filled=at, room=room))
        for copy in files:
            rows = store.read(copy)
            if rows is None:
                return num_tokens
            put_rows(room, num_tokens, rows)
            num_tokens += store.page_size
        if num_tokens == at:
            return at
    return num_tokens


def _read(visit: Visit, states: States) -> dict[int, Mapping[str, torch.Tensor]]:
    """With those that files have. One whose file cannot be used is left out."""
    found: dict[int, Mapping[str, torch.Tensor]] = {}
    store = visit(lambda store: store)
    for length, state in states.items():
        if not isinstance(state, Copy):
            found[length] = state
        elif (rows := store.read(state)) is not None:
            found[length] = {name: tensor[0] for name, tensor in rows.items()}
    return found

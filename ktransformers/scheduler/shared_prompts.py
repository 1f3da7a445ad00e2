"""Whether a prompt waits for another one that computes what both begin with. Pure; changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from ktransformers.scheduler.page_tables import PageTables
from ktransformers.scheduler.sequence import Sequence

__all__ = ["WORTH_WAITING", "awaits_prefix"]

WORTH_WAITING = 64
"""Tokens of a prefix that others compute now for which a prompt waits: fewer are computed again at once."""


def awaits_prefix(seq: Sequence, running: Iterable[Sequence], pages: PageTables) -> bool:
    """Whether a running sequence computes a prefix of this one's prompt now, which is then found.

    Answers to one request (whose prompts are the same object) wait for whichever of them runs, others for those of
    better rank and for what is worth it.
    """
    most = pages.shared_len(seq)
    for other in running:
        run = other.run
        if run is None or run.computed_len >= most or other.request.cache_salt != seq.request.cache_salt:
            continue
        if other.request.prompt_ids is seq.request.prompt_ids:
            return True
        if run.computed_len < other.prompt_len - 1 and other.rank < seq.rank:
            common = pages.findable_len(other, min(most, seq.common_len(other)))
            if common - run.computed_len < WORTH_WAITING:
                continue  # before the whole prompt is looked up
            if common - pages.cached_len(seq) >= WORTH_WAITING:
                return True
    return False

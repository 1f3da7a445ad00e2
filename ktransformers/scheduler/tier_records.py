"""Messages of scheduler and engine about the tiers below the cache: host memory, and files.

    pages, states ── stores ──> host slots ── writes ──> files          names and slots: cache/tiers.py
                  <── loads ──             <── reads ──

A plan's copies are done before its rows, in this order: stores, loads; so a page may be stored and given to somebody
else by one plan. Files are read and written meanwhile by threads of the engine, plan by plan after its copies: reads,
deletes, writes. Results tell of those that ended. Until then their slots are in no store, and those of reads in
no load.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["TierPlan", "TierResult", "TierStats"]

Copies = Sequence[tuple[int, int]]
Files = Sequence[tuple[bytes, int, int]]


class TierPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The copies of one step, filled by the scheduler.

    stores: (page, host slot). loads: (host slot, page). state_stores, state_loads: the same of slots of states.
    writes, reads: (name, pages before it, host slot). deletes: (name, pages before it).
    lists: which files there are is to be told. waits: the step has no rows, and is to end with a file's end.
    """

    stores: Copies = ()
    loads: Copies = ()
    state_stores: Copies = ()
    state_loads: Copies = ()
    writes: Files = ()
    reads: Files = ()
    deletes: Sequence[tuple[bytes, int]] = ()
    lists: bool = False
    waits: bool = False


class TierResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of the copies between tiers since the last result, filled by the engine.

    row_seconds: that the step's rows took. loaded, read: (bytes, seconds) of copies to the cache, and from files that
    were good. writes, reads: (name, whether it was done). found: all files, (name, depth, bytes), least recently used
    first.
    """

    row_seconds: float = 0.0
    loaded: tuple[int, float] = (0, 0.0)
    read: tuple[int, float] = (0, 0.0)
    writes: Sequence[tuple[bytes, bool]] = ()
    reads: Sequence[tuple[bytes, bool]] = ()
    found: Sequence[tuple[bytes, int, int]] | None = None


class TierStats(msgspec.Struct, kw_only=True):
    """The figures of the tiers for metrics. The first four are of this moment, the others count from the start:
    `KvOffload` adds to its own.

    host_hit_len, disk_hit_len: tokens of prompts that were not computed because host memory, or a file, had them.
    recomputed_len: tokens that a tier had, and that were computed because that was faster.
    num_read_errors: files that could not be used, and whose pages were computed instead; num_write_errors: pages that
    could not be written.
    """

    host_bytes: int
    max_host_bytes: int
    disk_bytes: int
    max_disk_bytes: int
    host_hit_len: int = 0
    disk_hit_len: int = 0
    recomputed_len: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    num_read_errors: int = 0
    num_write_errors: int = 0

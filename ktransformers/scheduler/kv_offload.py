"""Decides what becomes of pages and states below the cache: which are copied out, which come back, when. Ids only.

    published ── stored in a later step ──> host memory ── written behind ──> file       least recently used go first
    admitted  <── loaded before its rows ──             <── read while it waits ──

A page is stored once it is in the prefix tree, so it is never written to again; a state when its snapshot is final. A
prompt goes on where the tree ends with what the tiers know, as far as that is faster than computing it
(`tier_rates.py`). What lies in files only is read first: the request waits, others pass it. One fetch for each wait:
what is lost meanwhile is computed.

An engine that dies takes the host memory with it. Its successor lists the files; nothing is planned before.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from ktransformers.cache.page_keys import page_key, root_key
from ktransformers.cache.tiers import PAGE, STATE, DiskTier, HostTier, page_name, state_name
from ktransformers.scheduler.config import TierConfig
from ktransformers.scheduler.prefixes import Copy, Prefix, PrefixStart
from ktransformers.scheduler.tier_rates import Option, TierRates
from ktransformers.scheduler.tier_records import TierPlan, TierResult, TierStats

__all__ = ["KvOffload"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Page:
    """A page of the tree."""

    key: bytes
    depth: int
    parent: int | None


@dataclass(slots=True)
class _Held:
    """What a waiting request fetched. names: pinned. awaited: still on their way. declined: see Start."""

    names: list[bytes] = field(default_factory=list)
    awaited: set[bytes] = field(default_factory=set)
    fetched: set[bytes] = field(default_factory=set)
    declined: int = 0


@dataclass(slots=True)
class _Todo:
    """What the next plan will say."""

    stores: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    state_stores: list[tuple[int, int]] = field(default_factory=list)
    state_loads: list[tuple[int, int]] = field(default_factory=list)
    writes: list[tuple[bytes, int, int]] = field(default_factory=list)
    reads: list[tuple[bytes, int, int]] = field(default_factory=list)
    deletes: list[tuple[bytes, int]] = field(default_factory=list)
    pinned: list[bytes] = field(default_factory=list)  # until it is said

    @property
    def is_empty(self) -> bool:
        return not any((self.stores, self.loads, self.state_stores, self.state_loads, self.writes, self.reads)) and (
            not self.deletes
        )


class KvOffload:
    """Plans the copies of pages and states below the cache. Told by PageTables of every page of its tree."""

    def __init__(self, config: TierConfig, page_size: int):
        self.config, self.page_size = config, page_size
        self.rates = TierRates()
        self._counts = TierStats(host_bytes=0, max_host_bytes=0, disk_bytes=0, max_disk_bytes=config.disk_bytes)
        self._sizes = {PAGE: config.page_bytes, STATE: config.state_bytes}
        self.clear()

    def clear(self) -> None:
        """Forget everything but rates and counts: the engine is gone."""
        config = self.config
        self._hosts = {PAGE: HostTier(config.host_pages), STATE: HostTier(config.host_states)}
        self._disk = DiskTier(config.disk_bytes) if config.disk_bytes else None
        self._depths: dict[bytes, int] = {}  # of what is in files
        self._is_listed = self._disk is None
        self._pages: dict[int, _Page] = {}
        self._unstored: dict[int, None] = {}  # pages, in order
        self._unstored_states: dict[int, int] = {}  # slot by page
        self._unwritten: deque[tuple[bytes, int]] = deque()  # name, page
        self._writing: set[bytes] = set()
        self._reading: set[bytes] = set()
        self._held: dict[str, _Held] = {}
        self._todo = _Todo()

    # What the tree has.

    def published(self, salt: str, parent: int | None, tokens: Sequence[int], page: int) -> None:
        """Note that a page was computed, and is in the tree from now on."""
        self._learn(salt, parent, tokens, page)
        self._unstored[page] = None

    def _learn(self, salt: str, parent: int | None, tokens: Sequence[int], page: int) -> None:
        before = None if parent is None else self._pages[parent]
        key = page_key(self._root(salt) if before is None else before.key, tokens)
        self._pages[page] = _Page(key, 0 if before is None else before.depth + 1, parent)

    def _root(self, salt: str) -> bytes:
        return root_key(self.config.fingerprint, self.page_size, self.config.kv_type, salt)

    def keep_state(self, page: int, slot: int) -> None:
        """Note that the state behind a page of the tree is in this slot, and worth keeping."""
        self._unstored_states[page] = slot

    def evicted(self, page: int) -> None:
        """Forget a page that is not in the tree any more."""
        del self._pages[page]
        self._unstored.pop(page, None)
        self._unstored_states.pop(page, None)

    # A step is planned.

    @property
    def awaits_listing(self) -> bool:
        """Whether it is not known yet which files there are: nothing but a step for that may be planned."""
        return not self._is_listed

    def begin_step(self, state_slot: Callable[[int], int | None]) -> None:
        """Plan what is to be copied out, before anything is given to others. state_slot: where a page's state is."""
        for page, slot in list(self._unstored_states.items()):
            if state_slot(page) != slot or self._store(page, state_name, self._todo.state_stores, slot):
                del self._unstored_states[page]
        stored = []
        for page in list(self._unstored):
            if not self._store(page, page_name, self._todo.stores, page):
                break
            stored.append(page)
            del self._unstored[page]
        self._touch_all(stored)
        self._write_behind()

    def _store(self, page: int, name_of: Callable[[bytes], bytes], todo: list[tuple[int, int]], source: int) -> bool:
        """False when there is no slot now."""
        known = self._pages[page]
        name = name_of(known.key)
        host = self._host(name)
        if name not in host:
            slot = host.allocate(name)
            if slot is None:
                return not host.num_slots
            todo.append((source, slot))
            self._counts.stored_bytes += self._sizes[name[:1]]
        if self._disk is not None and name not in self._disk:
            self._unwritten.append((name, page))
        return True

    def _host(self, name: bytes) -> HostTier:
        return self._hosts[name[:1]]

    def _path(self, page: int) -> Iterator[bytes]:
        """Keys of a page and of those before it, the deepest first."""
        at: int | None = page
        while at is not None:
            known = self._pages[at]
            yield known.key
            at = known.parent

    def _touch_all(self, pages: Sequence[int]) -> None:
        """They are used, and so are those before them."""
        parents = {self._pages[page].parent for page in pages}
        for page in pages:
            if page not in parents:
                self._touch(page)

    def _touch(self, page: int) -> None:
        for key in self._path(page):
            for name in (page_name(key), state_name(key)):
                self._host(name).touch(name)
                if self._disk is not None:
                    self._disk.touch(name)

    def _write_behind(self) -> None:
        """Files for what is in host memory, as many at once as leave slots for others."""
        if self._disk is None:
            return
        most = max(sum(host.num_slots for host in self._hosts.values()) // 4, 1)
        begun: list[int] = []
        while self._unwritten and len(self._writing) < most:
            name, page = self._unwritten.popleft()
            host, known = self._host(name), self._pages.get(page)
            if known is None or known.key != name[1:] or not host.is_ready(name) or name in self._disk:
                continue
            gone = self._disk.begin(name, self.config.file_bytes(name[:1]))
            if gone is None:
                continue  # larger than all files may be
            self._delete(gone)
            host.pin(name)
            self._writing.add(name)
            self._depths[name] = known.depth
            self._todo.writes.append((name, known.depth, host.slot(name)))
            begun.append(page)
        self._touch_all(begun)

    def _delete(self, names: Sequence[bytes]) -> None:
        self._todo.deletes += [(name, self._depths.pop(name)) for name in names]

    def wants_step(self) -> bool:
        """Whether a step is wanted although no request has rows to compute."""
        return self.awaits_listing or not self._todo.is_empty or self._is_behind

    @property
    def has_work(self) -> bool:
        """Whether a step would be wanted, before one is begun."""
        has_room = any(host.num_available for host in self._hosts.values())
        is_new = bool(self._unstored or self._unstored_states or self._unwritten) and has_room
        return self.wants_step() or is_new

    @property
    def _is_behind(self) -> bool:
        """Whether somebody waits for a file to end."""
        waits = any(held.awaited for held in self._held.values())
        return bool(self._reading or self._writing) and (
            waits or bool(self._unstored or self._unstored_states or self._unwritten)
        )

    def take(self, *, is_alone: bool) -> TierPlan | None:
        """Return what the step is to do; None for nothing. is_alone: it has no rows."""
        if self.awaits_listing:
            return TierPlan(lists=True)
        todo, self._todo = self._todo, _Todo()
        for name in todo.pinned:
            self._host(name).unpin(name)
        waits = is_alone and self._is_behind
        if todo.is_empty and not waits:
            return None
        return TierPlan(
            stores=todo.stores,
            loads=todo.loads,
            state_stores=todo.state_stores,
            state_loads=todo.state_loads,
            writes=todo.writes,
            reads=todo.reads,
            deletes=todo.deletes,
            waits=waits,
        )

    # A run begins.

    def choose(self, prefix: Prefix, *, with_files: bool = False) -> PrefixStart:
        """Choose where a run should begin. with_files: what is in files counts too, though it takes a wait."""
        keys = self._known_keys(prefix, with_files)
        size, base = self.page_size, len(prefix.pages)
        options, starts = [Option(0)], [PrefixStart(0)]
        bytes_of = [self._bytes(page_name(key)) for key in keys]
        sums = list(itertools.accumulate(bytes_of, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0)))
        for end in range(base if prefix.has_state is None else 1, base + len(keys) + 1):
            loaded, read = sums[max(end - base, 0)]
            state: bytes | None = None
            if prefix.has_state is not None and not (end <= base and prefix.has_state(prefix.pages[end - 1])):
                key = keys[end - base - 1] if end > base else self._pages[prefix.pages[end - 1]].key
                name = state_name(key)
                if not prefix.can_load or not self._is_known(name, with_files):
                    continue
                more, state = self._bytes(name), key
                loaded, read = loaded + more[0], read + more[1]
            options.append(Option(end * size, loaded, read))
            starts.append(PrefixStart(end, keys[: max(end - base, 0)], state))
        best = starts[self.rates.best(options)]
        return replace(best, declined=starts[-1].num_pages - best.num_pages)

    @property
    def has_files(self) -> bool:
        """Whether there is a tier of files."""
        return self._disk is not None

    def _known_keys(self, prefix: Prefix, with_files: bool) -> list[bytes]:
        """Of the pages behind those of the tree that a tier has, as many as can be in host memory at once."""
        size, keys, most = self.page_size, list[bytes](), self._hosts[PAGE].num_slots
        parent = self._pages[prefix.pages[-1]].key if prefix.pages else self._root(prefix.salt)
        for at in range(len(prefix.pages) * size, prefix.max_pages * size, size):
            parent = page_key(parent, prefix.token_ids[at : at + size])
            if len(keys) == most or not self._is_known(page_name(parent), with_files):
                break
            keys.append(parent)
        return keys

    def _is_known(self, name: bytes, with_files: bool) -> bool:
        is_in_file = with_files and self._disk is not None and self._disk.is_ready(name)
        return is_in_file or self._host(name).is_ready(name)

    def _bytes(self, name: bytes) -> tuple[int, int]:
        """(to be loaded, to be read before)."""
        nbytes = self._sizes[name[:1]]
        return nbytes, 0 if self._host(name).is_ready(name) else nbytes

    def copies(self, salt: str, token_ids: Sequence[int], num_pages: int) -> tuple[list[Copy], dict[int, Copy]]:
        """Find the copies of the pages behind the first num_pages of a prompt, and of states by length. While no step
        is in flight."""
        size, key = self.page_size, self._root(salt)
        pages, states = list[Copy](), dict[int, Copy]()
        for depth in range(len(token_ids) // size):
            key = page_key(key, token_ids[depth * size : (depth + 1) * size])
            if depth >= num_pages:
                page = self._copy(page_name(key), depth)
                if page is None:
                    break
                pages.append(page)
            state = self._copy(state_name(key), depth)
            if state is not None:
                states[(depth + 1) * size] = state
        return pages, states

    def _copy(self, name: bytes, depth: int) -> Copy | None:
        if not self._is_known(name, with_files=True):
            return None
        host = self._host(name)
        return Copy(name, self._depths.get(name, depth), host.slot(name) if host.is_ready(name) else None)

    def load(self, salt: str, parent: int | None, tokens: Sequence[int], page: int) -> None:
        """Have a page filled from host memory before the next step's rows. It is in the tree from now on."""
        self._learn(salt, parent, tokens, page)
        self._load(page_name(self._pages[page].key), self._todo.loads, page)

    def load_state(self, key: bytes, slot: int) -> None:
        """Have a slot filled with the state behind the page of this key before the next step's rows."""
        self._load(state_name(key), self._todo.state_loads, slot)

    def _load(self, name: bytes, todo: list[tuple[int, int]], target: int) -> None:
        host = self._host(name)
        host.pin(name)
        self._todo.pinned.append(name)
        todo.append((host.slot(name), target))

    def started(self, request_id: str, start: PrefixStart, page: int | None) -> None:
        """Note that a run began. page: the last one of its prefix."""
        held = self._held.get(request_id, _Held())
        from_files = sum(page_name(key) in held.fetched for key in start.keys)
        self._counts.disk_hit_len += from_files * self.page_size
        self._counts.host_hit_len += (len(start.keys) - from_files) * self.page_size
        self._counts.recomputed_len += max(held.declined, start.declined) * self.page_size
        if page is not None:
            self._touch(page)
        self.forget(request_id)

    # A request waits.

    def is_held(self, request_id: str) -> bool:
        """Whether `fetch` was called for the request since it came, or last ran."""
        return request_id in self._held

    def awaits(self, request_id: str) -> bool:
        """Whether something is on its way for the request."""
        return request_id in self._held and bool(self._held[request_id].awaited)

    def fetch(self, request_id: str, prefix: Prefix) -> bool:
        """Have files read that the request can begin with, and keep their contents until `started` or `forget`. Returns
        as `awaits`."""
        start = self.choose(prefix, with_files=True)
        held = self._held[request_id] = _Held(declined=start.declined)
        names = [] if start.state is None else [state_name(start.state)]  # pages are of no use without it
        names += map(page_name, start.keys)
        for name in names:
            if name in self._host(name):  # before slots are given to others
                self._hold(held, name)
        for name in names:
            host = self._host(name)
            if name not in host:
                if host.allocate(name, is_pending=True) is None:
                    break
                self._reading.add(name)
                self._todo.reads.append((name, self._depths[name], host.slot(name)))
                self._hold(held, name)
        return bool(held.awaited)

    def _hold(self, held: _Held, name: bytes) -> None:
        host = self._host(name)
        host.pin(name)
        held.names.append(name)
        if not host.is_ready(name):
            held.awaited.add(name)
            held.fetched.add(name)

    def forget(self, request_id: str) -> None:
        """Forget a request that runs or is gone."""
        held = self._held.pop(request_id, None)
        for name in () if held is None else held.names:
            self._host(name).unpin(name)

    # A step is over.

    def commit(self, result: TierResult, num_prefilled: int) -> None:
        """Take in the engine's result of a step. num_prefilled: tokens of its rows, 0 for a step that was not mainly
        prefill."""
        self.rates.prefill.add(num_prefilled, result.row_seconds)
        self.rates.load.add(*result.loaded)
        self.rates.read.add(*result.read)
        self._counts.loaded_bytes += result.loaded[0]
        self._counts.read_bytes += result.read[0]
        if result.found is not None and self._disk is not None:
            self._depths.update((name, depth) for name, depth, _ in result.found)
            self._is_listed = True
            for name in self._disk.fill((name, nbytes) for name, _, nbytes in result.found):
                del self._depths[name]
        for name, is_done in result.writes:
            self._end_write(name, is_done)
        for name, is_done in result.reads:
            self._end_read(name, is_done)

    def _end_write(self, name: bytes, is_done: bool) -> None:
        assert self._disk is not None
        self._writing.remove(name)
        self._host(name).unpin(name)
        if is_done:
            self._disk.written(name)
            self._counts.written_bytes += self.config.file_bytes(name[:1])
        else:
            self._drop_file(name)
            self._counts.num_write_errors += 1

    def _drop_file(self, name: bytes) -> None:
        assert self._disk is not None
        self._disk.drop(name)
        self._depths.pop(name, None)

    def _end_read(self, name: bytes, is_done: bool) -> None:
        self._reading.remove(name)
        host = self._host(name)
        for held in self._held.values():
            if name in held.awaited:
                held.awaited.remove(name)
                if not is_done:
                    held.names.remove(name)
                    host.unpin(name)
        if is_done:
            host.arrived(name)
        else:
            host.failed(name)
            self._drop_file(name)
            self._counts.num_read_errors += 1

    # Looking at it.

    def stats(self) -> TierStats:
        """The figures of the tiers, see TierStats."""
        sizes = self._sizes
        return msgspec.structs.replace(
            self._counts,
            host_bytes=sum(sizes[kind] * len(host) for kind, host in self._hosts.items()),
            max_host_bytes=sum(sizes[kind] * host.num_slots for kind, host in self._hosts.items()),
            disk_bytes=0 if self._disk is None else self._disk.num_bytes,
        )

    def check_integrity(self, pages: set[int]) -> None:
        """Raise AssertionError unless what is known is of these pages, and every pin has its owner."""
        assert self._pages.keys() == pages, "pages of the tree and those known here differ"
        assert self._unstored.keys() <= pages >= self._unstored_states.keys(), "a page that is gone is to be stored"
        pins: dict[bytes, int] = {}
        held = (name for one in self._held.values() for name in one.names)
        for name in itertools.chain(held, self._todo.pinned, self._writing, self._reading):
            pins[name] = pins.get(name, 0) + 1
        for host in self._hosts.values():
            host.check_integrity()
        assert pins == {name: count for host in self._hosts.values() for name, count in host.pins.items()}, "pins"
        if self._disk is not None:
            self._disk.check_integrity()
            assert set(self._disk) == self._depths.keys(), "files without a depth"

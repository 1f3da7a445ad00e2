"""Gives pages to runs and takes them back: the page pool and the prefix tree behind one set of calls.

Knows what a page is the cache of; does not know who runs next, nor steps.

    page is             holders        in the tree
    free                0              no
    private             1              no            being written, or full and not yet committed
    shared              >= 1           yes           full and committed; never written again
    idle                0              yes           given up when nothing is free

    holders of a page in the tree <= holders of the page before it, so an idle page has only idle pages behind it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise

from ktransformers.cache.pages import PagePool
from ktransformers.cache.prefix_tree import PrefixTree
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.kv_offload import KvOffload
from ktransformers.scheduler.prefixes import Copy, Prefix, PrefixStart
from ktransformers.scheduler.sequence import RunningState, Sequence
from ktransformers.scheduler.snapshots import Snapshots
from ktransformers.scheduler.tier_records import TierPlan

__all__ = ["WORTH_WAITING", "Fill", "PageTables"]

TokenIds = Seq[int]

Fill = Callable[[int, Seq[int], Mapping[int, int]], None]
"""Given the index of a prefix's first page that has to be written, the pages from there on, and the slots that states
are to be written to, by length in tokens."""


WORTH_WAITING = 64
"""Tokens of a prefix that others compute now for which a prompt waits: fewer are computed again at once."""


class PageTables:
    """Block tables over the pages that `config` says, shared where has_prefix_cache.

    snapshots: of recurrent layers' states, without which a page's tokens cannot be skipped; None without such layers.
    kv_offload: where pages go besides, None without any.
    """

    def __init__(self, config: SchedulerConfig):
        self.num_pages, self.page_size, self.has_prefix_cache = (
            config.num_pages,
            config.page_size,
            config.has_prefix_cache,
        )
        self.snapshots = Snapshots(config) if config.num_states else None
        tiers = config.tiers if config.has_prefix_cache else None
        self.kv_offload = None if tiers is None else KvOffload(tiers, config.page_size)
        if self.snapshots is not None and self.kv_offload is not None:
            self.snapshots.on_final = self.kv_offload.keep_state
        self.clear()

    def clear(self) -> None:
        """Forget everything: the pages' contents are gone. Runs that hold pages must be thrown away with them."""
        self._pool, self._tree = PagePool(self.num_pages), PrefixTree(self.page_size)
        if self.snapshots is not None:
            self.snapshots.clear()
        if self.kv_offload is not None:
            self.kv_offload.clear()

    @property
    def num_available(self) -> int:
        """Number of pages that can be given out without taking one from a run."""
        return self._pool.num_free + self._tree.num_idle

    @property
    def num_idle(self) -> int:
        return self._tree.num_idle

    @property
    def num_kept(self) -> int:
        """Number of pages with contents: held by runs, or kept for others."""
        return self.num_pages - self._pool.num_free

    def pages_for(self, num_tokens: int) -> int:
        """Count the pages that `num_tokens` positions take."""
        return -(-num_tokens // self.page_size)

    def num_reserved(self, running: Collection[Sequence]) -> int:
        """Count the pages that running sequences still need for the tokens they have."""
        count = 0
        for seq in running:
            assert seq.run is not None, "it does not run"
            count += max(self.pages_for(seq.known_len + seq.run.num_pending) - len(seq.run.block_table), 0)
        return count

    def shared_len(self, seq: Sequence) -> int:
        """Count the leading tokens of a prompt whose pages another sequence of the same prompt can have. 0: none,
        ever."""
        if not self.has_prefix_cache or seq.params.prompt_logprobs is not None:
            return 0
        if self.snapshots is not None:
            return self.snapshots.border(seq.prompt_len)
        return (seq.prompt_len - 1) // self.page_size * self.page_size

    def findable_len(self, seq: Sequence, length: int) -> int:
        """Count those of the first `length` tokens of a prompt that others can skip once it has been computed."""
        if self.snapshots is None:
            return length // self.page_size * self.page_size
        border, interval = self.snapshots.border(seq.prompt_len), self.snapshots.interval
        inside = length // interval * interval if border and interval else 0
        return max(inside, border if border <= length else 0)

    def cached_len(self, seq: Sequence) -> int:
        """Count the tokens that a waiting sequence could skip if it began now, by what the tree has."""
        pages = self._tree.match(seq.request.cache_salt, seq.token_ids, self._max_pages(seq))
        while pages and self.snapshots is not None and pages[-1] not in self.snapshots.slots:
            pages.pop()
        return len(pages) * self.page_size

    def start(self, seq: Sequence, run_id: int, num_reserved: int) -> RunningState | None:
        """Start a run for a waiting sequence, behind the longest prefix in the tree, or the longest snapshot.

        The last token is never taken from the cache: its logits are wanted. None when the known tokens and the one to
        be sampled would not fit beside num_reserved pages that others will need; nothing but the prefix is taken yet.
        """
        room = self.num_available - num_reserved
        if room < 1:
            return None  # at least the last token's page is new
        prefix = self._prefix(seq)
        num_held = sum(not self._tree.is_idle(page) for page in prefix.pages)
        if self.pages_for(seq.known_len + 1) - num_held > room:
            return None  # whatever it begins with
        start = self._start_of(prefix)
        pages = list(prefix.pages[: start.num_pages])
        num_woken = sum(self._tree.is_idle(page) for page in pages)
        if self.pages_for(seq.known_len + 1) - len(pages) + num_woken > room:
            return None
        cached_len = start.num_pages * self.page_size
        run = RunningState(run_id, pages, cached_len, cached_len, start.num_pages)
        loaded = None
        if self.snapshots is not None:
            if start.state is not None:
                loaded = self.snapshots.slots.begin_save()
                assert loaded is not None, "no slot for a state that was to be loaded"
            if not self.snapshots.begin(run, pages[-1] if pages else None, seq.known_len, loaded):
                if loaded is not None:
                    self.snapshots.slots.release(loaded)
                return None
        for page in pages:
            self._acquire(page)
        self._load(seq, pages, start, loaded)
        if self.snapshots is not None and pages:
            self.snapshots.hold(run, pages[-1])  # its first row may be steps away
        return run

    def _max_pages(self, seq: Sequence) -> int:
        """Most pages whose tokens a run of this sequence need not compute."""
        pooling = seq.params.pooling
        if seq.params.prompt_logprobs is not None or (pooling is not None and pooling.needs_all):
            return 0  # logits and hidden states are not cached: the whole prompt is computed
        return (seq.known_len - 1) // self.page_size if self.has_prefix_cache else 0

    def _prefix(self, seq: Sequence) -> Prefix:
        salt, max_pages = seq.request.cache_salt, self._max_pages(seq)
        pages = self._tree.match(salt, seq.token_ids, max_pages)
        if self.snapshots is None:
            return Prefix(salt, seq.token_ids, pages, max_pages)
        slots = self.snapshots.slots
        return Prefix(salt, seq.token_ids, pages, max_pages, slots.__contains__, slots.can_save)

    def _start_of(self, prefix: Prefix) -> PrefixStart:
        if self.kv_offload is not None:
            return self.kv_offload.choose(prefix)
        pages = list(prefix.pages)
        while pages and prefix.has_state is not None and not prefix.has_state(pages[-1]):
            pages.pop()
        return PrefixStart(len(pages))

    def _load(self, seq: Sequence, pages: list[int], start: PrefixStart, state_slot: int | None) -> None:
        """Add what a run begins with and the tree does not have: steps that read it come after the copy."""
        if self.kv_offload is None:
            return
        salt, size = seq.request.cache_salt, self.page_size
        for i in range(len(pages), start.num_pages):
            page, parent, tokens = self._new_page(), pages[-1] if pages else None, seq.token_ids[i * size :][:size]
            self._tree.publish(salt, parent, tokens, page)
            self.kv_offload.load(salt, parent, tokens, page)
            pages.append(page)
        if self.snapshots is not None and start.state is not None and state_slot is not None:
            self.kv_offload.load_state(start.state, state_slot)
            self.snapshots.slots.publish(pages[-1], state_slot)
            self.snapshots.slots.use(pages[-1])
        self.kv_offload.started(seq.request_id, start, pages[-1] if pages else None)

    def awaits_prefix(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a running sequence computes a prefix of this one's prompt now, which is then found.

        Answers to one request (whose prompts are the same object) wait for whichever of them runs, others for those of
        better rank and for what is worth it.
        """
        most = self.shared_len(seq)
        for other in running:
            run = other.run
            if run is None or run.computed_len >= most or other.request.cache_salt != seq.request.cache_salt:
                continue
            if other.request.prompt_ids is seq.request.prompt_ids:
                return True
            if run.computed_len < other.prompt_len - 1 and other.rank < seq.rank:
                common = self.findable_len(other, min(most, seq.common_len(other)))
                if common - run.computed_len < WORTH_WAITING:
                    continue  # before the whole prompt is looked up
                if common - self.cached_len(seq) >= WORTH_WAITING:
                    return True
        return False

    def awaits_tiers(self, seq: Sequence) -> bool:
        """Whether a waiting sequence should wait for pages from files. Has them read when it is first asked."""
        if self.kv_offload is None or not self.kv_offload.has_files:
            return False
        if self.kv_offload.is_held(seq.request_id):
            return self.kv_offload.awaits(seq.request_id)
        return self.kv_offload.fetch(seq.request_id, self._prefix(seq))

    def forget(self, seq: Sequence) -> None:
        """Note that a sequence does not wait any more."""
        if self.kv_offload is not None:
            self.kv_offload.forget(seq.request_id)

    def begin_step(self) -> None:
        """Note that another step is planned."""
        if self.snapshots is not None:
            self.snapshots.slots.begin_step()
        if self.kv_offload is not None:
            self.kv_offload.begin_step(lambda page: None if self.snapshots is None else self.snapshots.slots.slot(page))

    def take_copies(self, *, is_alone: bool) -> TierPlan | None:
        """Return what the step that was planned is to copy. is_alone: it has no rows."""
        return None if self.kv_offload is None else self.kv_offload.take(is_alone=is_alone)

    def grow(self, run: RunningState, num_tokens: int) -> bool:
        """Let the run's pages cover num_tokens. False, and nothing changed, when there are not enough."""
        missing = self.pages_for(num_tokens) - len(run.block_table)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        run.block_table.extend([self._new_page() for _ in range(missing)])
        return True

    def drafts_that_fit(self, run: RunningState, drafts: Seq[int]) -> Seq[int]:
        """Return as many of a run's draft tokens as there are slots for the states in front of them."""
        return drafts if self.snapshots is None else drafts[: self.snapshots.draft_room(run, len(drafts))]

    def shrink(self, run: RunningState) -> None:
        """Take the pages back that cover nothing of the run's plan: of draft tokens that were rejected."""
        while len(run.block_table) > self.pages_for(run.planned_len):
            self._release(run.block_table.pop())
        run.num_told = min(run.num_told, len(run.block_table))

    def _new_page(self) -> int:
        """A page with one holder; there must be one."""
        if not self._pool.num_free:
            page = self._tree.evict()
            self._pool.free(page)
            if self.snapshots is not None:
                self.snapshots.slots.drop(page)
            if self.kv_offload is not None:
                self.kv_offload.evicted(page)
        return self._pool.allocate()

    def publish(self, seq: Sequence, run: RunningState) -> None:
        """Put the pages that committed steps have filled into the tree.

        Two sequences may have computed the same page side by side. The later one then gives up its own: contents are
        bit-identical, and steps in flight that still read the old page run before anyone can overwrite it.
        """
        if not self.has_prefix_cache:
            return
        table, size = run.block_table, self.page_size
        for i in range(run.num_published, run.computed_len // size):
            own, parent = table[i], table[i - 1] if i else None
            tokens = seq.token_ids[i * size : (i + 1) * size]
            page = self._tree.publish(seq.request.cache_salt, parent, tokens, own)
            if page == own and self.kv_offload is not None:
                self.kv_offload.published(seq.request.cache_salt, parent, tokens, page)
            if page != own:
                self._acquire(page)
                self._release(own)
                table[i] = page
                run.num_told = min(run.num_told, i)
            run.num_published = i + 1

    def release(self, run: RunningState) -> None:
        """Take all pages of a run back. Those in the tree stay there, idle, until they are needed."""
        for page in reversed(run.block_table):  # the tree wants the deeper page first
            self._release(page)
        run.block_table.clear()
        if self.snapshots is not None:
            self.snapshots.end(run)

    def find(self, salt: str, token_ids: TokenIds) -> tuple[list[int], dict[int, int]]:
        """Find the pages of the longest known prefix, and the slots of states kept behind some of them, by length in
        tokens."""
        pages = self._tree.match(salt, token_ids, len(token_ids) // self.page_size) if self.has_prefix_cache else []
        ends = {page: (i + 1) * self.page_size for i, page in enumerate(pages)}
        if self.snapshots is None:
            return pages, {}
        kept = self.snapshots.slots
        slots = {ends[page]: kept.slot(page) for page in kept if page in ends}
        return pages, {length: slot for length, slot in slots.items() if slot is not None}

    def find_offloaded(self, salt: str, token_ids: TokenIds, num_pages: int) -> tuple[list[Copy], dict[int, Copy]]:
        """Find what tiers have behind the first num_pages pages, and of states by length. See KvOffload.copies."""
        return ([], {}) if self.kv_offload is None else self.kv_offload.copies(salt, token_ids, num_pages)

    def adopt(self, salt: str, token_ids: TokenIds, state_lens: TokenIds, fill: Fill) -> int:
        """Make a prefix findable whose keys and values come from elsewhere; how many of its tokens are now.

        As many whole pages as can be had without taking one from a run. fill: writes them before anybody can find
        them. state_lens: behind how many tokens there are states, of which the longest are taken.
        """
        if not self.has_prefix_cache:
            return 0
        size = self.page_size
        table = self._tree.match(salt, token_ids, len(token_ids) // size)
        run = RunningState(-1, table, 0, 0, len(table))
        saves: dict[int, int] = {}
        for page in table:
            self._acquire(page)
        try:
            num_pages = min(len(token_ids) // size, len(table) + self.num_available)
            self.grow(run, num_pages * size)
            if self.snapshots is not None:
                saves = self.snapshots.begin_adoption(table, state_lens)
            fill(run.num_published, table[run.num_published :], saves)
            for i in range(run.num_published, num_pages):
                own = token_ids[i * size : (i + 1) * size]
                parent = table[i - 1] if i else None
                self._tree.publish(salt, parent, own, table[i])
                if self.kv_offload is not None:
                    self.kv_offload.published(salt, parent, own, table[i])
            for length in sorted(saves):
                assert self.snapshots is not None
                page, slot = table[length // size - 1], saves.pop(length)
                if self.snapshots.slots.publish(page, slot) and self.kv_offload is not None:
                    self.kv_offload.keep_state(page, slot)
        finally:
            for slot in saves.values():
                assert self.snapshots is not None
                self.snapshots.slots.release(slot)
            for page in reversed(table):
                self._release(page)
        return num_pages * size

    def _acquire(self, page: int) -> None:
        if self._tree.is_idle(page):
            self._tree.mark_used(page)
        self._pool.acquire(page)

    def _release(self, page: int) -> None:
        if not self._pool.release(page):
            return
        if page in self._tree:
            self._tree.mark_idle(page)
        else:
            self._pool.free(page)

    def check_integrity(self, running: Collection[Sequence]) -> None:
        """Raise AssertionError unless the pages are exactly those of these sequences, the tree and the free list."""
        pool, tree = self._pool, self._tree
        pool.check_integrity()
        tree.check_integrity()
        holders: Counter[int] = Counter()
        for seq in running:
            assert seq.run is not None, "a running sequence has no run"
            table, num_published = seq.run.block_table, seq.run.num_published
            assert len(set(table)) == len(table), "a page twice in one block table"
            assert all((page in tree) == (i < num_published) for i, page in enumerate(table)), "published pages"
            if num_published:
                known = seq.request.cache_salt, seq.token_ids[: num_published * self.page_size]
                assert tree.path(table[num_published - 1]) == known, "a page of another prefix"
                assert all(tree.parent(b) == a for a, b in pairwise(table[:num_published])), "path"
            holders.update(table)
        if self.snapshots is not None:
            self.snapshots.check_integrity([seq.run for seq in running if seq.run is not None], set(tree))
        if self.kv_offload is not None:
            self.kv_offload.check_integrity(set(tree))
        for page in range(self.num_pages):
            assert pool.holders(page) == holders[page], "holders that are not running"
            assert not pool.is_free(page) or page not in tree, "a free page is in the tree"
            assert pool.is_free(page) or page in tree or holders[page] == 1, "a leaked or wrongly shared page"
            assert page not in tree or tree.is_idle(page) == (holders[page] == 0), "idle list"

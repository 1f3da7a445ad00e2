"""Plans how many tokens a cache is to hold, and in which pages, for one sequence or for many that share them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ktransformers.cache.paged import LayerShape, Lenders, PagedCache, state_shapes
from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.engine.plan.draft_steps import why_drafts_run_eagerly
from ktransformers.engine.plan.tier_plan import check_tiers
from ktransformers.errors import UnsupportedError
from ktransformers.models.facts import ModelFacts
from ktransformers.optimize.plan import Plan
from ktransformers.scheduler.config import MAX_DRAFT_STATES

__all__ = [
    "DEFAULT_CACHE_LEN",
    "CachePlan",
    "cache_len_of",
    "num_snapshots",
]

logger = logging.getLogger(__name__)

DEFAULT_CACHE_LEN = 8192
"""Tokens of a sequence that the cache has room for when --cache_lens is not given, if the model's context is that
long."""

PAGE_SIZE, GPU_PAGE_SIZE, SHARED_PAGE_SIZE = 16, 256, 64
"""Positions of a page for one sequence, on GPUs at most, and for several: what a next turn computes again, against
longer tables."""

GPU_PAGES = 64
"""Pages of one sequence on GPUs, unless they would be larger than GPU_PAGE_SIZE: for longer tables there are kernels of
several widths to make ready, and what a turn computes again takes a GPU no time."""

PAGED_SHARE = 0.25
"""Of the free memory, what the pages may take when --cache_lens is not given."""

SNAPSHOT_SHARE = 0.5
"""Of the bytes of keys and values, what snapshots of recurrent layers' states may take; see below for the least."""

LEAST_SNAPSHOTS, MOST_SNAPSHOTS = 4, 64
"""A turn of a chat leaves two that the next one may begin from, and needs a third while it runs."""


def cache_len_of(config: EngineConfig, facts: ModelFacts) -> int:
    """Return how many tokens a cache for one sequence holds: what the user says, else up to DEFAULT_CACHE_LEN; never
    more than the model takes."""
    context = facts.context_len
    wanted = config.cache_lens or DEFAULT_CACHE_LEN
    if context is None or wanted <= context:
        return wanted
    if config.cache_lens:
        message = "--cache_lens %d: the model takes %d tokens, prompt and answer together; the cache holds as many"
        logger.warning(message, config.cache_lens, context)
    return context


def num_snapshots(shapes: Sequence[LayerShape], num_slots: int, config: EngineConfig) -> int:
    """Return how many states beside those of running sequences a cache of so many positions is to keep; 0 for no prefix
    cache.

    By numbers that a restarted engine is given again: never by what memory is free.
    """
    nbytes = sum(state.nbytes for state in state_shapes(shapes).values())
    if not nbytes or not config.prefix_cache:
        return 0
    fitting = int(SNAPSHOT_SHARE * PagedCache.size(shapes, num_slots)) // nbytes
    return min(max(fitting, LEAST_SNAPSHOTS), MOST_SNAPSHOTS)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The plan of a PagedCache of --cache_lens tokens that is not there yet.

    max_batch_size: most sequences of a step. One has the whole cache, as long as it may be; several share it. size:
    positions of a page; 0: as many as suit the model. has_states: layers are recurrent, here or in other processes.
    states: slots for states, where another process has decided how many. slots: positions in all, where another cache
    has as many. longest: tokens of a sequence, by which pages
    on GPUs are chosen.
    """

    max_batch_size: int = 1
    size: int = 0
    has_states: bool = False
    states: int | None = None
    slots: int | None = None
    longest: int = DEFAULT_CACHE_LEN

    @classmethod
    def of(cls, opened: OpenedModel, max_batch_size: int = 1, page_size: int = 0) -> CachePlan:
        """Plan the cache of a model that is open. page_size: see `size`."""
        wanted = opened.config.cache_lens or DEFAULT_CACHE_LEN
        longest = min(wanted, opened.facts.context_len or wanted)
        return cls(max_batch_size, page_size, opened.facts.has_states, longest=longest)

    def page_size(self, shapes: Sequence[LayerShape]) -> int:
        """Number of positions of a page: a multiple of what an indexer of the model chooses together, unless it is
        given."""
        if self.size:
            return self.size
        least = PAGE_SIZE if self.max_batch_size == 1 else SHARED_PAGE_SIZE
        if self.max_batch_size == 1 and any(shape.place != "cpu" for shape in shapes):
            while least < GPU_PAGE_SIZE and least * GPU_PAGES < self.longest:
                least *= 2
        return math.lcm(least, *(shape.index_pool for shape in shapes))

    def num_slots(self, opened: OpenedModel, plan: Plan, shapes: Sequence[LayerShape]) -> int:
        """Number of positions, in whole pages: --cache_lens, or when that is 0, for max_batch_size long sequences, if
        they fit comfortably. plan: without a cache."""
        if self.slots is not None:
            return self.slots
        size, asked = self.page_size(shapes), opened.config.cache_lens
        one = cache_len_of(opened.config, opened.facts)
        if self.max_batch_size == 1:
            return -(-one // size) * size
        if asked:
            return -(-asked // size) * size
        num_tokens = one * self.max_batch_size
        sizes = PagedCache.size_by_place(shapes, 1).items()
        fitting = min(
            (
                int(PAGED_SHARE * max(plan.capacity.get(place, 0) - plan.weight_bytes.get(place, 0), 0) / nbytes)
                for place, nbytes in sizes
                if nbytes
            ),
            default=num_tokens,
        )
        chosen = max(min(num_tokens, fitting), size)
        if chosen < num_tokens:
            logger.info("--cache_lens: %d tokens, a quarter of the free memory; set it to have more", chosen)
        return chosen // size * size

    def num_states(self, shapes: Sequence[LayerShape], num_slots: int, config: EngineConfig) -> int:
        """Number of slots for states of recurrent layers; 0 without such layers."""
        is_recurrent = bool(state_shapes(shapes))
        why_eager = why_drafts_run_eagerly(config, {shape.place for shape in shapes})
        drafts = min(config.max_drafts(why_eager), MAX_DRAFT_STATES)
        if self.states is not None:
            if is_recurrent and not self.states:
                raise UnsupportedError("layers keep a state, and the last stage, which counts them, has none of them")
            return self.states
        if is_recurrent:
            return self.max_batch_size + drafts + num_snapshots(shapes, num_slots, config)
        if not self.has_states:
            return 0
        return (
            self.max_batch_size + drafts + (LEAST_SNAPSHOTS if config.prefix_cache else 0)
        )  # what they take is not known here

    def check_tiers(self, shapes: Sequence[LayerShape], config: EngineConfig) -> None:
        """Raise ConfigError when the tiers below the cache are too small for it."""
        check_tiers(shapes, self.page_size(shapes), config)

    def make(
        self, shapes: Sequence[LayerShape], num_slots: int, num_states: int, lenders: Lenders | None = None
    ) -> PagedCache:
        """Make the cache itself. lenders: see PagedCache."""
        size = self.page_size(shapes)
        pages = num_slots // size, size
        return PagedCache(shapes, *pages, num_states, has_states=self.has_states, lenders=lenders)

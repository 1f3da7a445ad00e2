"""Plans how many tokens a cache is to hold, and in which pages: one sequence in one page, or many that share pages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from typing_extensions import override

from ktransformers.cache.paged import LayerShape, PagedCache, state_shapes
from ktransformers.cache.static import StaticCache
from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.engine.plan.tier_plan import check_tiers
from ktransformers.errors import UnsupportedError
from ktransformers.models.facts import ModelFacts
from ktransformers.optimize.plan import Plan

__all__ = [
    "DEFAULT_CACHE_LEN",
    "CachePlan",
    "OneSequence",
    "SharedPages",
    "cache_len_of",
    "num_snapshots",
]

logger = logging.getLogger(__name__)

DEFAULT_CACHE_LEN = 8192
"""Tokens of the static cache when --cache_lens is not given, if the model's context is that long."""

PAGED_SHARE = 0.25
"""Of the free memory, what the pages may take when --cache_lens is not given."""

SNAPSHOT_SHARE = 0.5
"""Of the bytes of keys and values, what snapshots of recurrent layers' states may take; see below for the least."""

LEAST_SNAPSHOTS, MOST_SNAPSHOTS = 4, 64
"""A turn of a chat leaves two that the next one may begin from, and needs a third while it runs."""

CacheT_co = TypeVar("CacheT_co", bound=PagedCache, covariant=True)


def cache_len_of(config: EngineConfig, facts: ModelFacts) -> int:
    """Number of tokens of a static cache: what the user says, else up to DEFAULT_CACHE_LEN; never more than the model
    takes."""
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


class CachePlan(Protocol[CacheT_co]):
    """The plan of a cache that is not there yet: its pages and slots."""

    @property
    def max_batch_size(self) -> int:
        """The most sequences of a decode step."""
        ...

    def num_slots(self, opened: OpenedModel, plan: Plan, shapes: Sequence[LayerShape]) -> int:
        """Number of positions that the cache holds, for a plan that has no cache yet and its layers' shapes."""
        ...

    def page_size(self, num_slots: int) -> int:
        """Number of positions of a page."""
        ...

    def num_states(self, shapes: Sequence[LayerShape], num_slots: int, config: EngineConfig) -> int:
        """Number of slots for states of recurrent layers; 0 without such layers."""
        return self.max_batch_size + num_snapshots(shapes, num_slots, config) if state_shapes(shapes) else 0

    def check_tiers(self, shapes: Sequence[LayerShape], config: EngineConfig) -> None:
        """Raise ConfigError when the tiers below the cache are too small for it."""
        return

    def make(self, shapes: Sequence[LayerShape], num_slots: int, num_states: int) -> CacheT_co:
        """Make the cache itself."""
        ...


@dataclass(frozen=True, slots=True)
class OneSequence(CachePlan[StaticCache]):
    """A StaticCache of --cache_lens tokens."""

    max_batch_size: int = 1

    @override
    def num_slots(self, opened: OpenedModel, plan: Plan, shapes: Sequence[LayerShape]) -> int:
        return cache_len_of(opened.config, opened.facts)

    @override
    def page_size(self, num_slots: int) -> int:
        return num_slots

    @override
    def make(self, shapes: Sequence[LayerShape], num_slots: int, num_states: int) -> StaticCache:
        return StaticCache(shapes, num_slots, num_states)


@dataclass(frozen=True, slots=True)
class SharedPages(CachePlan[PagedCache]):
    """A PagedCache of --cache_lens tokens, in pages of `size`, that up to max_batch_size sequences share.

    has_states: layers are recurrent, here or in other processes. states: slots for states, where another process has
    decided how many.
    """

    size: int
    max_batch_size: int
    has_states: bool = False
    states: int | None = None

    def num_slots(self, opened: OpenedModel, plan: Plan, shapes: Sequence[LayerShape]) -> int:
        """Number of positions: --cache_lens, or when that is 0, for max_batch_size long sequences, if they fit
        comfortably."""
        asked = opened.config.cache_lens
        if asked:
            return -(-asked // self.size) * self.size
        num_tokens = cache_len_of(opened.config, opened.facts) * self.max_batch_size
        sizes = PagedCache.size_by_place(shapes, 1).items()
        fitting = min(
            (
                int(PAGED_SHARE * max(plan.capacity.get(place, 0) - plan.weight_bytes.get(place, 0), 0) / nbytes)
                for place, nbytes in sizes
                if nbytes
            ),
            default=num_tokens,
        )
        chosen = max(min(num_tokens, fitting), self.size)
        if chosen < num_tokens:
            logger.info("--cache_lens: %d tokens, a quarter of the free memory; set it to have more", chosen)
        return chosen // self.size * self.size

    @override
    def page_size(self, num_slots: int) -> int:
        return self.size

    @override
    def num_states(self, shapes: Sequence[LayerShape], num_slots: int, config: EngineConfig) -> int:
        if self.states is not None:
            if state_shapes(shapes) and not self.states:
                raise UnsupportedError("layers keep a state, and the last stage, which counts them, has none of them")
            return self.states
        if not self.has_states or state_shapes(shapes):  # a class with slots is made twice: super() knows the first
            return super(SharedPages, self).num_states(shapes, num_slots, config)
        return self.max_batch_size + (LEAST_SNAPSHOTS if config.prefix_cache else 0)  # what they take is not known here

    @override
    def check_tiers(self, shapes: Sequence[LayerShape], config: EngineConfig) -> None:
        check_tiers(shapes, self.size, config)

    @override
    def make(self, shapes: Sequence[LayerShape], num_slots: int, num_states: int) -> PagedCache:
        return PagedCache(shapes, num_slots // self.size, self.size, num_states, has_states=self.has_states)

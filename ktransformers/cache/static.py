"""A cache for one sequence of bounded length: one page that holds all its positions."""

from __future__ import annotations

from collections.abc import Sequence

from ktransformers.cache.paged import LayerShape, PagedCache

__all__ = ["LayerShape", "StaticCache"]


class StaticCache(PagedCache):
    """Cache of one sequence of at most max_len tokens: keys and values. Its state is in slot 0, snapshots in the
    others.
    """

    def __init__(self, shapes: Sequence[LayerShape], max_len: int, num_states: int = 1):
        super().__init__(shapes, num_pages=1, page_size=max_len, num_states=num_states)

    @property
    def max_len(self) -> int:
        return self.page_size

"""Counts the holders of each page of the K/V cache: a free list and reference counts. Knows no tensors, tokens,
requests.

Every page is in exactly one place, and `holders` says how many sequences have it in their block table:

    place        holders   comes from             goes to
    free list    0         free()                 allocate()
    in use       >= 1      allocate(), acquire()  release(): the last holder leaves
    set aside    0         release()              acquire(): held again; free(): given up

"Set aside" pages keep their contents: the prefix tree lists them (`cache/prefix_tree.py`). Without one, whoever calls
release() calls free() next.
"""

from __future__ import annotations

__all__ = ["PagePool"]


class PagePool:
    """Pool of the cache's pages 0 .. num_pages - 1. Calls that break the table above raise RuntimeError: they are bugs
    of the caller.
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._is_free = [True] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the end is given out first: a fresh pool starts with page 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        """Return how many block tables hold this page."""
        return self._holders[page]

    def is_free(self, page: int) -> bool:
        """Whether no block table holds the page, nor the tree."""
        return self._is_free[page]

    def allocate(self) -> int:
        """Take a free page and return it, now with one holder."""
        if not self._free:
            raise RuntimeError("no free page: free one before allocating")
        page = self._free.pop()
        self._is_free[page] = False
        self._holders[page] = 1
        return page

    def acquire(self, page: int) -> None:
        """Add a holder to a page that is in use or set aside."""
        if self._is_free[page]:
            raise RuntimeError(f"page {page} is free: its contents belong to nobody")
        self._holders[page] += 1

    def release(self, page: int) -> bool:
        """Remove a holder of a page. True when it was the last one: the page is now set aside."""
        if self._holders[page] < 1:
            raise RuntimeError(f"page {page} has no holder to release it")
        self._holders[page] -= 1
        return self._holders[page] == 0

    def free(self, page: int) -> None:
        """Return a page to the free list; its contents are lost."""
        if self._is_free[page] or self._holders[page]:
            raise RuntimeError(f"page {page} is free already or has {self._holders[page]} holders")
        self._is_free[page] = True
        self._free.append(page)

    def check_integrity(self) -> None:
        """Raise AssertionError when the free list and the counts disagree."""
        assert sorted(self._free) == [page for page, is_free in enumerate(self._is_free) if is_free], "free list"
        assert all(count >= 0 for count in self._holders), "negative holders"
        assert not any(self._holders[page] for page in self._free), "a free page has holders"

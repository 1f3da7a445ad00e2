"""Finds the pages that hold the keys and values of a prefix: a radix tree with one full page per edge. Ids only, no
tensors.

    roots[cache_salt] ── (t0 .. t3) page 7 ── (t4 .. t7) page 2 ── ...        page_size 4
                                         └── (u4 .. u7) page 5

A page's contents depend on its own tokens and on all before them, so the path from the root is the page's name. Tokens
are compared, not only hashed: there are no collisions to trust. Salts never meet: each has a root of its own.

A page whose last holder left is *idle*: listed for eviction, its contents still good. Why eviction needs no search for
leaves: a sequence that holds a page holds the whole path to it, and gives its pages back from the last to the first. So
of two idle pages on one path the deeper one is listed first, and the oldest idle page never has children.

    node is    in the tree   idle list   may be matched   may be evicted
    used       yes           no          yes              no
    idle       yes           yes         yes              yes, oldest release first

Who holds a page, and how often, is `cache/pages.py`'s business; the caller reports the first holder and the last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

__all__ = ["PrefixTree"]

_NO_PAGE = -1


class _Node:
    """One page. The root of a salt has no page, no tokens and no parent."""

    __slots__ = ("children", "page", "parent", "salt", "tokens")

    def __init__(self, salt: str, parent: _Node | None, tokens: tuple[int, ...], page: int):
        self.salt, self.parent, self.tokens, self.page = salt, parent, tokens, page
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixTree:
    """Radix tree that finds, publishes and evicts full pages of page_size tokens."""

    def __init__(self, page_size: int):
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self._roots: dict[str, _Node] = {}
        self._nodes: dict[int, _Node] = {}
        self._idle: OrderedDict[int, _Node] = OrderedDict()  # oldest release first

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    @property
    def num_idle(self) -> int:
        """Number of pages without a holder: those that eviction can free."""
        return len(self._idle)

    def match(self, salt: str, token_ids: Sequence[int], max_pages: int) -> list[int]:
        """Return the pages that hold the longest known prefix of token_ids, at most max_pages of them. Changes
        nothing.
        """
        pages: list[int] = []
        node = self._roots.get(salt)
        if node is None:
            return pages
        size = self.page_size
        for start in range(0, min(max_pages, len(token_ids) // size) * size, size):
            node = node.children.get(tuple(token_ids[start : start + size]))
            if node is None:
                break
            pages.append(node.page)
        return pages

    def publish(self, salt: str, parent: int | None, tokens: Sequence[int], page: int) -> int:
        """Make a fully written page findable, behind the page `parent` (None: it is a prompt's first page).

        tokens: the page's own page_size tokens. Returns the page that holds them from now on: `page`, or another one
        that was there before; then `page` stays outside of the tree, and the caller should hold the other one instead.
        """
        key = tuple(tokens)
        if len(key) != self.page_size or page in self._nodes:
            raise RuntimeError(f"page {page} with {len(key)} tokens: partial, or published before")
        node = self._root(salt) if parent is None else self._nodes[parent]
        known = node.children.get(key)
        if known is not None:
            return known.page
        self._nodes[page] = node.children[key] = _Node(salt, node, key, page)
        return page

    def _root(self, salt: str) -> _Node:
        return self._roots.setdefault(salt, _Node(salt, None, (), _NO_PAGE))

    def mark_idle(self, page: int) -> None:
        """Mark a page as idle: its last holder left. On one path, call for the deeper page first."""
        self._idle[page] = self._nodes[page]

    def mark_used(self, page: int) -> None:
        """Mark an idle page as used: it has a holder again."""
        del self._idle[page]

    def is_idle(self, page: int) -> bool:
        """Whether the page is in the tree and no sequence uses it."""
        return page in self._idle

    def evict(self) -> int:
        """Forget the page that has been idle for longest, and return it."""
        page, node = self._idle.popitem(last=False)
        parent = node.parent
        assert parent is not None, "roots are never idle"
        assert not node.children, "the oldest idle page is a leaf"
        del self._nodes[page], parent.children[node.tokens]
        if parent.page == _NO_PAGE and not parent.children:
            del self._roots[node.salt]  # or every salt ever seen would stay in memory
        return page

    def path(self, page: int) -> tuple[str, list[int]]:
        """Return (salt, token ids from the first position to the end of this page): what a page is the cache of."""
        node: _Node | None = self._nodes[page]
        pieces: list[tuple[int, ...]] = []
        salt = ""
        while node is not None:
            pieces.append(node.tokens)
            salt, node = node.salt, node.parent
        return salt, [token for piece in reversed(pieces) for token in piece]

    def parent(self, page: int) -> int | None:
        """Return the page before this one, None for a first page."""
        node = self._nodes[page].parent
        return None if node is None or node.page == _NO_PAGE else node.page

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    def check_integrity(self) -> None:
        """Raise AssertionError when nodes, roots and the idle list disagree."""
        reached = {}
        stack = list(self._roots.values())
        assert all(root.children for root in stack), "an empty root was kept"
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                assert (child.parent, child.tokens, child.salt) == (node, key, node.salt), "broken edge"
                assert len(key) == self.page_size, "a partial page is in the tree"
                reached[child.page] = child
                stack.append(child)
        assert reached == self._nodes, "pages of the index and of the tree differ"
        place = {page: i for i, page in enumerate(self._idle)}
        for page, i in place.items():
            assert self._idle[page] is self._nodes[page], "an idle page is not in the tree"
            for child in self._nodes[page].children.values():
                assert place.get(child.page, i) < i, "an idle page would be evicted before its children"

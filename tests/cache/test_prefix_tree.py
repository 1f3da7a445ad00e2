"""The prefix tree: longest prefixes, salts apart, oldest release first, leaves before their parents."""

from __future__ import annotations

import pytest

from ktransformers.cache.prefix_tree import PrefixTree


def chain(tree: PrefixTree, salt: str, token_ids: list[int], pages: list[int]) -> None:
    """Publish token_ids page by page."""
    parent = None
    for i, page in enumerate(pages):
        parent = tree.publish(salt, parent, token_ids[2 * i : 2 * i + 2], page)


@pytest.fixture
def tree() -> PrefixTree:
    """1 2 | 3 4 | 5 6 in pages 10, 11, 12, and a branch 1 2 | 9 9 in page 13."""
    tree = PrefixTree(2)
    chain(tree, "", [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert tree.publish("", 10, [9, 9], 13) == 13
    tree.check_integrity()
    return tree


@pytest.mark.parametrize(
    ("token_ids", "max_pages", "pages"),
    [
        ([1, 2, 3, 4, 5, 6, 7], 9, [10, 11, 12]),
        ([1, 2, 3, 4, 5, 6], 2, [10, 11]),  # a limit
        ([1, 2, 3, 4, 5], 9, [10, 11]),  # a page that is not full
        ([1, 2, 9, 9, 5, 6], 9, [10, 13]),  # the other branch, and then nothing
        ([1, 2, 3, 5], 9, [10]),  # differs within a page
        ([3, 4], 9, []),  # tokens known, at another place
        ([1], 9, []),
        ([], 9, []),
    ],
)
def test_match(tree: PrefixTree, token_ids: list[int], max_pages: int, pages: list[int]) -> None:
    assert tree.match("", token_ids, max_pages) == pages


def test_salts_do_not_meet(tree: PrefixTree) -> None:
    assert tree.match("other", [1, 2, 3, 4], 9) == []
    chain(tree, "other", [1, 2, 3, 4], [20, 21])
    assert tree.match("other", [1, 2, 3, 4, 5, 6], 9) == [20, 21]
    assert tree.path(21) == ("other", [1, 2, 3, 4])
    assert tree.path(12) == ("", [1, 2, 3, 4, 5, 6])
    tree.check_integrity()


def test_equal_hashes_are_not_equal_tokens() -> None:
    assert hash((-1, 0)) == hash((-2, 0))  # so these two keys fall into one bucket
    tree = PrefixTree(2)
    tree.publish("", None, [-1, 0], 1)
    assert tree.match("", [-2, 0], 1) == []
    assert tree.publish("", None, [-2, 0], 2) == 2
    assert tree.match("", [-1, 0], 1) == [1]


def test_the_first_publisher_wins(tree: PrefixTree) -> None:
    assert tree.publish("", 10, [3, 4], 30) == 11
    assert 30 not in tree
    assert tree.parent(11) == 10
    assert tree.parent(10) is None
    assert len(tree) == 4


def test_partial_and_repeated_pages_are_refused(tree: PrefixTree) -> None:
    with pytest.raises(RuntimeError, match="partial"):
        tree.publish("", None, [1], 40)
    with pytest.raises(RuntimeError, match="published before"):
        tree.publish("", None, [7, 7], 10)
    with pytest.raises(ValueError, match="page_size"):
        PrefixTree(0)


def test_eviction_takes_the_oldest_release_and_leaves_first(tree: PrefixTree) -> None:
    for page in (12, 11):  # one sequence left; another one still holds 10 and 13
        tree.mark_idle(page)
    tree.check_integrity()
    tree.mark_used(11)  # matched again, up to page 11
    for page in (13, 11, 10):
        tree.mark_idle(page)
    tree.check_integrity()
    assert tree.num_idle == 4
    assert [tree.evict() for _ in range(4)] == [12, 13, 11, 10]
    assert len(tree) == 0
    assert tree.match("", [1, 2], 9) == []
    assert not tree._roots  # a salt that has no pages takes no memory
    tree.check_integrity()


def test_integrity_sees_a_parent_that_would_go_first(tree: PrefixTree) -> None:
    for page in (10, 13, 12, 11):
        tree.mark_idle(page)
    with pytest.raises(AssertionError, match="before its children"):
        tree.check_integrity()

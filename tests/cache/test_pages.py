"""The page pool: every page in one place, and misuse is an error."""

from __future__ import annotations

import pytest

from ktransformers.cache.pages import PagePool


def test_life_of_a_page() -> None:
    pool = PagePool(2)
    first, second = pool.allocate(), pool.allocate()
    assert (first, second, pool.num_free) == (0, 1, 0)
    pool.acquire(first)
    assert pool.holders(first) == 2
    assert not pool.release(first)
    assert pool.release(first)  # the last holder: set aside, not free
    assert pool.num_free == 0
    pool.acquire(first)  # its contents are still there
    assert pool.release(first)
    pool.free(first)
    assert pool.is_free(first)
    assert not pool.is_free(second)
    assert pool.allocate() == first
    pool.check_integrity()


def test_misuse_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PagePool(0)
    pool = PagePool(1)
    with pytest.raises(RuntimeError, match="is free"):
        pool.acquire(0)
    with pytest.raises(RuntimeError, match="no holder"):
        pool.release(0)
    with pytest.raises(RuntimeError, match="is free"):
        pool.free(0)
    page = pool.allocate()
    with pytest.raises(RuntimeError, match="no free page"):
        pool.allocate()
    with pytest.raises(RuntimeError, match="1 holders"):
        pool.free(page)
    pool.check_integrity()


def test_integrity_sees_damage() -> None:
    pool = PagePool(2)
    pool._free.append(pool.allocate())
    with pytest.raises(AssertionError):
        pool.check_integrity()

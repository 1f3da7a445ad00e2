"""Sizes are worked by hand; the latent cache's values must be the very bytes of its keys."""

from __future__ import annotations

from ktransformers.cache.paged import PagedCache
from ktransformers.cache.state import StateShape
from ktransformers.cache.static import LayerShape, StaticCache


def test_sizes() -> None:
    gqa, latent = LayerShape(2, 64, 32), LayerShape(1, 576, 512, is_latent=True)
    assert gqa.nbytes(10) == 10 * 2 * (64 + 32) * 4
    assert latent.nbytes(10) == 10 * 576 * 4
    cache = StaticCache([gqa, latent], 10)
    assert cache.nbytes == StaticCache.size([gqa, latent], 10) == 10 * (2 * 96 + 576) * 4
    allocated = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for i in (0, 1) for t in cache.layer(i)}
    assert sum(allocated.values()) == cache.nbytes


def test_latent_values_are_the_head_of_the_keys() -> None:
    keys, values = StaticCache([LayerShape(1, 6, 4, is_latent=True)], 3).layer(0)
    keys[1, 0] = 7
    assert values.shape == (3, 1, 4)
    assert values[1, 0].tolist() == [7, 7, 7, 7]


def test_all_tensors_hold_all_bytes_once() -> None:
    """Of a layer of its own, one that shares it, a latent one with an indexer, and a recurrent one."""
    state = StateShape({"conv": (3, 8), "recurrent": (2, 4, 4)})
    shapes = [
        LayerShape(2, 8, 4),
        LayerShape(2, 8, 4, shares=0),
        LayerShape(1, 12, 8, is_latent=True, index_dim=6),
        LayerShape.without_pages(state),
    ]
    cache = PagedCache(shapes, num_pages=3, page_size=4, num_states=2)
    found = cache.tensors()
    assert list(found) == ["0.keys", "0.values", "2.keys", "2.index_keys"]
    assert {len(tensor) for tensor in found.values()} == {cache.num_slots}
    assert cache.states is not None
    states = cache.states.tensors()
    assert list(states) == ["3.conv", "3.recurrent"]
    assert sum(one.nbytes for one in (*found.values(), *states.values())) == cache.nbytes

"""Sizes are worked by hand; the latent cache's values must be the very bytes of its keys."""

from __future__ import annotations

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

"""States of recurrent layers: shapes, bytes, slots."""

from __future__ import annotations

import pytest
import torch

from ktransformers.cache.paged import LayerShape, PagedCache
from ktransformers.cache.state import StateCache, StateShape
from ktransformers.cache.static import StaticCache

MIXED = StateShape({"conv": (3, 10), "recurrent": (2, 4, 5)})


def test_layers_keep_pages_or_a_state_or_nothing() -> None:
    shapes = [LayerShape(2, 8, 8), LayerShape.without_pages(MIXED), LayerShape.without_pages()]
    cache = PagedCache(shapes, num_pages=3, page_size=4, num_states=5)
    assert [shape.has_pages for shape in shapes] == [True, False, False]
    assert cache.states is not None
    assert {name: tuple(part.shape) for name, part in cache.states.layer(1).items()} == {
        "conv": (5, 3, 10),
        "recurrent": (5, 2, 4, 5),
    }
    assert cache.nbytes == 4 * (12 * 2 * 16) + 4 * 5 * (30 + 40)
    assert cache.layer(2)[0].numel() == 0
    with pytest.raises(KeyError):
        cache.states.layer(0)


def test_sizes_by_place() -> None:
    shapes = {0: MIXED, 3: StateShape({"conv": (1, 2)}, "cuda:0"), 4: MIXED}
    assert StateCache.size_by_place(shapes, 3) == {"cpu": 3 * 2 * 280, "cuda:0": 3 * 8}


def test_a_model_without_recurrent_layers_has_no_states() -> None:
    cache = StaticCache([LayerShape(1, 2, 2)], 4, num_states=7)
    assert (cache.states, cache.num_states) == (None, 0)
    with pytest.raises(ValueError, match="at least one slot"):
        StateCache({0: MIXED}, 0)


def test_states_are_zero_and_fp32() -> None:
    states = StateCache({0: MIXED}, 2).layer(0)
    assert all(part.dtype is torch.float32 and not part.any() for part in states.values())

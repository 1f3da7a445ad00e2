"""Layers in proportion to free memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ktransformers.optimize.layer_devices import spread_layers


def test_by_hand() -> None:
    assert spread_layers(48, {"cuda:0": 24, "cuda:1": 24}) == {0: "cuda:0", 24: "cuda:1"}
    assert spread_layers(61, {"cuda:0": 8, "cuda:1": 24, "cuda:2": 0}) == {0: "cuda:0", 15: "cuda:1"}
    assert spread_layers(2, {"cuda:0": 100, "cuda:1": 1}) == {0: "cuda:0"}
    assert spread_layers(1, {"cuda:0": 1, "cuda:1": 1, "cuda:2": 2}) == {0: "cuda:2"}
    assert spread_layers(0, {"cuda:0": 1}) == {}


@given(st.integers(1, 100), st.lists(st.integers(0, 1 << 40), min_size=1, max_size=8))
def test_shares_are_off_by_less_than_a_layer(num_layers: int, free: list[int]) -> None:
    starts = spread_layers(num_layers, {f"cuda:{i}": nbytes for i, nbytes in enumerate(free)})
    if not sum(free):
        assert starts == {}
        return
    assert min(starts) == 0
    ends = [*sorted(starts)[1:], num_layers]
    for first, end in zip(sorted(starts), ends, strict=True):
        exact = num_layers * free[int(starts[first][5:])] / sum(free)
        assert abs(end - first - exact) <= 1

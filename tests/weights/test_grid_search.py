"""IQ1, IQ2 and IQ3: near what all scales with all entries of a grid would give, and signs as the formats want them."""

from __future__ import annotations

import gguf.quants
import numpy as np
import pytest

from ktransformers.kernels.types import QuantType as T
from ktransformers.weights.quantize.grid_books import books_of
from ktransformers.weights.quantize.grid_search import GRID_TYPES
from ktransformers.weights.quantize.write import quantize

SUBS = {T.IQ2_XXS: 32, T.IQ2_XS: 16, T.IQ2_S: 16, T.IQ3_XXS: 32, T.IQ3_S: 32, T.IQ1_S: 32, T.IQ1_M: 16}
EVEN = (T.IQ2_XXS, T.IQ2_XS, T.IQ3_XXS)
_GRIDS = {T.IQ1_M: gguf.quants.IQ1_S, **{t: getattr(gguf.quants, t.name) for t in GRID_TYPES if t is not T.IQ1_M}}

Array = np.ndarray


def weights(rows: int = 2) -> Array:
    return np.random.default_rng(3).standard_normal((rows, 256)).astype(np.float32) * np.float32(0.02)


def grid_of(qtype: T) -> Array:
    _GRIDS[qtype].init_grid()
    grid = np.asarray(_GRIDS[qtype].grid, dtype=np.float64)
    return grid.reshape(-1, grid.shape[-1])


def costs(x: Array, w: Array, values: Array) -> Array:
    """[..., n] weighted squared errors of x [..., D] against values [n, D], all of them."""
    cross, square = (w * x) @ values.T, w @ (values**2).T
    return (w * x * x).sum(-1)[..., None] - 2 * cross + square


def best_signed(x: Array, w: Array, values: Array, is_even: bool) -> Array:
    """The least error of octets x [n, 8] over entries and signs."""
    size, dims = np.abs(x), values.shape[1]
    parts = size.reshape(-1, 8 // dims, dims)
    parts_w = w.reshape(parts.shape)
    plain = costs(parts, parts_w, values)
    if not is_even:
        return plain.min(-1).sum(-1)
    # With one sign the other way: its product counts twice against the entry.
    flipped = (plain[..., None] + 4 * (parts_w * parts)[..., None, :] * values).min((-1, -2))
    plain = plain.min(-1)
    one_flip = (plain.sum(-1)[:, None] - plain + flipped).min(-1)
    return np.where((x < 0).sum(1) % 2 == 1, one_flip, plain.sum(-1))


def exhaustive(values: Array, importance: Array, qtype: T, scales: Array) -> Array:
    """The least error of every sub-block with the best of `scales`, in shares of its root mean square."""
    sub, grid = SUBS[qtype], grid_of(qtype)
    x = values.reshape(-1, sub).astype(np.float64)
    w = np.broadcast_to(importance, values.shape).reshape(-1, sub).astype(np.float64)
    rms = np.sqrt((x * x).mean(1))
    best = np.full(len(x), np.inf)
    for scale in scales:
        y = x / (rms * scale)[:, None]
        if qtype in (T.IQ1_S, T.IQ1_M):
            both = [costs(y.reshape(-1, 8), w.reshape(-1, 8), grid + d).min(-1) for d in (0.125, -0.125)]
            by_block = np.stack([one.reshape(len(x), -1) for one in both])
            error = by_block.sum(-1).min(0) if qtype is T.IQ1_S else by_block.min(0).sum(-1)
        else:
            octets = best_signed(y.reshape(-1, 8), w.reshape(-1, 8), grid, qtype in EVEN)
            error = octets.reshape(len(x), -1).sum(-1)
        best = np.minimum(best, error * (rms * scale) ** 2)
    return best


@pytest.mark.every(4)
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("qtype", GRID_TYPES)
def test_errors_are_near_those_of_all_entries_and_scales(qtype: T, is_weighted: bool) -> None:
    """The bound's scales have all bits; those of a file have three or four, and a step for 256 weights."""
    values = weights()
    importance = np.exp(np.random.default_rng(4).standard_normal(256)) if is_weighted else np.ones(256)
    given = importance.astype(np.float32) if is_weighted else None
    decoded = gguf.quants.dequantize(quantize(values, qtype, given), qtype).astype(np.float64)
    # The step of a file is longer than that of least squares, which the bound has; codes and scales are compared.
    along, square = ((importance * one).sum(1, keepdims=True) for one in (decoded * values, decoded**2))
    got = ((decoded * along / square - values) ** 2 * importance).sum()
    steps = {T.IQ3_S: np.linspace(4, 9, 24), T.IQ1_S: np.linspace(0.4, 1.2, 24), T.IQ1_M: np.linspace(0.4, 1.2, 24)}
    tried = 1 / steps.get(qtype, np.linspace(12, 36, 32))
    bound = exhaustive(values, importance, qtype, tried).sum()
    assert got <= 1.12 * bound


@pytest.mark.parametrize("qtype", GRID_TYPES)
def test_what_a_matrix_gives_keeps_its_size(qtype: T) -> None:
    """Along what it should give, to a few percent; least squares would leave less the fewer the bits."""
    values = weights(16).astype(np.float64)
    decoded = gguf.quants.dequantize(quantize(values, qtype), qtype).astype(np.float64)
    kept = (decoded * values).sum() / (values**2).sum()
    assert 0.95 < kept < 1
    assert kept > (decoded * values).sum() ** 2 / ((decoded**2).sum() * (values**2).sum())


@pytest.mark.parametrize("qtype", GRID_TYPES)
def test_entries_near_a_cell_are_the_nearest(qtype: T) -> None:
    """A point in the middle of a cell gets the entry that no other is nearer than."""
    rng = np.random.default_rng(5)
    for book in books_of(qtype):
        levels = book.low + book.step * rng.integers(0, book.levels, (len(book.values), 200))
        values = np.unique(book.values)
        points = values[np.abs(levels[..., None] - values).argmin(-1)].astype(np.float32)  # 62 is no multiple of 8
        codes, gain = book.nearest(points, None, 1)
        distances = ((points[:, :, None] - book.values[:, None, :]) ** 2).sum(0)
        assert (distances[np.arange(200), codes] == distances.min(1)).all()
        assert np.allclose(gain, (points**2).sum(0) - distances.min(1), rtol=1e-5, atol=1e-3)


def test_numbers_of_minus_signs_are_even_where_they_must_be() -> None:
    """One weight of eight is negative: its sign or another's changes, whichever costs less."""
    values = np.full((1, 256), 0.5, dtype=np.float32)
    values[0, 3::8] = -0.01
    for qtype in EVEN:
        decoded = gguf.quants.dequantize(quantize(values, qtype), qtype)
        assert (decoded > 0).all()
    values[0, 3::8] = -0.5
    values[0, 5::8] = 0.02
    for qtype in EVEN:
        decoded = gguf.quants.dequantize(quantize(values, qtype), qtype).reshape(-1, 8)
        assert (np.flatnonzero((decoded < 0).all(0)) == [3, 5]).all()

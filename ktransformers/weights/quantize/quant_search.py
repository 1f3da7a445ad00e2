"""Scales, offsets and codes of least squared error, the arithmetic behind `quantize/write.py`. Knows no byte layout.

Arrays are kept as x [values of one sub-block, sub-blocks], so that every step is one vector operation over sub-blocks.
`w` of the same shape weighs each value's squared error; None stands for ones, and is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "F32Array",
    "Grid",
    "IntGrid",
    "TableGrid",
    "U8Array",
    "WholeScales",
    "fit_affine",
    "fit_scale",
    "inverse",
    "round_affine",
    "round_codes",
    "round_scales",
    "sums",
    "to_f16",
]

F32Array = npt.NDArray[np.float32]
_F16: np.dtype[np.floating] = np.dtype(np.float16)
U8Array = npt.NDArray[np.uint8]

AFFINE_TRIALS: dict[int, tuple[tuple[float, float], ...]] = {
    3: ((0.0, 0.0), (0.08, 0.08), (0.15, 0.05), (0.05, 0.15), (-0.05, -0.05), (0.2, 0.2)),
    15: ((0.02, 0.02), (0.04, 0.0), (-0.015, 0.02), (0.0, -0.015), (-0.03, 0.04)),
    31: ((0.0, 0.0), (0.0, -0.03), (0.02, 0.0), (-0.03, -0.03), (0.0, 0.02)),
}
"""Per largest code: shares of a sub-block's span that the codes leave out at its low and its high end.

Picked greedily from a grid, on normal and Laplace distributed weights, as those that together err least: within 2 % of
what the whole grid finds.
"""

_WEIGHTED_TRIALS = ((0.08, 0.0), (0.0, 0.08), (0.06, 0.06))
_POLISHES = 2


def inverse(scale: F32Array) -> F32Array:
    """Return 1 / scale, and 0 where the scale is 0 (then every code is 0 as well). Subnormal scales count as 0."""
    usable = np.abs(scale) > np.finfo(np.float32).tiny
    return np.divide(1.0, scale, out=np.zeros_like(scale), where=usable)


def to_f16(step: F32Array) -> tuple[U8Array, F32Array]:
    """Return fp16 bytes [n, 2] and the fp32 values [n] that they decode to."""
    half = step.astype(np.float16)
    return half.view(np.uint8).reshape(-1, 2), half.astype(np.float32)


def round_codes(x: F32Array, inverse: F32Array, shift: F32Array | None, low: int, high: int, out: F32Array) -> F32Array:
    """Return round(x * inverse + shift) clipped to [low, high]; all [values, sub-blocks]."""
    np.multiply(x, inverse, out=out)
    if shift is not None:
        out += shift
    np.rint(out, out=out)
    return np.clip(out, low, high, out=out)


def sums(a: F32Array, b: F32Array) -> F32Array:
    """Return the sums of products over the values of each sub-block."""
    out: F32Array = np.einsum("ij,ij->j", a, b)
    return out


# -- scale and offset


@dataclass(frozen=True, slots=True)
class _Moments:
    """What least squares needs of x: sums of weights, of weight * x, of weight * x * x; and weight * x itself."""

    w: F32Array | None
    wx: F32Array
    count: F32Array | np.float32
    sum_x: F32Array
    sum_xx: F32Array

    @classmethod
    def of(cls, x: F32Array, w: F32Array | None) -> _Moments:
        if w is None:
            return cls(None, x, np.float32(x.shape[0]), x.sum(axis=0), sums(x, x))
        wx = w * x
        return cls(w, wx, w.sum(axis=0), wx.sum(axis=0), sums(wx, x))

    def of_codes(self, codes: F32Array) -> tuple[F32Array, F32Array, F32Array]:
        """Weighted sums of q, q * q and x * q."""
        if self.w is None:
            return codes.sum(axis=0), sums(codes, codes), sums(self.wx, codes)
        weighted = self.w * codes
        return weighted.sum(axis=0), sums(weighted, codes), sums(self.wx, codes)


def fit_affine(x: F32Array, max_code: int, w: F32Array | None = None) -> tuple[F32Array, F32Array]:
    """Fit scale and offset [sub-blocks], both >= 0, with x ~ scale * code - offset of least squared error."""
    low = np.minimum(x.min(axis=0), 0.0)
    span = np.maximum(x.max(axis=0), 0.0) - low
    moments = _Moments.of(x, w)
    count = moments.count
    best_scale, best_offset = span / max_code, -low
    best_error = np.full_like(span, np.inf)
    codes = np.empty_like(x)
    for cut_low, cut_high in AFFINE_TRIALS[max_code] + (() if w is None else _WEIGHTED_TRIALS):
        inverse_scale = inverse(span * np.float32((1 - cut_low - cut_high) / max_code))
        shift = np.maximum(-(low + span * np.float32(cut_low)), 0) * inverse_scale
        for _ in range(2):
            round_codes(x, inverse_scale, shift, 0, max_code, codes)
            sum_q, sum_qq, sum_xq = moments.of_codes(codes)
            scale, offset = _least_squares(count, moments.sum_x, sum_q, sum_qq, sum_xq)
            error = (
                moments.sum_xx
                + scale * scale * sum_qq
                + count * offset * offset
                - 2 * (scale * sum_xq - offset * moments.sum_x + scale * offset * sum_q)
            )
            better = error < best_error
            best_error = np.where(better, error, best_error)
            best_scale = np.where(better, scale, best_scale)
            best_offset = np.where(better, offset, best_offset)
            inverse_scale = inverse(scale)
            shift = offset * inverse_scale
    return best_scale, best_offset


def _least_squares(
    count: F32Array | np.float32, sum_x: F32Array, sum_q: F32Array, sum_qq: F32Array, sum_xq: F32Array
) -> tuple[F32Array, F32Array]:
    """Least-squares scale and offset for fixed codes, the offset held at >= 0 (the format cannot store less)."""
    scale = (count * sum_xq - sum_x * sum_q) * inverse(count * sum_qq - sum_q * sum_q)
    offset = (scale * sum_q - sum_x) / count
    is_bounded = offset <= 0
    scale = np.where(is_bounded, sum_xq * inverse(sum_qq), scale)
    return np.maximum(scale, 0), np.where(is_bounded, 0, offset).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Affine:
    """Super-blocks in their stored form: fp16 bytes [n, 2] of both steps, whole scales and offsets, codes."""

    d_bytes: U8Array
    dmin_bytes: U8Array
    scales: F32Array
    offsets: F32Array
    codes: F32Array


def round_affine(
    x: F32Array, w: F32Array | None, scale: F32Array, offset: F32Array, shape: tuple[int, int, int]
) -> Affine:
    """Round scales and offsets of sub-blocks to whole numbers of a common fp16 step, and take the codes for these.

    shape: (sub-blocks of a super-block, largest whole number, largest code). Where scales have few bits, neighbours of
    the nearest whole numbers are tried, and the steps are fitted once more.
    """
    per_block, most, max_code = shape
    moments = _Moments.of(x, w)
    d_bytes, d = to_f16(scale.reshape(-1, per_block).max(axis=1) / most)
    dmin_bytes, dmin = to_f16(offset.reshape(-1, per_block).max(axis=1) / most)
    best = _nearest_pair(x, moments, (np.repeat(d, per_block), np.repeat(dmin, per_block)), (scale, offset), shape)
    d, dmin = _fitted_steps(moments, best, per_block, (d, dmin))
    (d_bytes, d), (dmin_bytes, dmin) = to_f16(d), to_f16(dmin)
    scales, offsets, codes = best
    inverse_scale = inverse(np.repeat(d, per_block) * scales)
    round_codes(x, inverse_scale, np.repeat(dmin, per_block) * offsets * inverse_scale, 0, max_code, codes)
    return Affine(d_bytes, dmin_bytes, scales, offsets, codes)


def _nearest_pair(
    x: F32Array,
    moments: _Moments,
    steps: tuple[F32Array, F32Array],
    wanted: tuple[F32Array, F32Array],
    shape: tuple[int, int, int],
) -> tuple[F32Array, F32Array, F32Array]:
    """The whole scale and offset around the wanted ones that err least, and their codes."""
    _, most, max_code = shape
    (d, dmin), (scale, offset) = steps, wanted
    scale0, offset0 = np.rint(scale * inverse(d)), np.rint(offset * inverse(dmin))
    best_gain = np.full_like(d, -np.inf)
    best_scale, best_offset = np.zeros_like(d), np.zeros_like(d)
    codes, best_codes = np.empty_like(x), np.zeros_like(x)
    for up in (0, -1, 1):
        whole = np.clip(scale0 + up, 0, most)
        inverse_scale = inverse(d * whole)
        for add in (0, -1, 1):
            other = np.clip(offset0 + add, 0, most)
            shift = dmin * other * inverse_scale
            round_codes(x, inverse_scale, shift, 0, max_code, codes)
            sum_q, sum_qq, sum_xq = moments.of_codes(codes)
            a, b = d * whole, dmin * other
            gain = 2 * (a * sum_xq - b * moments.sum_x + a * b * sum_q) - a * a * sum_qq - moments.count * b * b
            better = gain > best_gain
            best_gain = np.where(better, gain, best_gain)
            best_scale, best_offset = np.where(better, whole, best_scale), np.where(better, other, best_offset)
            np.copyto(best_codes, codes, where=better)
    return best_scale.astype(np.float32), best_offset.astype(np.float32), best_codes


def _fitted_steps(
    moments: _Moments, best: tuple[F32Array, F32Array, F32Array], per_block: int, steps: tuple[F32Array, F32Array]
) -> tuple[F32Array, F32Array]:
    """d and dmin of each super-block, by least squares over its sub-blocks; those given where that has no solution."""
    scales, offsets, codes = best
    sum_q, sum_qq, sum_xq = moments.of_codes(codes)

    def total(values: F32Array) -> npt.NDArray[np.float64]:
        added: npt.NDArray[np.float64] = values.astype(np.float64).reshape(-1, per_block).sum(axis=1)
        return added

    aa, bb = total(scales * scales * sum_qq), total(offsets * offsets * moments.count)
    ab, xa, xb = total(scales * offsets * sum_q), total(scales * sum_xq), total(offsets * moments.sum_x)
    # x ~ d A - dmin B
    det = aa * bb - ab * ab
    solvable = det > 1e-9 * aa * bb
    safe = np.where(solvable, det, 1.0)
    d = np.where(solvable, (bb * xa - ab * xb) / safe, steps[0])
    dmin = np.where(solvable, (ab * xa - aa * xb) / safe, steps[1])
    usable = (d > 0) & (dmin >= 0)
    return (
        np.where(usable, d, steps[0]).astype(np.float32),
        np.where(usable, dmin, steps[1]).astype(np.float32),
    )


# -- a scale alone


class Grid:
    """Grid of values that codes stand for, and those that a sub-block's largest magnitude is tried on, signed.

    tries: the largest value of a sub-block becomes -try; so a negative one puts it at the positive end.
    """

    tries: Sequence[float]

    def snap(self, r: F32Array, out: F32Array) -> F32Array:
        """Return the value of the grid nearest to each of r, in `out`, which may be r."""
        raise NotImplementedError


@dataclass(frozen=True)
class IntGrid(Grid):
    """Grid of the whole numbers low .. high."""

    low: int
    high: int
    tries: Sequence[float]

    def snap(self, r: F32Array, out: F32Array) -> F32Array:
        """Return the whole number low .. high nearest to each of r, in `out`, which may be r."""
        np.rint(r, out=out)
        return np.clip(out, self.low, self.high, out=out)


class TableGrid(Grid):
    """Grid of a table of whole numbers, whose middles are all multiples of one half: so halves of one are looked up."""

    def __init__(self, values: Sequence[int], tries: Sequence[float]):
        self.values, self.tries = np.array(values, dtype=np.float32), tries
        self._reach = 2 * max(abs(value) for value in values) + 2
        centres = (np.arange(-self._reach, self._reach, dtype=np.float32) + np.float32(0.5)) / 2
        nearest = np.abs(centres[:, None] - self.values[None]).argmin(axis=1)
        self._value_of, self._code_of = self.values[nearest], nearest.astype(np.uint8)

    def _bins(self, r: F32Array) -> npt.NDArray[np.intp]:
        halves = np.floor(r * np.float32(2))
        np.clip(halves, -self._reach, self._reach - 1, out=halves)
        bins: npt.NDArray[np.intp] = halves.astype(np.intp) + self._reach
        return bins

    def snap(self, r: F32Array, out: F32Array) -> F32Array:
        """Return the value of the table nearest to each of r, in `out`, which may be r."""
        return np.take(self._value_of, self._bins(r), out=out)

    def codes(self, r: F32Array) -> U8Array:
        """Return the number in the table of the value nearest to each of r."""
        return np.take(self._code_of, self._bins(r))


def fit_scale(x: F32Array, grid: Grid, w: F32Array | None = None) -> F32Array:
    """Fit a signed scale [sub-blocks] with x ~ scale * value of the grid, of least squared error."""
    largest = np.where(x.max(axis=0) > -x.min(axis=0), x.max(axis=0), x.min(axis=0))
    best_gain = np.full_like(largest, -1.0)  # how much the squared error falls below that of all-zero values
    best_scale: F32Array = np.zeros_like(largest)
    inverse_largest = inverse(largest)
    wx = x if w is None else w * x
    values = np.empty_like(x)
    for step in range(len(grid.tries) + (_POLISHES if w is not None else 0)):
        # Weighted, the first scales are farther from the best: it is tried itself, with the codes that it gives.
        shrink = inverse_largest * np.float32(-grid.tries[step]) if step < len(grid.tries) else inverse(best_scale)
        grid.snap(np.multiply(x, shrink, out=values), values)
        sum_xv = sums(wx, values)
        scale = sum_xv * inverse(sums(values, values) if w is None else sums(w * values, values))
        gain = scale * sum_xv
        better = gain > best_gain
        best_gain = np.where(better, gain, best_gain)
        best_scale = np.where(better, scale, best_scale)
    return best_scale


@dataclass(frozen=True, slots=True)
class WholeScales:
    """Which whole scales a type has: low .. high, where low is negative; or, if is_odd, twice these plus one."""

    low: int
    high: int
    is_odd: bool = False

    @property
    def lowest(self) -> int:
        """The scale that is farthest from 0."""
        return 2 * self.low + 1 if self.is_odd else self.low

    def nearest(self, wanted: F32Array, add: int) -> F32Array:
        """Return the scale nearest to each of `wanted`, or the one `add` further on; of those that there are."""
        if self.is_odd:
            return np.clip(np.floor(wanted / 2) + np.float32(add), self.low, self.high) * 2 + 1
        return np.clip(np.rint(wanted) + np.float32(add), self.low, self.high)


def round_scales(
    x: F32Array,
    w: F32Array | None,
    scale: F32Array,
    grid: Grid,
    shape: tuple[int, WholeScales],
    dtype: np.dtype[np.floating] = _F16,
) -> tuple[U8Array, F32Array, F32Array]:
    """Round scales to bytes [n, 2 or 4] of a step and whole scales [sub-blocks]; return these, and the scales that both
    make.

    shape: (sub-blocks of a step, the whole scales). The largest scale is stored as the lowest, which the sign of the
    step makes up for; neighbours are tried, and the step is fitted once more. dtype: of the step, fp16 or fp32.
    """
    per_step, whole_scales = shape
    by_step = scale.reshape(-1, per_step)
    at = np.abs(by_step).argmax(axis=1)
    stored = (by_step[np.arange(len(at)), at] / whole_scales.lowest).astype(dtype)
    d, whole = stored.astype(np.float32), np.zeros_like(scale)
    for _ in range(1 if w is None else 2):
        step = np.repeat(d, per_step)
        whole, sum_xv, sum_vv = _nearest_scale(x, w, step, scale * inverse(step), grid, whole_scales)
        top = (whole * sum_xv).astype(np.float64).reshape(-1, per_step).sum(axis=1)
        bottom = (whole * whole * sum_vv).astype(np.float64).reshape(-1, per_step).sum(axis=1)
        fitted = np.divide(top, bottom, out=d.astype(np.float64), where=bottom > 0)
        stored = fitted.astype(np.float32).astype(dtype)
        d = stored.astype(np.float32)
    return stored.view(np.uint8).reshape(-1, stored.itemsize), whole, np.repeat(d, per_step) * whole


def _nearest_scale(
    x: F32Array, w: F32Array | None, step: F32Array, wanted: F32Array, grid: Grid, whole_scales: WholeScales
) -> tuple[F32Array, F32Array, F32Array]:
    """The whole scale around `wanted` that errs least with this step, and weighted sums of x v and v v."""
    wx = x if w is None else w * x
    best_gain = np.full_like(step, -np.inf)
    best = [np.zeros_like(step) for _ in range(3)]
    values = np.empty_like(x)
    for add in (0, -1, 1):
        whole = whole_scales.nearest(wanted, add)
        made = step * whole
        grid.snap(np.multiply(x, inverse(made), out=values), values)
        sum_xv, sum_vv = sums(wx, values), sums(values if w is None else w * values, values)
        gain = made * (2 * sum_xv - made * sum_vv)
        better = gain > best_gain
        best_gain = np.where(better, gain, best_gain)
        best = [np.where(better, new, old) for new, old in zip((whole, sum_xv, sum_vv), best, strict=True)]
    return best[0], best[1], best[2]

"""Scales, signs and entries of grids of least squared error, for IQ1, IQ2 and IQ3. Knows no byte layout.

1. Several scales are tried for each sub-block, multiples of its (weighted) root mean square, each with the nearest of
   a few listed entries; the best is fitted to its entries by least squares and tried again, with more of them.
2. The scales become odd whole numbers of a common fp16 step; neighbours of the nearest one are tried with many
   entries. The step is fitted again, by least squares over the super-block.
3. The entries are taken once more for the scales that are stored, and the step is made longer than least squares
   has it: that shrinks what a matrix gives, by a tenth or more with so few bits, and from layer to layer more.

Where the eighth sign of 8 weights is not stored, an odd number of minus signs is made even at the weight that costs
least, first by its own size and, once entries are known, by what it is multiplied with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ktransformers.kernels.types import QuantType
from ktransformers.weights.quantize.grid_books import books_of
from ktransformers.weights.quantize.grid_layouts import GRID_LAYOUTS
from ktransformers.weights.quantize.quant_search import F32Array, U8Array, inverse, sums

__all__ = ["GRID_TYPES", "encode_grid"]

SUPER_BLOCK = 256
_OCTET = 8  # weights whose signs are a byte

# Entries looked at for each point: while scales are tried, when the best is tried again, and at last.
_FIRST, _SECOND, _LAST = 4, 12, 24
_POLISHES = 2

# Of the way from the step of least squares (0) to the one with which what a matrix gives keeps its size along what it
# should give (1). 1 is best for the model's probabilities (docs/quantize.md); a little less leaves errors below
# llama.cpp's.
_KEPT_SIZE = 0.85
_MOST_LONGER = 2.0
_MAX_STEP = 65504.0  # of fp16


@dataclass(frozen=True, slots=True)
class _Form:
    """sub: weights of a scale. A weight is d * factor * (2 scale + 1) * value.

    is_even: whether the minus signs of 8 weights are an even number. by_entry: whether each entry has its own delta,
    and not each sub-block. tries: what the root mean square of a sub-block is tried on, in
    values; found greedily on normal and Laplace distributed weights; 1 is for weights that are all alike.
    """

    sub: int
    factor: float
    tries: Sequence[float]
    max_scale: int = 15
    is_even: bool = False
    by_entry: bool = False


_FORMS: Mapping[QuantType, _Form] = {
    QuantType.IQ2_XXS: _Form(32, 1 / 8, (16, 18, 20, 24, 26), is_even=True),
    QuantType.IQ2_XS: _Form(16, 1 / 8, (14, 17, 19, 22, 26), is_even=True),
    QuantType.IQ2_S: _Form(16, 1 / 8, (14, 18, 20, 24, 26)),
    QuantType.IQ3_XXS: _Form(32, 1 / 4, (15, 18, 22, 27, 34), is_even=True),
    QuantType.IQ3_S: _Form(32, 1, (1, 4, 5, 6.5, 8)),
    QuantType.IQ1_S: _Form(32, 1, (0.4, 0.7, 1), max_scale=7),
    QuantType.IQ1_M: _Form(16, 1, (0.4, 0.7, 1), max_scale=7, by_entry=True),
}
GRID_TYPES = tuple(_FORMS)


def encode_grid(values: F32Array, weights: F32Array | None, qtype: QuantType) -> U8Array:
    """Encode fp32 values [rows, cols] as blocks uint8 [n, bytes]; weights of the same shape weigh squared errors."""
    search = _Search(values, weights, qtype)
    d, scales = search.stored_scales(search.best_scales())
    return search.written(d, scales)


class _Search:
    """The points of some super-blocks: [D, G * B], D weights of an entry, G entries of each of B sub-blocks.

    `points` are magnitudes where signs are stored apart, one of an octet perhaps negative to make their number even.
    """

    def __init__(self, values: F32Array, weights: F32Array | None, qtype: QuantType):
        self.qtype, self.form, self.books = qtype, _FORMS[qtype], books_of(qtype)
        self.values = np.concatenate([book.values for book in self.books], axis=1)
        self.dims = len(self.values)
        self.w = None if weights is None else self._laid(weights)
        x = self._laid(values)
        self.has_signs = len(self.books) == 1
        self.is_negative = x < 0 if self.has_signs else np.zeros(x.shape, dtype=bool)
        self.sizes = np.abs(x) if self.has_signs else x
        self.is_flipped = np.zeros_like(self.is_negative)
        self._aim(self.sizes)

    def _laid(self, values: F32Array) -> F32Array:
        sub = self.form.sub
        laid = values.reshape(-1, sub // self.dims, self.dims).transpose(2, 1, 0)
        return np.ascontiguousarray(laid, dtype=np.float32).reshape(self.dims, -1)

    def _octets(self, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """[D, G * B] as [8, octets of a sub-block * B]."""
        if self.dims == _OCTET:
            return array
        pairs = array.reshape(self.dims, self.form.sub // _OCTET, 2, -1)
        return pairs.transpose(2, 0, 1, 3).reshape(_OCTET, -1)

    def _aim(self, entries: F32Array) -> None:
        """Make the number of minus signs even where `entries`, the values to be multiplied with, make it cheapest."""
        self.points = self.sizes
        if self.form.is_even:
            cost = self.sizes * entries if self.w is None else self.w * self.sizes * entries
            octets, negative = self._octets(cost), self._octets(self.is_negative)
            at = np.asarray(octets).argmin(axis=0)
            flipped = np.zeros(octets.shape, dtype=bool)
            flipped[at, np.arange(len(at))] = np.count_nonzero(negative, axis=0) % 2 == 1
            if self.dims != _OCTET:
                parts = flipped.reshape(2, self.dims, self.form.sub // _OCTET, -1)
                flipped = parts.transpose(1, 2, 0, 3).reshape(self.sizes.shape)
            self.is_flipped = flipped
            self.points = np.where(flipped, -self.sizes, self.sizes)
        self.weighted = self.points if self.w is None else self.w * self.points

    # -- for given scales

    def _by_block(self, numbers: F32Array) -> F32Array:
        """Sums over the entries of each sub-block."""
        added: F32Array = numbers.reshape(self.form.sub // self.dims, -1).sum(axis=0)
        return added

    def _codes(self, scale: F32Array, count: int) -> npt.NDArray[np.intp]:
        """The best entries [G * B] for the scale of each sub-block; of the second book they count on."""
        scaled = self.points * np.tile(inverse(scale), self.form.sub // self.dims)
        found = [book.nearest(scaled, self.w, count) for book in self.books]
        if len(found) == 1:
            return found[0][0]
        (codes, gain), (others, other_gain) = found
        if self.form.by_entry:
            is_other = other_gain > gain
        else:
            is_other = np.tile(self._by_block(other_gain) > self._by_block(gain), self.form.sub // self.dims)
        return np.where(is_other, others + self.books[0].values.shape[1], codes)

    def _fit(self, codes: npt.NDArray[np.intp]) -> tuple[F32Array, F32Array]:
        """Weighted sums of point * value and value * value of each sub-block."""
        entries = np.take(self.values, codes, axis=1)
        product = self._by_block(sums(self.weighted, entries))
        square = sums(entries, entries) if self.w is None else sums(self.w * entries, entries)
        return product, self._by_block(square)

    # -- scales

    def best_scales(self) -> F32Array:
        """The scale of each sub-block [B], by least squares."""
        square = sums(self.points, self.weighted)
        count = np.full_like(square, self.dims) if self.w is None else self.w.sum(axis=0)
        rms: F32Array = np.sqrt(self._by_block(square) * inverse(self._by_block(count)))
        best_scale: F32Array = np.zeros_like(rms)
        best_gain = np.full_like(rms, -1.0)
        best_codes: npt.NDArray[np.intp] = np.zeros(self.points.shape[1], dtype=np.intp)
        for step in range(len(self.form.tries) + _POLISHES):
            is_first = step < len(self.form.tries)
            scale: F32Array = rms / np.float32(self.form.tries[step]) if is_first else best_scale
            codes = self._codes(scale, _FIRST if is_first else _SECOND)
            product, square = self._fit(codes)
            scale = np.maximum(product, 0) * inverse(square)
            gain = scale * product
            better = gain > best_gain
            best_gain, best_scale = np.where(better, gain, best_gain), np.where(better, scale, best_scale)
            best_codes = np.where(np.tile(better, self.form.sub // self.dims), codes, best_codes)
            if step == len(self.form.tries) and self.form.is_even:
                self._aim(np.take(self.values, best_codes, axis=1))
        return best_scale

    def stored_scales(self, scale: F32Array) -> tuple[npt.NDArray[np.float16], F32Array]:
        """The step d [n] and the whole scales [B]."""
        per_block, most = SUPER_BLOCK // self.form.sub, 2 * self.form.max_scale + 1
        d = (scale.reshape(-1, per_block).max(axis=1) / np.float32(most * self.form.factor)).astype(np.float16)
        unit = np.repeat(d.astype(np.float32) * np.float32(self.form.factor), per_block)
        nearest = np.rint((scale * inverse(unit) - 1) / 2)
        best_gain = np.full_like(scale, -np.inf)
        best = [np.zeros_like(scale) for _ in range(3)]
        for add in (0, -1, 1):
            whole = np.clip(nearest + np.float32(add), 0, self.form.max_scale)
            made = unit * (2 * whole + 1)
            product, square = self._fit(self._codes(made, _SECOND))
            gain = made * (2 * product - made * square)
            better = gain > best_gain
            best_gain = np.where(better, gain, best_gain)
            best = [np.where(better, new, old) for new, old in zip((whole, product, square), best, strict=True)]
        whole, product, square = best
        return self._fitted_step(d, whole, product, square), whole

    def _fitted_step(
        self, d: npt.NDArray[np.float16], whole: F32Array, product: F32Array, square: F32Array
    ) -> npt.NDArray[np.float16]:
        """d of each super-block by least squares for entries with these sums."""
        factors = np.float32(self.form.factor) * (2 * whole + 1)
        per_block = SUPER_BLOCK // self.form.sub
        top = (factors * product).astype(np.float64).reshape(-1, per_block).sum(axis=1)
        bottom = (factors * factors * square).astype(np.float64).reshape(-1, per_block).sum(axis=1)
        fitted = np.divide(top, bottom, out=d.astype(np.float64), where=(bottom > 0) & (top > 0))
        rounded: npt.NDArray[np.float16] = fitted.astype(np.float16)
        return rounded

    def _longer_step(self, d: npt.NDArray[np.float16], whole: F32Array, product: F32Array) -> npt.NDArray[np.float16]:
        """d of least squares, of entries with these products, made longer: see _KEPT_SIZE."""
        per_block = SUPER_BLOCK // self.form.sub
        along = (np.float32(self.form.factor) * (2 * whole + 1) * product).astype(np.float64)
        along = along.reshape(-1, per_block).sum(axis=1) * d
        wanted = self._by_block(sums(self.points, self.weighted)).astype(np.float64).reshape(-1, per_block).sum(axis=1)
        share = np.divide(wanted, along, out=np.ones_like(wanted), where=along > 0)
        longer = d * np.clip(share, 1, _MOST_LONGER) ** _KEPT_SIZE
        rounded: npt.NDArray[np.float16] = np.minimum(longer, _MAX_STEP).astype(np.float16)
        return rounded

    # -- what is stored

    def written(self, d: npt.NDArray[np.float16], whole: F32Array) -> U8Array:
        """The blocks; entries are taken for the scales that the file will have, and the step once more for them."""
        factors = np.float32(self.form.factor) * (2 * whole + 1)
        unit = np.repeat(d.astype(np.float32), SUPER_BLOCK // self.form.sub)
        codes = self._codes(unit * factors, _LAST)
        if self.form.is_even:
            self._aim(np.take(self.values, codes, axis=1))
            codes = self._codes(unit * factors, _LAST)
        product, square = self._fit(codes)
        d = self._longer_step(self._fitted_step(d, whole, product, square), whole, product)
        size = self.books[0].values.shape[1]
        ordered = codes.reshape(self.form.sub // self.dims, -1).T.reshape(len(d), SUPER_BLOCK // self.dims)
        if self.has_signs:
            minus = np.asarray(self._octets(self.is_negative ^ self.is_flipped))
            packed = np.packbits(minus, axis=0, bitorder="little").astype(np.int64)
            beside = packed.reshape(self.form.sub // _OCTET, -1).T.reshape(len(d), SUPER_BLOCK // _OCTET)
        else:
            beside = (ordered >= size).astype(np.int64)
        scales = whole.astype(np.int64).reshape(len(d), -1)
        return GRID_LAYOUTS[self.qtype](d, ordered.astype(np.int64) % size, beside, scales)

"""Compares two results of one computation: to the bit, number by number, or row by row against what a layer changes.

Three questions, and which one a check asks follows from what may differ:

    the same operations in the same order      same_bits
    fp32 sums in another order                 close            of the numbers, or of the largest of them
    a layer, whose result is its input and a   difference       of the change, row by row, with what rounding explains
    change, perhaps of rounded activations

Knows tensors; not how they were computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MEDIAN", "Tolerance", "close", "difference", "quantile", "same_bits"]

_TINY = torch.finfo(torch.float32).tiny

Measure = Callable[[Tensor], Tensor]
"""One number of the errors of all rows, [T]."""

MEDIAN: Measure = torch.median
"""What half of the rows keep to: those that are sent to other experts for a difference in the last bit are few."""


def quantile(share: float) -> Measure:
    """Return the measure that is the error which `share` of the rows keep to."""
    return lambda rows: torch.quantile(rows, share)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether the numbers are the same, those of NaN too, on any device, in any type and shape."""
    bits = [rows.float().cpu().contiguous().view(torch.int32).flatten() for rows in (one, other)]
    return torch.equal(*bits)


def close(got: object, want: Tensor, *, relative: float = 1e-4, absolute: float = 1e-5, of_largest: float = 0) -> bool:
    """Whether `got` is a tensor of the same shape and numbers.

    The tolerance is for rounding: both compute in fp32, in another order at most. Another formula is off by a good part
    of the numbers, which are of about 1. of_largest: in place of both tolerances, a share of the largest number.
    """
    if not isinstance(got, Tensor) or got.shape != want.shape:
        return False
    if of_largest:
        relative, absolute = 0.0, of_largest * float(want.abs().max())
    return torch.allclose(got, want, rtol=relative, atol=absolute)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much of a row's change the error of the row may be.

        floor + margin * (epsilon * |result| + |result with rounded activations - result|) / |change|

    floor: what sums in another order and tables of angles explain. epsilon: the relative rounding of the type in which
    changes are added up. margin: how much further off than these single roundings it may be.
    """

    floor: float
    epsilon: float = 0.0
    margin: float = 0.0


def difference(
    got: Tensor,
    want: Tensor,
    tolerance: Tolerance,
    *,
    given: Tensor | None = None,
    rounded: Tensor | None = None,
    last: int = 0,
    measures: Sequence[Measure] = (MEDIAN,),
) -> str | None:
    """Say how far `got` is off, in words; None when it is near enough by all measures.

    got, want: [..., T, H]. given: what a layer was given, of which `want` is a change; None: all of `want` counts.
    rounded: `want`, computed of activations that are rounded as those of `got` are. last: rows that are compared, from
    the end; 0: all.
    """
    got, want = got.float(), want.float()
    change = (want if given is None else want - given.float()).norm(dim=-1).clamp_min(_TINY)
    noise = tolerance.epsilon * want.norm(dim=-1)
    if rounded is not None:
        noise = noise + (rounded.float() - want).norm(dim=-1)
    error, allowed = (got - want).norm(dim=-1) / change, tolerance.floor + tolerance.margin * noise / change
    error, allowed = (rows.reshape(-1, rows.shape[-1]).amax(0)[-last:] for rows in (error, allowed))
    for measure in measures:
        value, most = float(measure(error)), float(measure(allowed))
        if not value <= most:  # NaN too
            return f"off by {value:.2g}, of which rounding explains {most:.2g}"
    return None
